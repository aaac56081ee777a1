"""Checks of every public op's arguments, before any kernel runs, and the filling in of defaults.

Every message names the argument, says what was expected in the letters of the docstrings, and what came.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._problem import (
    ChunkedCrossAttention,
    LeakyAverage,
    RelativeAttention,
    RelativeLogits,
    TopkChunks,
)
from .checks import (
    HEAD_DIM_MAX,
    HEAD_DIM_MIN,
    HEAD_DIM_STEP,
    INTEGERS,
    POSITION_MAX,
    dense_rows,
    flag,
    floating,
    integer,
    like,
    number,
    position,
    probability,
    shape,
    tensor,
)

REL_WIDTH_MAX = 256  # E, width of the relative keys
EMBEDDING_MAX = 4096  # D of topk_chunks
TOPK_MAX = 128
INDEX_MAX = 2**61  # of topk_chunks, whose keys may be numbered through a database of many blocks: sums fit 64 bits


def _positions(name: str, value, query: Tensor, sizes: dict[str, int]) -> tuple[int, Tensor | None]:
    """A position, one for all or a tensor with one a batch entry, as (int, tensor or None) that add up."""
    if not isinstance(value, Tensor):
        return position(name, value), None
    shape(name, value, "B", sizes)
    like(name, value, query, (torch.int64,))
    return 0, value


def movable(call) -> range:
    """Of a call that was checked, which positions it may have without being checked again; none where more follows from
    the position."""
    if isinstance(call, ChunkedCrossAttention):
        return range(0, min(POSITION_MAX + 1, (call.key.shape[1] + 1) * call.chunk_len - call.query.shape[1]))
    if isinstance(call, TopkChunks):
        return range(0) if call.causal_gap is None else range(-INDEX_MAX, INDEX_MAX + 1)
    follows = call.rel_key is not None and call.rel_start is None
    return range(0) if follows else range(-POSITION_MAX, POSITION_MAX + 1)


# ---------------------------------------------------------------- groups of arguments that both attentions share


def _attention_sizes(call, sizes: dict[str, int]) -> None:
    head_dim = sizes["D"]
    if head_dim % HEAD_DIM_STEP or not HEAD_DIM_MIN <= head_dim <= HEAD_DIM_MAX:
        raise ValueError(
            f"query: expected D (the head dimension) to be a multiple of {HEAD_DIM_STEP} from {HEAD_DIM_MIN} to "
            f"{HEAD_DIM_MAX}; "
            f"got D={head_dim}"
        )
    if sizes["G"] == 0 or sizes["H"] % sizes["G"]:
        raise ValueError(
            f"key: expected G key/value heads that divide the H={sizes['H']} query heads; got G={sizes['G']}"
        )


def _relative(call, sizes: dict[str, int], smallest: int, rows: int, rows_formula: str):
    """rel_key, rel_query, rel_start, position_bias; returns rel_start resolved (0 where there are no relative keys)."""
    if call.rel_key is None:
        for name in ("rel_query", "rel_start", "position_bias"):
            if getattr(call, name) is not None:
                raise ValueError(f"{name}: expected None without rel_key; got a value")
        return 0
    start = _rel_table(call.rel_key, call.rel_start, call.query, sizes, smallest, rows, rows_formula)
    if call.rel_query is not None:
        shape("rel_query", call.rel_query, "B,N,H,E", sizes)
        like("rel_query", call.rel_query, call.query)
        dense_rows("rel_query", call.rel_query)
    elif sizes["E"] != sizes["D"]:
        raise ValueError(
            f"rel_key: expected [H or 1,T,E] with E=D={sizes['D']} where rel_query is None; got E={sizes['E']}"
        )
    _bias("position_bias", call.position_bias, "H,E", call.query, sizes)
    return start


def _rel_table(rel_key, rel_start, query: Tensor, sizes, smallest: int, rows: int, rows_formula: str) -> int:
    tensor("rel_key", rel_key)
    if rel_key.dim() != 3 or rel_key.shape[0] not in (1, sizes["H"]):
        raise ValueError(f"rel_key: expected [H or 1,T,E] with H={sizes['H']}; got shape {list(rel_key.shape)}")
    like("rel_key", rel_key, query)
    dense_rows("rel_key", rel_key)
    _, sizes["T"], width = rel_key.shape
    if sizes.setdefault("E", width) != width:
        raise ValueError(f"rel_key: expected [H or 1,T,E] with E={sizes['E']}; got E={width}")
    if not 1 <= width <= REL_WIDTH_MAX:
        raise ValueError(f"rel_key: expected [H or 1,T,E] with E from 1 to {REL_WIDTH_MAX}; got E={width}")
    if rel_start is not None:
        if sizes["T"] < 1:
            raise ValueError("rel_key: expected [H or 1,T,E] with T >= 1; got T=0")
        return position("rel_start", rel_start)
    rows = max(rows, 0)  # no queries or no keys: no displacement occurs
    if sizes["T"] != rows:
        raise ValueError(
            f"rel_key: expected [H or 1,T,E] with T = {rows_formula} = {rows} (all displacements) where rel_start is "
            f"None; got T={sizes['T']}"
        )
    return smallest


def _bias(name: str, value, dims: str, query: Tensor, sizes: dict[str, int]) -> None:
    if value is not None:
        shape(name, value, dims, sizes)
        like(name, value, query)
        dense_rows(name, value)


def _scale(scale, head_dim: int) -> float:
    return head_dim**-0.5 if scale is None else number("scale", scale)


def _qkv(call, key_dims: str, sizes: dict[str, int]) -> None:
    shape("query", call.query, "B,N,H,D", sizes)
    floating("query", call.query)
    shape("key", call.key, key_dims, sizes)
    shape("value", call.value, key_dims, sizes)
    for name in ("query", "key", "value"):
        value = getattr(call, name)
        like(name, value, call.query)
        dense_rows(name, value)
    _attention_sizes(call, sizes)
    _bias("content_bias", call.content_bias, "H,D", call.query, sizes)


# ---------------------------------------------------------------- the ops


def chunked_cross_attention(call: ChunkedCrossAttention) -> ChunkedCrossAttention:
    """The call checked, with rel_start and scale filled in."""
    sizes: dict[str, int] = {}
    chunk_len = integer("chunk_len", call.chunk_len, 1, POSITION_MAX)
    if not isinstance(call.query_start, Tensor):
        integer("query_start", call.query_start, 0, POSITION_MAX)
    _qkv(call, "B,L,K,R,G,D", sizes)
    query_start, batch_start = _positions("query_start", call.query_start, call.query, sizes)
    needed = (query_start + sizes["N"]) // chunk_len if sizes["N"] > 0 else 0
    if batch_start is None and sizes["L"] < needed:
        start = f", query_start={query_start}" if query_start else ""
        raise ValueError(
            f"key: expected [B,L,K,R,G,D] with L >= {needed} chunks for N={sizes['N']}, chunk_len={chunk_len}{start}; "
            f"got L={sizes['L']}"
        )
    rows = chunk_len + sizes["R"] - 1
    rel_start = _relative(call, sizes, 1 - sizes["R"], rows, "chunk_len+R-1")
    if call.neighbour_mask is not None:
        mask = tensor("neighbour_mask", call.neighbour_mask)
        if mask.dim() not in (3, 4):
            raise ValueError(f"neighbour_mask: expected [B,L,K] or [B,L,K,R]; got shape {list(mask.shape)}")
        shape("neighbour_mask", mask, "B,L,K" if mask.dim() == 3 else "B,L,K,R", sizes)
        like("neighbour_mask", mask, call.query, (torch.bool,))
    if call.neighbour_gate is not None:
        shape("neighbour_gate", call.neighbour_gate, "B,L,K", sizes)
        like("neighbour_gate", call.neighbour_gate, call.query)
    return call._replace(
        query_start=query_start,
        batch_start=batch_start,
        rel_start=rel_start,
        scale=_scale(call.scale, sizes["D"]),
        dropout_p=probability("dropout_p", call.dropout_p),
    )


def relative_attention(call: RelativeAttention) -> RelativeAttention:
    """The call checked, with query_offset, rel_start and scale filled in."""
    sizes: dict[str, int] = {}
    causal = flag("causal", call.causal)
    # a limit past every displacement hides nothing, or everything, and so does the least of those
    gap = min(integer("causal_gap", call.causal_gap, low=0), 2 * POSITION_MAX)
    if gap and not causal:
        raise ValueError(f"causal_gap: expected 0 where causal is False; got {gap}")
    window = None if call.window is None else min(integer("window", call.window, low=1), 2 * POSITION_MAX)
    block = (
        None if call.window_block is None else min(integer("window_block", call.window_block, low=1), 2 * POSITION_MAX)
    )
    if window is not None and block is not None:
        raise ValueError(f"window_block: expected None where window is given; got {block}")
    _qkv(call, "B,S,G,D", sizes)
    default = sizes["S"] - sizes["N"] if causal else 0
    offset, batch_offset = _positions(
        "query_offset", default if call.query_offset is None else call.query_offset, call.query, sizes
    )
    if batch_offset is not None and call.rel_key is not None and call.rel_start is None:
        raise ValueError("rel_start: expected an int where query_offset is a tensor; got None")
    rel_start = _relative(call, sizes, offset - (sizes["S"] - 1), sizes["N"] + sizes["S"] - 1, "N+S-1")
    if call.key_mask is not None:
        shape("key_mask", call.key_mask, "B,S", sizes)
        like("key_mask", call.key_mask, call.query, (torch.bool,))
    _pair("query_segment", call.query_segment, "B,N", "key_segment", call.key_segment, "B,S", call.query, sizes)
    return call._replace(
        query_offset=offset,
        batch_offset=batch_offset,
        rel_start=rel_start,
        causal_gap=gap,
        window=window,
        window_block=block,
        scale=_scale(call.scale, sizes["D"]),
        dropout_p=probability("dropout_p", call.dropout_p),
    )


def _pair(name_a: str, a, dims_a: str, name_b: str, b, dims_b: str, query: Tensor, sizes: dict[str, int]) -> None:
    """Two integer tensors that only make sense together."""
    if (a is None) != (b is None):
        present, absent = (name_b, name_a) if a is None else (name_a, name_b)
        raise ValueError(f"{absent}: expected a tensor where {present} is given; got None")
    if a is not None:
        for name, value, dims in ((name_a, a, dims_a), (name_b, b, dims_b)):
            shape(name, value, dims, sizes)
            like(name, value, query, INTEGERS)
        if a.dtype != b.dtype:
            raise TypeError(f"{name_b}: expected {a.dtype} (the type of {name_a}); got {b.dtype}")


def relative_logits(call: RelativeLogits) -> RelativeLogits:
    """The call checked, with rel_start filled in."""
    sizes: dict[str, int] = {}
    key_len = integer("key_len", call.key_len, 0, POSITION_MAX)
    offset = position("query_offset", call.query_offset)
    shape("query", call.query, "B,N,H,E", sizes)
    floating("query", call.query)
    like("query", call.query, call.query)
    dense_rows("query", call.query)
    start = _rel_table(
        call.rel_key, call.rel_start, call.query, sizes, offset - (key_len - 1), sizes["N"] + key_len - 1, "N+key_len-1"
    )
    _bias("position_bias", call.position_bias, "H,E", call.query, sizes)
    return call._replace(rel_start=start)


def topk_chunks(call: TopkChunks) -> TopkChunks:
    """The call checked."""
    sizes: dict[str, int] = {}
    integer("k", call.k, low=1, high=TOPK_MAX)
    if not isinstance(call.metric, str):
        raise TypeError(f"metric: expected a str; got {type(call.metric).__name__}")
    if call.metric not in ("dot", "l2"):
        raise ValueError(f"metric: expected 'dot' or 'l2'; got {call.metric!r}")
    if call.causal_gap is not None:
        position("causal_gap", call.causal_gap, INDEX_MAX)
    position("query_offset", call.query_offset, INDEX_MAX)
    if call.query_offset and call.causal_gap is None:
        raise ValueError(f"query_offset: expected 0 where causal_gap is None; got {call.query_offset}")
    shape("query", call.query, "B,Q,D", sizes)
    floating("query", call.query)
    shape("key", call.key, "B or 1,S,D", sizes)
    if not 1 <= sizes["D"] <= EMBEDDING_MAX:
        raise ValueError(
            f"query: expected [B,Q,D] with D (the embedding width) from 1 to {EMBEDDING_MAX}; got D={sizes['D']}"
        )
    for name in ("query", "key"):
        like(name, getattr(call, name), call.query)
        dense_rows(name, getattr(call, name))
    _pair("query_doc", call.query_doc, "B,Q", "key_doc", call.key_doc, "B or 1,S", call.query, sizes)
    if call.key_mask is not None:
        shape("key_mask", call.key_mask, "B or 1,S", sizes)
        like("key_mask", call.key_mask, call.query, (torch.bool,))
    return call


def leaky_average(call: LeakyAverage) -> LeakyAverage:
    """The call checked. The values of decay are not read: outside [0, 1) the recurrence is computed all the same."""
    sizes: dict[str, int] = {}
    shape("x", call.x, "B,N,H,D", sizes)
    floating("x", call.x)
    shape("decay", call.decay, "H", sizes)
    # bfloat16 rounds 0.999 to 1.0, so a decay may stay float32 beside a narrower x
    like("decay", call.decay, call.x, tuple({call.x.dtype: None, torch.float32: None}), first="x")
    if call.initial is not None:
        shape("initial", call.initial, "B,H,D", sizes)
    if call.segment is not None:
        shape("segment", call.segment, "B,N", sizes)
        like("segment", call.segment, call.x, INTEGERS, first="x")
    for name, value in (("x", call.x), ("initial", call.initial)):
        if value is not None:
            like(name, value, call.x, first="x")
            dense_rows(name, value)
    return call
