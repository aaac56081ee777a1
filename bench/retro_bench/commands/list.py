"""show ops, backends and cases, and what this machine can run

Prints a line for each contender, then one for each case. A star marks the default selection.
"""

import argparse
from pathlib import Path

from ..measure import choose
from ..registry import OPERATORS, Case, Contender, cases_of, contenders_of
from ..report import tables
from . import exits, options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_selection(parser)


def execute(arguments: argparse.Namespace) -> int:
    driver = Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()  # torch may still be unable to use the GPU
    device = arguments.device or ("cuda" if driver else "cpu")
    selection = options.named(arguments, device)
    _show(f"device {device}; * = in the default selection")
    default = {(case.op, case.name) for case in choose.cases(choose.Selection(device))}
    for op in OPERATORS:
        cases = [case for case in cases_of(op) if choose.matches(case.name, selection.cases)]
        if not cases or not choose.matches(op, selection.ops):
            continue
        print(f"\n{op}")
        for contender in sorted(contenders_of(op), key=lambda c: c.role):
            status = _status(contender, cases, device)
            _show(f"  {contender.role:<9} {contender.name:<15} {status}")
        for case in cases:
            star = "*" if (op, case.name) in default else " "
            modes = ",".join(case.modes)
            _show(f"  case    {star} {case.name:<18} {_shape(case):<52} {modes:<11} {case.source}")
    return exits.OK


def _show(line: str) -> None:
    """Print a line, folded at a terminal's width."""
    print(*tables.notes([line], indent=" " * 12))


def _status(contender: Contender, cases: list[Case], device: str) -> str:
    """Return "yes", or the first reason and the number of cases that are not served."""
    if device not in contender.devices:
        return f"no: runs on {', '.join(contender.devices)} only"
    if contender.role != "baseline":
        return f"on {', '.join(contender.devices)}"
    bad = [why for case in cases if (why := contender.reason(case, "float32", device))]
    if not bad:
        return "yes" if device in contender.default_on else f"on request (--baselines {contender.name})"
    return f"no: {bad[0]}" if len(bad) == len(cases) else f"yes, but not for {len(bad)} of {len(cases)} cases: {bad[0]}"


def _shape(case: Case) -> str:
    return " ".join(f"{k}={v}" for part in (case.shape, case.options) for k, v in part.items())
