"""Floating-point operations of every op, for `torch.utils.flop_counter.FlopCounterMode`.

As in torch's formulas for its own attention, a multiply-add counts as 2, only matrix products are counted, and every
query is multiplied with every key: masks, windows and causality do not lower a count. The products that a backward pass
computes again count too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import private

#: operator -> formula of its arguments, as `register_flop_formula(get_raw=True)` takes it
_FORMULAS: dict[object, Callable[..., int]] = {}


def register(op: str, call_type: type) -> None:
    """Keep the formulas of an op for counters: `flops` of its call."""
    operators = torch.ops.retro_kernels
    fields = len(call_type._fields)
    _FORMULAS[getattr(operators, op)] = lambda *args, **_: call_type(*args[:fields]).flops()[0]
    _FORMULAS[getattr(operators, f"{op}_backward")] = lambda *args, **_: call_type(*args[:fields]).flops()[1]


def announce() -> None:
    """Give the formulas to open counters. torch's registry is left alone, because its module imports Triton."""
    for mode in private.dispatch_modes():
        registry = getattr(getattr(mode, "counter", None), "flop_registry", {})
        for operator, formula in _FORMULAS.items():
            registry.setdefault(operator, formula)
