"""kernels, backends, cases, and what this machine can run

One line a contender, with the reason where this machine can't run it, then one line a case; a star marks the default selection.
"""

from __future__ import annotations

import argparse

from .. import exits, plan
from ..registry import OPERATORS, Case, Contender, cases_of, contenders_of
from . import _options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _options.add_selection(parser)


def execute(arguments: argparse.Namespace) -> int:
    chosen = _options.selection(arguments)
    print(f"device {chosen.device}; * = in the default selection")
    default = {(case.kernel, case.name) for case in plan.cases(plan.Selection(chosen.device))}
    for kernel in OPERATORS:
        cases = [case for case in cases_of(kernel) if plan.matches(kernel, chosen.kernels) and plan.matches(case.name, chosen.cases)]
        if not cases:
            continue
        print(f"\n{kernel}")
        for contender in sorted(contenders_of(kernel), key=lambda c: c.role):
            print(f"  {contender.role:<9} {contender.name:<15} {_why(contender, cases, chosen.device)}")
        for case in cases:
            star = "*" if (kernel, case.name) in default else " "
            print(
                f"  case    {star} {case.name:<18} {_shape(case):<52} {','.join(case.modes):<11} {plan.misfit(case, chosen.device) or case.source}"
            )
    return exits.OK


def _why(contender: Contender, cases: list[Case], device: str) -> str:
    """ "yes", or why not: the reason that holds for all cases, or how many it can't serve and the first reason."""
    reasons = [plan.unfit(contender, case, "float32", device, False) for case in cases]
    bad = [reason for reason in reasons if reason]
    if not bad:
        return "yes" if contender.role != "baseline" or device in contender.default_on else f"on request (--baselines {contender.name})"
    return f"no: {bad[0]}" if len(bad) == len(cases) else f"yes, but not for {len(bad)} of {len(cases)} cases: {bad[0]}"


def _shape(case: Case) -> str:
    options = [f"{k}={v}" for k, v in case.options.items()]
    return " ".join([f"{k}={v}" for k, v in case.shape.items()] + options)
