"""Root-mean-square norm in the harness: its case and work. The baseline is torch's own."""

from __future__ import annotations

from typing import Any

from ..registry import Case, Contender, Lazy, Operator, Work
from . import _shared as shared

torch = Lazy("torch")

OP = "rms_norm"

CASES = [
    Case(
        OP,
        "residual",
        {"B": 4, "N": 2048, "D": 1024},
        "a block's input, a width of 1024",
        dtypes=shared.FLOAT32,
        devices=shared.CPU,
    )
]


def arguments(case, draw) -> dict[str, Any]:
    from retro_kernels.testing import inputs

    return inputs.rms(**{x: case.shape[x] for x in "BND"}, draw=draw) | dict(case.options)


def work(case, itemsize: int, mode: str) -> Work:
    elements = case.shape["B"] * case.shape["N"] * case.shape["D"]
    forward = Work(4.0 * elements, 2 * elements * itemsize)
    # backward: reads x and d(y), writes d(x)
    return forward if mode != "fwdbwd" else forward + Work(8.0 * elements, 3 * elements * itemsize)


def eager(input, weight, eps):
    """torch's own."""
    return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)


OPERATOR = Operator(OP, ("y",), ("input", "weight"), arguments, shared.single(OP), work)
BASELINES = (Contender(OP, "eager", eager),)
