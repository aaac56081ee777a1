"""`retro-bench COMMAND`, or `python -m retro_bench COMMAND`."""

import argparse
import ast
import contextlib
import importlib
import os
import signal
import sys
import textwrap
import traceback
import warnings
from pathlib import Path

from . import registry
from .commands import exits
from .records import environment

HERE = Path(__file__).resolve().parent
COMMANDS = (
    *("list", "check", "run", "profile", "static", "emulate", "estimate", "host", "ab"),
    *("report", "history", "doctor", "tune", "gpu", "init"),
)
CODES = ", ".join(f"{code} {meaning}" for code, meaning in enumerate(exits.MEANINGS))
WIDTH = 80  # columns of a help text


class Help(argparse.HelpFormatter):
    """Help of at most WIDTH columns. A name with a hyphen is not broken."""

    def __init__(self, prog: str):
        super().__init__(prog, width=WIDTH, max_help_position=24)

    def _split_lines(self, text, width):
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text, width, indent):
        return textwrap.fill(" ".join(text.split()), width, break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    def __init__(self, **options):
        super().__init__(formatter_class=Help, allow_abbrev=False, **options)

    def error(self, message: str):
        self.print_usage(sys.stderr)
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(exits.USAGE)


def parser(wanted: str | None = None) -> argparse.ArgumentParser:
    """Build the parser, with the options of the command `wanted` or of all."""
    top = Parser(
        prog="retro-bench",
        description="Are the kernels right, and how fast are they on this machine?",
        epilog=f"Exit codes: {CODES}. --version prints the version.",
    )
    commands = top.add_subparsers(dest="command", required=True, parser_class=Parser, metavar="COMMAND")
    for name in COMMANDS:
        first, _, more = described(name).partition("\n\n")
        whole = f"{first[0].upper()}{first[1:]}. {more}"
        sub = commands.add_parser(name, help=first, description=whole, epilog=f"Exit codes: {CODES}.")
        if wanted not in (None, name):
            continue
        module = importlib.import_module(f"{__package__}.commands.{name}")
        module.add_arguments(sub)
        text = "import this module, from the working directory first, and select the kernels that it registers"
        sub.add_argument("--plugin", action="append", default=[], metavar="MODULE", help=text)
        sub.set_defaults(execute=module.execute)
    return top


def described(name: str) -> str:
    """Read the docstring of a command's module without importing it."""
    return ast.get_docstring(ast.parse((HERE / "commands" / f"{name}.py").read_text(encoding="utf-8")))


def main(argv: list[str] | None = None) -> int:
    # silence the profiler's start and stop messages; its library reads the variable at its first use
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")  # no user of the harness configures it
    words = sys.argv[1:] if argv is None else argv
    if words == ["--version"]:
        print(f"retro-bench {importlib.import_module('retro_kernels').__version__}")
        return exits.OK
    arguments = argparse.Namespace()
    try:
        for name in plugins(words):  # before the parser is made, because its help lists their kernels
            load(name)
        try:
            arguments = parser(words[0] if words and words[0] in COMMANDS else "").parse_args(words)
        except SystemExit as e:
            return e.code if isinstance(e.code, int) else exits.OK
        if getattr(arguments, "op", ...) is None and arguments.plugin and not getattr(arguments, "launch", None):
            arguments.op = registry.of_plugins(arguments.plugin)
        return arguments.execute(arguments)
    except SystemExit as e:  # a plug-in or a library may raise it
        print(f"retro-bench: something called sys.exit({e.code!r}); no verdict on any kernel", file=sys.stderr)
        return exits.NOT_COMPARED
    except KeyboardInterrupt:
        file = getattr(arguments, "resume", None) or getattr(arguments, "json", None)
        kept = f"; what was measured is in {file}" if file and file.exists() else ""
        print(f"retro-bench: interrupted{kept}", file=sys.stderr)
        return exits.NOTHING_MEASURED
    except BrokenPipeError:  # the reader exited before the verdict
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exits.NOT_COMPARED
    except (exits.UsageError, OSError) as e:  # the second mostly for a file that can't be read or written
        print(f"retro-bench: {e}", file=sys.stderr)
        return exits.USAGE
    except Exception:  # Python would exit with 1, the code of a regression
        traceback.print_exc()
        print("retro-bench: a fault of the harness; no verdict on any kernel", file=sys.stderr)
        return exits.NOT_COMPARED


def plugins(words: list[str]) -> list[str]:
    """Return the modules that `--plugin` names."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    early.add_argument("--plugin", action="append", default=[])
    with contextlib.suppress(argparse.ArgumentError):  # the main parser reports the error
        return early.parse_known_args(words)[0].plugin
    return []


def load(plugin: str) -> None:
    """Import a plug-in, from the working directory first. Raises UsageError if it raises any exception."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        with registry.plugin(plugin):
            module = importlib.import_module(plugin)
    except (Exception, SystemExit) as e:
        raise exits.UsageError(f"--plugin {plugin}: {type(e).__name__}: {e}") from e
    environment.measured = Path(module.__file__).resolve()


def command() -> None:
    """Run the console script `retro-bench`."""
    if sys.argv[1:2] in (["ab"], ["gpu"]):  # SIGTERM acts as Ctrl-C: the checkout is removed, and the children end
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())


if __name__ == "__main__":
    command()
