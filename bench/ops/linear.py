"""Linear maps in the harness: their cases and work. The baseline is torch's own product."""

from __future__ import annotations

from typing import Any

from ..registry import Case, Contender, Lazy, Operator, Work
from . import _shared as shared

torch = Lazy("torch")

OP = "linear"

CASES = [
    Case(OP, name, {"B": 1, "N": 2048, "I": 1024, "J": width}, source, dtypes=shared.FLOAT32, devices=shared.CPU)
    for name, width, source in (
        ("square", 1024, "attention's projections, a width of 1024"),
        ("inner", 4096, "a feed-forward layer's first map, a width of 1024"),
    )
]


def arguments(case, draw) -> dict[str, Any]:
    from retro_kernels.testing import inputs

    return inputs.linear(**{x: case.shape[x] for x in "BNIJ"}, draw=draw) | dict(case.options)


def work(case, itemsize: int, mode: str) -> Work:
    n, i, j = case.shape["B"] * case.shape["N"], case.shape["I"], case.shape["J"]
    forward = Work(2.0 * n * i * j, (n * i + i * j + j + n * j) * itemsize)
    # backward: reads both matrices and d(y) once each, writes the three gradients
    return (
        forward if mode != "fwdbwd" else forward + Work(4.0 * n * i * j, (2 * n * i + 2 * i * j + j + n * j) * itemsize)
    )


def eager(input, weight, bias):
    """torch's own."""
    return torch.nn.functional.linear(input, weight, bias)


OPERATOR = Operator(OP, ("y",), ("input", "weight", "bias"), arguments, shared.single(OP), work)
BASELINES = (Contender(OP, "eager", eager),)
