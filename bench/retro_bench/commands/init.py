"""write a plug-in, its cases and a workflow into a repository

The plug-in works as it is: `retro-bench check --plugin bench_plugin`. If one of the files exists, nothing is written
and the exit code is 4.
"""

import argparse
from pathlib import Path

from . import exits

STARTER = Path(__file__).resolve().parent.parent / "starter"
#: file of the package -> its place in a repository
FILES = {"bench_plugin.py": "bench_plugin.py", "kernels.yml": ".github/workflows/kernels.yml"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", type=Path, default=Path(), help="write to this repository (default: .)")


def execute(arguments: argparse.Namespace) -> int:
    if not arguments.folder.is_dir():
        raise exits.UsageError(f"init {arguments.folder}: no such folder")
    if taken := [name for name in FILES.values() if (arguments.folder / name).exists()]:
        raise exits.UsageError(f"init: {', '.join(taken)} exists already; nothing was written")
    for name, place in FILES.items():
        target = arguments.folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text((STARTER / name).read_text(encoding="utf-8"), encoding="utf-8")
        print(f"written: {target}")
    print("next: retro-bench check --plugin bench_plugin")
    return exits.OK
