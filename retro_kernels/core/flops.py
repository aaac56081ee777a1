"""Floating-point operations of every op, for `torch.utils.flop_counter.FlopCounterMode`.

They are counted as torch counts its own attention: 2 a multiply-add of the matrix products, every query with every key.
Masks, windows and causality do not lower a count. A backward pass counts recomputed products too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from . import private

#: operator -> formula of its arguments, as `register_flop_formula(get_raw=True)` takes it
_FORMULAS: dict[object, Callable[..., int]] = {}


def register(op: str, call_type: type) -> None:
    """Register the formulas of an op with torch's counter: `flops` of its call."""
    operators = torch.ops.retro_kernels
    fields = len(call_type._fields)
    _FORMULAS[getattr(operators, op)] = lambda *args, **_: call_type(*args[:fields]).flops()[0]
    _FORMULAS[getattr(operators, f"{op}_backward")] = lambda *args, **_: call_type(*args[:fields]).flops()[1]
    announce()


def announce() -> None:
    """Register the formulas with torch's counter and with open counters, once the counter's module is imported.

    It is not imported here, because it imports Triton.
    """
    counting = sys.modules.get("torch.utils.flop_counter")
    if counting is None or not private.dispatch_modes():
        return
    for operator, formula in _FORMULAS.items():
        if operator not in counting.flop_registry:
            counting.register_flop_formula(operator, get_raw=True)(formula)
    for mode in private.dispatch_modes():
        counter = getattr(mode, "counter", None)
        if isinstance(counter, counting.FlopCounterMode):
            for operator in _FORMULAS:
                counter.flop_registry.setdefault(operator, counting.flop_registry[operator])
