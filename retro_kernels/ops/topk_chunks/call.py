"""A call of `topk_chunks` as a value. Letters: B batch, Q queries, S keys, D embedding width."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ... import checks
from ...reference_lib.attention import accumulator
from .. import _attention_call

EMBEDDING_MAX = 4096
TOPK_MAX = 128
INDEX_MAX = 2**61  # positions may count through a database of many blocks; their sums fit 64 bits


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
    RETURNS = ("scores", "indices")

    def checked(self) -> TopkChunks:
        sizes: dict[str, int] = {}
        checks.integer("k", self.k, low=1, high=TOPK_MAX)
        if not isinstance(self.metric, str):
            raise TypeError(f"metric: expected a str; got {type(self.metric).__name__}")
        if self.metric not in ("dot", "l2"):
            raise ValueError(f"metric: expected 'dot' or 'l2'; got {self.metric!r}")
        if self.causal_gap is not None:
            checks.position("causal_gap", self.causal_gap, INDEX_MAX)
        checks.position("query_offset", self.query_offset, INDEX_MAX)
        if self.query_offset and self.causal_gap is None:
            raise ValueError(f"query_offset: expected 0 where causal_gap is None; got {self.query_offset}")
        checks.shape("query", self.query, "B,Q,D", sizes)
        checks.floating("query", self.query)
        checks.shape("key", self.key, "B or 1,S,D", sizes)
        if not 1 <= sizes["D"] <= EMBEDDING_MAX:
            width = f"D (the embedding width) from 1 to {EMBEDDING_MAX}"
            raise ValueError(f"query: expected [B,Q,D] with {width}; got D={sizes['D']}")
        for name in ("query", "key"):
            checks.like(name, getattr(self, name), self.query)
            checks.dense_rows(name, getattr(self, name))
        _attention_call.pair(self, {"query_doc": "B,Q", "key_doc": "B or 1,S"}, sizes)
        _attention_call.optional(self, "key_mask", "B or 1,S", sizes, (torch.bool,))
        return self

    def empty_outputs(self) -> tuple[Tensor, Tensor]:
        shape = (*self.query.shape[:2], self.k)
        scores = self.query.new_empty(shape, dtype=accumulator(self.query))
        return scores, self.query.new_empty(shape, dtype=torch.int64)

    def place(self, position: int) -> tuple[dict[str, int], object]:
        """Split a position into the number that kernels take as an argument, and the part of the call's memo key.

        All positions share one memo entry if causal_gap is given, because only the number differs. Without causal_gap a
        position is meaningless, so it becomes part of the key, and the checks refuse any but 0.
        """
        free = self.causal_gap is not None and -INDEX_MAX <= position <= INDEX_MAX
        return {"causal_shift": self.shift(position)}, None if free else (position,)

    def shift(self, position: int) -> int:
        """Return `shift`: key j is a candidate of query i where j <= i + shift. It is clamped, so that sums fit
        int32.
        """
        gap, q, s = self.causal_gap, self.query.shape[1], self.key.shape[1]
        return min(max(0 if gap is None else position - gap, -q - 1), s)

    def flops(self) -> tuple[int, int]:
        queries = self.query.numel()
        return 2 * queries * self.key.shape[1], 4 * queries * self.k
