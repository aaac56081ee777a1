"""One call of each op, as a value: every argument checked, every default filled in.

The public ops build these, backends consume them. They are the one list of an op's arguments: the operator's schema is
read off them, and C++ takes their fields in order. They hold no behaviour, so that `ops`, the registration and all
backends agree on names without importing each other. Letters: B batch, N queries,
M chunk length, L chunks, K neighbours, R neighbour tokens, H heads, G key/value heads, D head dimension, E width of the
relative keys, T their rows, S keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .checks import has_rows


class ChunkedCrossAttention(NamedTuple):
    """`rel_query` None means the query itself; `seed` is an int64 tensor [1] when dropout_p > 0.

    Query 0 of batch entry b is at position query_start + batch_start[b].
    """

    query: Tensor  # [B,N,H,D]
    key: Tensor  # [B,L,K,R,G,D]
    value: Tensor  # [B,L,K,R,G,D]
    chunk_len: int
    rel_key: Tensor | None  # [H or 1,T,E]
    rel_query: Tensor | None  # [B,N,H,E]
    rel_start: int
    content_bias: Tensor | None  # [H,D]
    position_bias: Tensor | None  # [H,E]
    neighbour_mask: Tensor | None  # bool [B,L,K] or [B,L,K,R]
    neighbour_gate: Tensor | None  # [B,L,K]
    scale: float
    query_start: int
    dropout_p: float
    seed: Tensor | None
    batch_start: Tensor | None = None  # int64 [B]; the host never reads it

    #: inputs that take a gradient, in the order in which `backward` returns them
    DIFFERENTIABLE = (
        "query",
        "key",
        "value",
        "rel_key",
        "rel_query",
        "content_bias",
        "position_bias",
        "neighbour_gate",
    )
    #: the int that moves from call to call where tokens are decoded one by one; a tensor or None does not
    MOVES = "query_start"


class RelativeAttention(NamedTuple):
    """`rel_query` None means the query itself; `window` and `window_block` None mean unbounded.

    Query 0 of batch entry b is at position query_offset + batch_offset[b].
    """

    query: Tensor  # [B,N,H,D]
    key: Tensor  # [B,S,G,D]
    value: Tensor  # [B,S,G,D]
    rel_key: Tensor | None  # [H or 1,T,E]
    rel_query: Tensor | None  # [B,N,H,E]
    rel_start: int
    content_bias: Tensor | None  # [H,D]
    position_bias: Tensor | None  # [H,E]
    causal: bool
    causal_gap: int
    window: int | None
    query_offset: int
    key_mask: Tensor | None  # bool [B,S]
    query_segment: Tensor | None  # int [B,N]
    key_segment: Tensor | None  # int [B,S]
    scale: float
    dropout_p: float
    seed: Tensor | None
    window_block: int | None = None
    batch_offset: Tensor | None = None  # int64 [B]; the host never reads it

    DIFFERENTIABLE = ("query", "key", "value", "rel_key", "rel_query", "content_bias", "position_bias")
    MOVES = "query_offset"


class RelativeLogits(NamedTuple):
    query: Tensor  # [B,N,H,E]
    rel_key: Tensor  # [H or 1,T,E]
    key_len: int
    rel_start: int
    position_bias: Tensor | None  # [H,E]
    query_offset: int

    DIFFERENTIABLE = ("query", "rel_key", "position_bias")
    MOVES = "query_offset"


class TopkChunks(NamedTuple):
    query: Tensor  # [B,Q,D]
    key: Tensor  # [B or 1,S,D]
    k: int
    metric: str  # "dot" or "l2"
    causal_gap: int | None
    query_offset: int
    query_doc: Tensor | None  # int [B,Q]
    key_doc: Tensor | None  # int [B or 1,S]
    key_mask: Tensor | None  # bool [B or 1,S]

    DIFFERENTIABLE = ("query", "key")
    MOVES = "query_offset"


class LeakyAverage(NamedTuple):
    x: Tensor  # [B,N,H,D]
    decay: Tensor  # [H]
    initial: Tensor | None  # [B,H,D]
    segment: Tensor | None = None  # int [B,N]

    DIFFERENTIABLE = ("x", "decay", "initial")
    MOVES = None


_SCHEMA_TYPE = {"Tensor": "Tensor", "int": "SymInt", "float": "float", "bool": "bool", "str": "str"}


def schema(problem: type) -> str:
    """The arguments of an op as `torch.library` writes them: "Tensor x, SymInt? window, ...".

    >>> schema(RelativeLogits)
    'Tensor query, Tensor rel_key, SymInt key_len, SymInt rel_start, Tensor? position_bias, SymInt query_offset'
    """
    annotations = {name: problem.__annotations__[name].__forward_arg__.split(" | ") for name in problem._fields}
    return ", ".join(f"{_SCHEMA_TYPE[kind]}{'?' if rest else ''} {name}" for name, (kind, *rest) in annotations.items())


#: float types of every compiled backend; the reference alone takes float64
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


#: no rows of a product: the kernels read them element by element, whatever the stride
ANY_STRIDE = ("neighbour_gate", "decay")


def unsupported_tensors(tensors: dict[str, Tensor | None], device: str) -> str | None:
    """Why no compiled backend on `device` takes these float tensors:
    elsewhere, of another or a mixed type, strided rows.
    """
    expected = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        expected = expected or tensor.dtype
        if tensor.device.type != device:
            return f"{name} is on {tensor.device}, not on a {device} device"
        if tensor.dtype not in KERNEL_DTYPES:
            return f"{name} is {tensor.dtype}; have float32, bfloat16, float16"
        if tensor.dtype != expected:
            return f"{name} is {tensor.dtype} among {expected}"
        if name not in ANY_STRIDE and not has_rows(tensor):
            return f"the last dimension of {name} is not contiguous"
    return None
