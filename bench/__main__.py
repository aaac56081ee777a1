"""`python -m bench COMMAND`: list, check, run, profile, static, emulate, estimate, predicted, host, bounds, ab,
compare, report, doctor, compile, tune, gpu.

Exit codes: 0 ok, 1 confirmed regression, 2 numerics failure, 3 inconclusive or not comparable, 4 usage, 5 nothing
measured.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import os
import sys
import traceback
from pathlib import Path

from .commands import exits

HERE = Path(__file__).resolve().parent
COMMANDS = (
    "list",
    "check",
    "run",
    "profile",
    "static",
    "emulate",
    "estimate",
    "predicted",
    "host",
    "bounds",
    "ab",
    "compare",
    "report",
    "doctor",
    "compile",
    "tune",
    "gpu",
)


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.print_usage(sys.stderr)
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(exits.USAGE)


def parser(wanted: str | None = None) -> argparse.ArgumentParser:
    """With the options of the command that is `wanted`, or of all:
    importing what measures takes seconds, and a report measures nothing.
    """
    top = Parser(
        prog="python -m bench",
        description="Are the kernels right, and how fast are they on this machine?",
        epilog=__doc__.split("\n\n")[1],
    )
    commands = top.add_subparsers(dest="command", required=True, parser_class=Parser, metavar="COMMAND")
    for name in COMMANDS:
        about = described(name)
        sub = commands.add_parser(name, help=about.splitlines()[0], description=about)
        if wanted not in (None, name):
            continue
        module = importlib.import_module(f"{__package__}.commands.{name}")
        sub.add_argument(
            "--plugin",
            action="append",
            default=[],
            metavar="MODULE",
            help="import a module that calls bench.register(...)",
        )
        module.add_arguments(sub)
        sub.set_defaults(execute=module.execute)
    return top


def described(name: str) -> str:
    """The docstring of a command's module, read and not imported."""
    return ast.get_docstring(ast.parse((HERE / "commands" / f"{name}.py").read_text(encoding="utf-8")))


def main(argv: list[str] | None = None) -> int:
    # the profiler announces every start and stop on stderr otherwise; read when its library is first used
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    words = sys.argv[1:] if argv is None else argv
    try:
        arguments = parser(words[0] if words and words[0] in COMMANDS else "").parse_args(words)
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else exits.OK
    try:
        for name in arguments.plugin:
            load(name)
        return arguments.execute(arguments)
    except SystemExit as e:  # whoever called it, no verdict was reached
        print(f"bench: something called sys.exit({e.code!r}); no verdict on any kernel", file=sys.stderr)
        return exits.INCONCLUSIVE
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
    except (Exception, SystemExit) as e:
        raise exits.UsageError(f"--plugin {plugin}: {type(e).__name__}: {e}") from e


def command() -> None:
    """The console script `retro-bench`."""
    sys.exit(main())


if __name__ == "__main__":
    command()
