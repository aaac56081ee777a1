"""A call of `chunked_cross_attention` as a value. Letters: B batch, N queries, M chunk length, L chunks, K neighbours,
R neighbour tokens, H heads, G key/value heads, D head dimension, E width of the relative keys, T their rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ... import checks
from .. import _attention_call, _dropout


class ChunkedCrossAttention(NamedTuple):
    """rel_query None: the query itself. seed: int64 [1] if dropout_p > 0. Query 0 of batch entry b is at position
    query_start + batch_start[b].
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

    DIFFERENTIABLE = (
        *("query", "key", "value", "rel_key", "rel_query", "content_bias", "position_bias"),
        "neighbour_gate",
    )
    MOVES = "query_start"
    RETURNS = ("out", "lse")

    seeded = _dropout.with_seed

    def checked(self) -> ChunkedCrossAttention:
        sizes: dict[str, int] = {}
        chunk_len = checks.integer("chunk_len", self.chunk_len, 1, checks.POSITION_MAX)
        if not isinstance(self.query_start, Tensor):
            checks.integer("query_start", self.query_start, 0, checks.POSITION_MAX)
        _attention_call.attention_inputs(self, "B,L,K,R,G,D", sizes)
        query_start, batch_start = _attention_call.positions("query_start", self.query_start, self.query, sizes)
        self._check_chunk_len(query_start, sizes)
        needed = (query_start + sizes["N"]) // chunk_len if sizes["N"] > 0 else 0
        swapped = (query_start + sizes["H"]) // chunk_len  # chunks of a query [B,H,N,D]
        if batch_start is None and needed != sizes["L"] == swapped and sizes["N"] % sizes["G"] == 0:
            _attention_call.warn_heads_first(self, sizes)
        if batch_start is None and sizes["L"] < needed:
            start = f", query_start={query_start}" if query_start else ""
            chunks = f"L >= {needed} chunks for N={sizes['N']}, chunk_len={chunk_len}{start}"
            raise ValueError(f"key: expected [B,L,K,R,G,D] with {chunks}; got L={sizes['L']}")
        rows = chunk_len + sizes["R"] - 1
        rel_start = _attention_call.relative(self, sizes, 1 - sizes["R"], rows, "chunk_len+R-1")
        if self.neighbour_mask is not None:
            mask = checks.tensor("neighbour_mask", self.neighbour_mask)
            if mask.dim() not in (3, 4):
                raise ValueError(f"neighbour_mask: expected [B,L,K] or [B,L,K,R]; got shape {list(mask.shape)}")
            dims = "B,L,K" if mask.dim() == 3 else "B,L,K,R"
            _attention_call.optional(self, "neighbour_mask", dims, sizes, (torch.bool,))
        _attention_call.optional(self, "neighbour_gate", "B,L,K", sizes)
        positions = {"query_start": query_start, "batch_start": batch_start, "rel_start": rel_start}
        return self._replace(**positions, **_attention_call.scale_and_dropout(self))

    def _check_chunk_len(self, query_start: int, sizes: dict[str, int]) -> None:
        """Raise an error that names chunk_len if it is the one wrong argument: the rows of rel_key and the number of
        chunks both fit another chunk_len.
        """
        if not isinstance(self.rel_key, Tensor) or self.rel_key.dim() != 3 or self.rel_start is not None:
            return
        rows, fits, tokens = self.rel_key.shape[1], self.rel_key.shape[1] - sizes["R"] + 1, query_start + sizes["N"]
        if fits != self.chunk_len and fits >= 1 and sizes["L"] == tokens // fits != tokens // self.chunk_len:
            raise ValueError(
                f"chunk_len: expected {fits}, for rel_key has T = chunk_len+R-1 = {rows} rows and key has "
                f"L={sizes['L']} chunks for N={sizes['N']}; got {self.chunk_len}"
            )

    empty_outputs = _attention_call.attention_outputs

    def place(self, position: int) -> tuple[dict[str, int], object]:
        """Return the numbers that kernels take of a position, and its branch: how many chunks the rows attend.

        first_chunk is the first of these chunks, or -1 if the first rows attend nothing. If batch entries have starts
        of their own, no kernel reads first_chunk, and the branch is the largest number of chunks that an entry may
        attend. A position at which the call is not valid is a branch of its own.
        """
        n, m = self.query.shape[1], self.chunk_len
        if self.batch_start is not None:
            numbers, count, fits = {"query_start": position, "first_chunk": 0}, (n - 2) // m + 2, True
        else:
            numbers = {"query_start": position, "first_chunk": (position + 1) // m - 1}
            count, fits = (position + n) // m - (position + 1) // m + 1, (position + n) // m <= self.key.shape[1]
        return numbers, count if fits and 0 <= position <= checks.POSITION_MAX else (position,)

    def flops(self) -> tuple[int, int]:
        _, _, k, r, _, _ = self.key.shape  # one row of rel_key serves all K neighbours
        return _attention_call.flops(self, keys=k * r, displacements=r)
