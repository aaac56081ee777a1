"""Checks of arguments that the calls of several ops share: positions, relative keys, heads, documents."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from .. import checks
from ..core import arguments
from ..reference_lib.attention import accumulator

REL_WIDTH_MAX = 256  # E, width of the relative keys
MOST_HEADS = 128  # of published models; more are taken for tokens in a warning


def optional(call, name: str, dims: str, sizes: dict[str, int], dtypes: tuple[torch.dtype, ...] | None = None) -> None:
    """Check an optional tensor: its shape, and type and device against `query`. A float tensor needs dense rows."""
    value = getattr(call, name)
    if value is not None:
        checks.shape(name, value, dims, sizes)
        checks.like(name, value, call.query, dtypes)
        if dtypes is None and name not in arguments.ANY_STRIDE:
            checks.dense_rows(name, value)


def positions(name: str, value, query: Tensor, sizes: dict[str, int]) -> tuple[int, Tensor | None]:
    """Return a position as (int, None), or (0, int64 tensor [B]) where each batch entry has its own."""
    if not isinstance(value, Tensor):
        return checks.position(name, value), None
    checks.shape(name, value, "B", sizes)
    checks.like(name, value, query, (torch.int64,))
    return 0, value


def fixed(call, position: int) -> bool:
    """Whether a call is valid at this position only: out of range, or the position also determines rel_start."""
    follows = call.rel_key is not None and call.rel_start is None
    return follows or not -checks.POSITION_MAX <= position <= checks.POSITION_MAX


def attention_outputs(call) -> tuple[Tensor, Tensor]:
    """Allocate out [B,N,H,D] and lse [B,H,N] of an attention."""
    b, n, h, _ = call.query.shape
    out = torch.empty_like(call.query, memory_format=torch.contiguous_format)
    return out, call.query.new_empty((b, h, n), dtype=accumulator(call.query))


def check_heads(name: str, value: Tensor, other: str, heads: int) -> None:
    """Raise if `value` is [B,H,N,...] instead of [B,N,H,...]: its dimension N then equals the `heads` of `other`."""
    _, tokens, found, _ = value.shape
    if found != heads == tokens:
        got = f"H={found} (shape {list(value.shape)}): did you pass [B,H,N,D]?"
        raise ValueError(f"{name}: expected [B,N,H,D] with H={heads} heads as in {other}; got {got}")


def warn_heads_first(call, sizes: dict[str, int]) -> None:
    """Warn of a query that is valid as [B,N,H,D] and as [B,H,N,D], if it has more heads than tokens."""
    n, h = sizes["N"], sizes["H"]
    if h > n > 1 and not torch.compiler.is_compiling():
        read = f"N={n} tokens and H={h} heads from shape {list(call.query.shape)}; it fits as [B,H,N,D] too"
        warnings.warn(f"query: expected [B,N,H,D]; got {read}: transpose(1, 2) if it is", stacklevel=2)


def relative(call, sizes: dict[str, int], smallest: int, rows: int, rows_formula: str):
    """Check rel_key, rel_query, rel_start and position_bias. Return rel_start, or its default; 0 without rel_key."""
    if call.rel_key is None:
        for name in ("rel_query", "rel_start", "position_bias"):
            if getattr(call, name) is not None:
                raise ValueError(f"{name}: expected None without rel_key; got a value")
        return 0
    start = rel_table(call, sizes, smallest, rows, rows_formula)
    optional(call, "rel_query", "B,N,H,E", sizes)
    if call.rel_query is None and sizes["E"] != sizes["D"]:
        expected = f"E=D={sizes['D']} where rel_query is None"
        raise ValueError(f"rel_key: expected [H or 1,T,E] with {expected}; got E={sizes['E']}")
    bias(call, "position_bias", "H,E", sizes)
    return start


def rel_table(call, sizes: dict[str, int], smallest: int, rows: int, rows_formula: str) -> int:
    """Check rel_key and rel_start. Return rel_start, or its default."""
    rel_key = checks.tensor("rel_key", call.rel_key)
    if rel_key.dim() == 3 and rel_key.shape[0] != 1:  # a shared table does not tell the number of heads
        check_heads("query", call.query, "rel_key", rel_key.shape[0])
    if rel_key.dim() != 3 or rel_key.shape[0] not in (1, sizes["H"]):
        raise ValueError(f"rel_key: expected [H or 1,T,E] with H={sizes['H']}; got shape {list(rel_key.shape)}")
    checks.like("rel_key", rel_key, call.query)
    checks.dense_rows("rel_key", rel_key)
    _, sizes["T"], width = rel_key.shape
    if sizes.setdefault("E", width) != width:
        raise ValueError(f"rel_key: expected [H or 1,T,E] with E={sizes['E']}; got E={width}")
    if not 1 <= width <= REL_WIDTH_MAX:
        raise ValueError(f"rel_key: expected [H or 1,T,E] with E from 1 to {REL_WIDTH_MAX}; got E={width}")
    if call.rel_start is not None:
        if sizes["T"] < 1:
            raise ValueError("rel_key: expected [H or 1,T,E] with T >= 1; got T=0")
        return checks.position("rel_start", call.rel_start)
    rows = max(rows, 0)  # no queries or no keys: no displacement occurs
    if sizes["T"] != rows:
        expected = f"T = {rows_formula} = {rows} (all displacements) where rel_start is None"
        raise ValueError(f"rel_key: expected [H or 1,T,E] with {expected}; got T={sizes['T']}")
    return smallest


def bias(call, name: str, dims: str, sizes: dict[str, int]) -> None:
    value = getattr(call, name)
    if value is not None and checks.tensor(name, value).dim() == 2:
        check_heads("query", call.query, name, value.shape[0])
    optional(call, name, dims, sizes)


def attention_inputs(call, key_dims: str, sizes: dict[str, int]) -> None:
    """Check query, key, value and content_bias, and bind the sizes of their letters."""
    checks.shape("query", call.query, "B,N,H,D", sizes)
    checks.floating("query", call.query)
    checks.shape("key", call.key, key_dims, sizes)
    checks.shape("value", call.value, key_dims, sizes)
    for name in ("query", "key", "value"):
        checks.like(name, getattr(call, name), call.query)
        checks.dense_rows(name, getattr(call, name))
    checks.head_dim("query", sizes["D"], of="D (the head dimension) to be ", got="D=")
    n, h, g, swapped = sizes["N"], sizes["H"], sizes["G"], call.key.shape[-3]
    if g == 0 or h % g:
        fits = h and swapped and h % swapped == 0  # with key and value heads before their tokens
        if g and not fits and n % g == 0:
            got = f"H={h} (shape {list(call.query.shape)}): did you pass [B,H,N,D]?"
            raise ValueError(f"query: expected [B,N,H,D] with H that the G={g} key/value heads divide; got {got}")
        passed = "[B,G,S,D]" if call.key.dim() == 4 else "[B,L,K,G,R,D]"
        hint = f": did you pass {passed}?" if fits else ""
        raise ValueError(f"key: expected G key/value heads that divide the H={h} query heads; got G={g}{hint}")
    bias(call, "content_bias", "H,D", sizes)


def scale_and_dropout(call) -> dict[str, float]:
    """Return an attention's scale, by default D**-0.5, and dropout_p, both checked."""
    scale = call.query.shape[-1] ** -0.5 if call.scale is None else checks.number("scale", call.scale)
    return {"scale": scale, "dropout_p": checks.probability("dropout_p", call.dropout_p)}


def pair(call, dims: dict[str, str], sizes: dict[str, int]) -> None:
    """Check two integer tensors that are given together or not at all. dims: name -> dimensions."""
    (name_a, a), (name_b, b) = ((name, getattr(call, name)) for name in dims)
    if (a is None) != (b is None):
        present, absent = (name_b, name_a) if a is None else (name_a, name_b)
        raise ValueError(f"{absent}: expected a tensor where {present} is given; got None")
    for name in dims:
        optional(call, name, dims[name], sizes, checks.INTEGERS)
    if a is not None and a.dtype != b.dtype:
        raise TypeError(f"{name_b}: expected {a.dtype} (the type of {name_a}); got {b.dtype}")


def flops(call, keys: int, displacements: int) -> tuple[int, int]:
    """Return the operations (forward, backward) of an attention.

    keys: number of keys that a query attends. displacements: number of displacements of a query; those beyond the
    table's rows are not counted.
    """
    b, n, h, d = call.query.shape
    content = b * n * h * keys * d
    rows = 0 if call.rel_key is None else min(displacements, call.rel_key.shape[1])
    position = b * n * h * rows * (0 if call.rel_key is None else call.rel_key.shape[2])
    # forward: logits, output and position logits; backward: their 4 and 2 gradients, and the logits again
    return 4 * content + 2 * position, 10 * content + 6 * position
