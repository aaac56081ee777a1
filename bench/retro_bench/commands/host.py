"""measure the host's time for a call

Times small calls whose layout was met before, in microseconds of CPU time: checks, choice of backend, plan, arguments
and autograd. CPU kernels compute; launches of Triton kernels are no-ops. `ab` gates these times.
"""

import argparse
import json

from . import exits, options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_ops(parser, cases=False)
    add, both = parser.add_argument, ("cpu", "triton")
    add("--backend", type=options.names, default=both, metavar="NAME[,NAME]", help="time cpu or triton (default both)")
    add("--json", type=options.output, metavar="FILE", help="also write {id: seconds} to this file")


def execute(arguments: argparse.Namespace) -> int:
    ops = options.ops(arguments)
    if unknown := set(arguments.backend) - {"cpu", "triton"}:
        raise exits.UsageError(f"--backend: expected some of cpu, triton; got {', '.join(sorted(unknown))}")
    from ..measure import host

    seconds_of = host.measure(tuple(arguments.backend), ops)
    for name, seconds in seconds_of.items():
        print(f"{name:<52} {seconds * 1e6:8.1f} us")
    if arguments.json:
        arguments.json.write_text(json.dumps(seconds_of, indent=1))
    return exits.OK if len(seconds_of) > 1 else exits.NOTHING_MEASURED
