"""Relative logits in the harness: its cases, its work and its baseline."""

from __future__ import annotations

from typing import Any

from ..registry import Contender, Operator, Work
from . import _shared as shared
from ._shared import BIASES, CPU, RETRO, inputs, torch

OP = "relative_logits"
BIASED = ("position_bias",)

CASES = [
    shared.case(OP, "decoder-1k", RETRO, "B=1 N=1024 S=1024 H=8 E=64", extras=BIASED),
    shared.case(OP, "encoder", RETRO, "B=16 N=128 S=128 H=16 E=64", extras=BIASED, devices=CPU),
    shared.case(
        OP,
        "low-rank-8k",
        "relative logits of width 16, extent 1024",
        "B=1 N=8192 S=8192 H=8 E=16 T=1024",
        options={"rel_start": 0},
        gpu=16,
    ),
]


def arguments(case, draw) -> dict[str, Any]:
    s = case.shape
    biases = tuple(name for name in BIASES if name in case.extras)
    return inputs.relative_logits(
        **{x: s[x] for x in "BNHE"},
        key_len=s["S"],
        T=s.get("T"),
        biases=biases,
        bias_scale=shared.BIAS_SCALE,
        draw=draw,
        **case.options,
    )


def work(case, itemsize: int, mode: str) -> Work:
    s = case.shape
    b, n, keys, h, e = (s[x] for x in "BNSHE")
    flops = 2.0 * b * n * keys * h * e
    inputs = (b * n * h * e + h * s.get("T", n + keys - 1) * e) * itemsize
    logits = b * h * n * keys * itemsize
    forward = Work(flops, inputs + logits)
    return forward if mode != "fwdbwd" else forward + Work(2 * flops, 2 * inputs + logits)


def rows(call: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    offset = call.get("query_offset", 0)
    cut = shared.cut(call, ("query",), first, last) | {"query_offset": offset + first}
    if call.get("rel_start") is None:
        cut["rel_start"] = offset - (call["key_len"] - 1)
    return cut


def eager(query, rel_key, *, key_len, rel_start=None, position_bias=None, query_offset=0) -> torch.Tensor:
    """Write the whole band [N, N+key_len-1], then skew it."""
    rel_query = query if position_bias is None else query + position_bias
    return shared.position_bias(rel_query, rel_key, key_len, query_offset - (key_len - 1), rel_start)


def _band_bytes(case, itemsize: int, backward: bool) -> float:
    s = case.shape
    return s["B"] * s["H"] * s["N"] * (s["N"] + 2 * s["S"]) * itemsize * (2 if backward else 1)


OPERATOR = Operator(
    OP,
    ("logits",),
    ("query", "rel_key", "position_bias"),
    arguments,
    shared.outputs(OP),
    work,
    rows=rows,
    row_axes=(2,),
)
BASELINES = (Contender(OP, "eager", eager, peak_bytes=_band_bytes), shared.compiled(OP, eager, peak_bytes=_band_bytes))
