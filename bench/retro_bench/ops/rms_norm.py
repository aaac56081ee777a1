"""Root-mean-square norm in the harness: its case and work. The baseline is torch's own."""

from __future__ import annotations

from ..registry import Contender, Operator, Work
from . import _shared as shared
from ._shared import torch

OP = "rms_norm"

CASES = [shared.case(OP, "residual", "a block's input, a width of 1024", "B=4 N=2048 D=1024", **shared.FLOAT32_ON_CPU)]


def work(case, itemsize: int, mode: str) -> Work:
    elements = shared.product(case, "BND")
    forward = Work(4.0 * elements, 2 * elements * itemsize)
    # backward: reads x and d(y), writes d(x)
    return forward if mode != "fwdbwd" else forward + Work(8.0 * elements, 3 * elements * itemsize)


def eager(input, weight, eps):
    """Call torch's own."""
    return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)


OPERATOR = Operator(OP, ("y",), ("input", "weight"), shared.drawn("rms", "BND"), shared.outputs(OP), work)
BASELINES = (Contender(OP, "eager", eager),)
