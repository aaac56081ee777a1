"""The merge of partial attentions in the harness: its cases, its work and its baseline."""

from __future__ import annotations

from ..registry import Contender, Operator, Work
from . import _shared as shared
from ._shared import FORWARD, torch

OP = "merge_attention"

CASES = [
    shared.case(OP, "two-parts", "own tokens and neighbours, RETRO's heads", "P=2 B=2 N=2048 H=16 D=64"),
    shared.case(OP, "decode", "a token over 8 shards", "P=8 B=8 N=1 H=16 D=128", modes=FORWARD),
]


def work(case, itemsize: int, mode: str) -> Work:
    p, b, n, h, d = (case.shape[x] for x in "PBNHD")
    row = b * n * h
    forward = Work(2.0 * p * row * d, (p + 1) * row * (d * itemsize + shared.LSE_BYTES))
    # backward: reads the parts and both gradients, writes the parts' gradients
    return forward if mode != "fwdbwd" else forward + Work(4.0 * p * row * d, (2 * p + 1) * row * (d * itemsize + 4))


def eager(outs, lses) -> tuple[torch.Tensor, torch.Tensor]:
    """Weigh the parts by a softmax and sum them."""
    weights = lses.softmax(0).mT.unsqueeze(-1).to(outs.dtype)
    return (weights * outs).sum(0), lses.logsumexp(0)


OPERATOR = Operator(OP, ("out", "lse"), ("outs", "lses"), shared.drawn("merged", "PBNHD"), shared.outputs(OP), work)
BASELINES = (Contender(OP, "eager", eager), shared.compiled(OP, eager))
