"""measure the host's time for a call

Times checks, choice of backend, plan, arguments and autograd of small calls whose layout was met before, in
microseconds of CPU time. Triton kernels are launched into nothing; CPU kernels compute. `ab` gates these times.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..registry import OPERATORS
from . import exits, options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_kernels(parser, cases=False)
    parser.add_argument(
        "--backend",
        type=options.names,
        default=("cpu", "triton"),
        metavar="NAME[,NAME]",
        help="time cpu or triton (default both)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write {id: seconds} here")


def execute(arguments: argparse.Namespace) -> int:
    if unknown := set(arguments.kernel or ()) - set(OPERATORS):
        raise exits.UsageError(f"--kernel: expected some of {', '.join(OPERATORS)}; got {', '.join(sorted(unknown))}")
    if unknown := set(arguments.backend) - {"cpu", "triton"}:
        raise exits.UsageError(f"--backend: expected some of cpu, triton; got {', '.join(sorted(unknown))}")
    from ..measure import host

    seconds_of = host.measure(tuple(arguments.backend), tuple(arguments.kernel or ()))
    for name, seconds in seconds_of.items():
        print(f"{name:<52} {seconds * 1e6:8.1f} us")
    if arguments.json:
        arguments.json.write_text(json.dumps(seconds_of, indent=1))
    return exits.OK if len(seconds_of) > 1 else exits.NOTHING_MEASURED
