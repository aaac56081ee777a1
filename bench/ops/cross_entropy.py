"""Cross-entropy in the harness: its case and work. The baseline is torch's own."""

from __future__ import annotations

from typing import Any

from ..registry import Case, Contender, Lazy, Operator, Work
from . import _shared as shared

torch = Lazy("torch")

OP = "cross_entropy"

CASES = [
    Case(
        OP,
        "readout",
        {"N": 512, "V": 32000},
        "a part of a readout's logits",
        dtypes=shared.FLOAT32,
        devices=shared.CPU,
    )
]


def arguments(case, draw) -> dict[str, Any]:
    from retro_kernels.testing import inputs

    return inputs.entropy(N=case.shape["N"], V=case.shape["V"], draw=draw) | dict(case.options)


def work(case, itemsize: int, mode: str) -> Work:
    logits = case.shape["N"] * case.shape["V"]
    forward = Work(3.0 * logits, logits * itemsize)
    # backward: reads the logits again, writes their gradient
    return forward if mode != "fwdbwd" else forward + Work(4.0 * logits, 2 * logits * itemsize)


def eager(input, target, reduction):
    """torch's own."""
    return torch.nn.functional.cross_entropy(input, target, reduction=reduction)


OPERATOR = Operator(OP, ("losses",), ("input",), arguments, shared.single(OP), work)
BASELINES = (Contender(OP, "eager", eager),)
