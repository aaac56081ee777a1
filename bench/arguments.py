"""A case's letters, options and extras as arguments of the one builder of random inputs that its op has."""

from __future__ import annotations

from typing import Any

from retro_kernels.testing import inputs
from retro_kernels.testing.inputs import BIASES, Draw

BIAS_SCALE = 0.5  # so that no logit dominates
GATE_LOW = 0.1  # RPT: at least eta = 0.1
SHARE = 0.9  # of a mask that is True
DOCUMENTS = 64
DECAYS = (0.3, 0.99)


def chunked_cross_attention(case, draw: Draw) -> dict[str, Any]:
    s, options = case.shape, dict(case.options)
    start = options.get("query_start", 0)
    kwargs = inputs.cross_attention(
        **{x: s[x] for x in "BNMKRHD"},
        **_relative(case, "all"),
        G=s.get("G"),
        query_start=start,
        extra_chunks=s["L"] - (start + s["N"]) // s["M"],
        gate="neighbour_gate" in case.extras,
        gate_low=GATE_LOW,
        mask="neighbour" if "neighbour_mask" in case.extras else None,
        share=SHARE,
        draw=draw,
    )
    del kwargs["dropout_p"]  # no baseline has dropout
    return kwargs | options


def relative_attention(case, draw: Draw) -> dict[str, Any]:
    s, options = case.shape, dict(case.options)
    return inputs.self_attention(
        **{x: s[x] for x in "BNSHD"},
        **_relative(case, "bounded", s.get("T", s["N"] + s["S"] - 1), options.pop("rel_start", None)),
        G=s.get("G"),
        key_mask="key_mask" in case.extras,
        share=SHARE,
        draw=draw,
        **options,
    )


def _relative(case, rel: str, rows: int | None = None, start: int | None = None) -> dict[str, Any]:
    """What `case.extras` says of position logits and biases; `rows` of the table from displacement `start`."""
    width = case.shape.get("E", case.shape["D"]) if "rel_query" in case.extras else None
    kwargs = {"E": width, "biases": tuple(name for name in BIASES if name in case.extras), "bias_scale": BIAS_SCALE}
    return kwargs | ({"rel": rel, "T": rows, "rel_start": start} if "rel_key" in case.extras else {"rel": None})


def relative_logits(case, draw: Draw) -> dict[str, Any]:
    s = case.shape
    biases = tuple(name for name in BIASES if name in case.extras)
    return inputs.relative_logits(
        **{x: s[x] for x in "BNHE"},
        key_len=s["S"],
        T=s.get("T"),
        biases=biases,
        bias_scale=BIAS_SCALE,
        draw=draw,
        **case.options,
    )


def topk_chunks(case, draw: Draw) -> dict[str, Any]:
    s = case.shape
    docs = DOCUMENTS if "query_doc" in case.extras else 0
    return inputs.topk(
        **{x: s[x] for x in "BQSDk"}, shared=s.get("key_batch") == 1, docs=docs, draw=draw, **case.options
    )


def leaky_average(case, draw: Draw) -> dict[str, Any]:
    kwargs = inputs.leaky(
        **{x: case.shape[x] for x in "BNHD"}, decay=DECAYS, initial="initial" in case.extras, draw=draw
    )
    return kwargs | dict(case.options)
