"""`python -m bench COMMAND`: list, check, run, profile, static, ab, compare, report, doctor, tune.

Exit codes: 0 ok, 1 confirmed regression, 2 numerics failure, 3 inconclusive or not comparable, 4 usage, 5 nothing measured.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import traceback

from . import exits

COMMANDS = ("list", "check", "run", "profile", "static", "ab", "compare", "report", "doctor", "tune")


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.print_usage(sys.stderr)
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(exits.USAGE)


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="python -m bench", description="Are the kernels right, and how fast are they on this machine?", epilog=__doc__.split("\n\n")[1]
    )
    commands = top.add_subparsers(dest="command", required=True, parser_class=Parser, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"{__package__}.commands.{name}_command")
        sub = commands.add_parser(name, help=module.__doc__.splitlines()[0], description=module.__doc__)
        sub.add_argument("--plugin", action="append", default=[], metavar="MODULE", help="import a module that calls bench.register(...)")
        module.add_arguments(sub)
        sub.set_defaults(execute=module.execute)
    return top


def main(argv: list[str] | None = None) -> int:
    # the profiler announces every start and stop on stderr otherwise; read when its library is first used
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        arguments = parser().parse_args(argv)
        for name in arguments.plugin:
            load(name)
        return arguments.execute(arguments)
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else exits.OK
    except exits.UsageError as e:
        print(f"bench: {e}", file=sys.stderr)
        return exits.USAGE
    except KeyboardInterrupt:
        print("bench: interrupted; what was measured is in the file", file=sys.stderr)
        return exits.NOTHING_MEASURED
    except BrokenPipeError:  # nobody reads on, so nobody has seen a verdict
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exits.INCONCLUSIVE
    except OSError as e:  # a file that can't be read or written
        print(f"bench: {e}", file=sys.stderr)
        return exits.USAGE
    except Exception:  # Python's own exit code would be 1: a regression, which nobody has seen
        traceback.print_exc()
        print("bench: a fault of the harness; no verdict on any kernel", file=sys.stderr)
        return exits.INCONCLUSIVE


def load(plugin: str) -> None:
    """Imports it; raises UsageError for whatever it raises."""
    try:
        importlib.import_module(plugin)
    except Exception as e:
        raise exits.UsageError(f"--plugin {plugin}: {type(e).__name__}: {e}") from e


def command() -> None:
    """The console script `retro-bench`."""
    sys.exit(main())


if __name__ == "__main__":
    command()
