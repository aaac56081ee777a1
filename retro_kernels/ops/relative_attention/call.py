"""A call of `relative_attention` as a value. Letters: B batch, N queries, S keys, H heads, G key/value heads, D head
dimension, E width of the relative keys, T their rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ... import checks
from .. import _attention_call, _dropout


class RelativeAttention(NamedTuple):
    """rel_query None: the query itself. window, window_block None: unbounded. Query 0 of batch entry b is at position
    query_offset + batch_offset[b].
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
    RETURNS = ("out", "lse")

    seeded = _dropout.with_seed

    def checked(self) -> RelativeAttention:
        sizes: dict[str, int] = {}
        causal = checks.flag("causal", self.causal)
        farthest = 2 * checks.POSITION_MAX  # displacements are smaller, so a larger limit has the same effect
        gap = min(checks.integer("causal_gap", self.causal_gap, low=0), farthest)
        if gap and not causal:
            raise ValueError(f"causal_gap: expected 0 where causal is False; got {gap}")
        window, block = (
            None if (value := getattr(self, name)) is None else min(checks.integer(name, value, low=1), farthest)
            for name in ("window", "window_block")
        )
        if window is not None and block is not None:
            raise ValueError(f"window_block: expected None where window is given; got {block}")
        _attention_call.attention_inputs(self, "B,S,G,D", sizes)
        n, keys, h, g = (sizes[letter] for letter in "NSHG")
        if (n != keys == h and n % g == 0) or (n == keys and h == g > _attention_call.MOST_HEADS):
            _attention_call.warn_heads_first(self, sizes)
        # Under torch.jit.trace a length is a tensor, so the default is not checked as an argument.
        offset, batch_offset = sizes["S"] - sizes["N"] if causal else 0, None
        if self.query_offset is not None:
            offset, batch_offset = _attention_call.positions("query_offset", self.query_offset, self.query, sizes)
        if batch_offset is not None and self.rel_key is not None and self.rel_start is None:
            raise ValueError("rel_start: expected an int where query_offset is a tensor; got None")
        smallest, rows = offset - (sizes["S"] - 1), sizes["N"] + sizes["S"] - 1
        rel_start = _attention_call.relative(self, sizes, smallest, rows, "N+S-1")
        _attention_call.optional(self, "key_mask", "B,S", sizes, (torch.bool,))
        _attention_call.pair(self, {"query_segment": "B,N", "key_segment": "B,S"}, sizes)
        positions = {"query_offset": offset, "batch_offset": batch_offset, "rel_start": rel_start}
        masks = {"causal_gap": gap, "window": window, "window_block": block}
        return self._replace(**positions, **masks, **_attention_call.scale_and_dropout(self))

    empty_outputs = _attention_call.attention_outputs

    def place(self, position: int) -> tuple[dict[str, int], object]:
        """Return the number that kernels take of a position, and its branch, which tells whether a visible pair may be
        outside the table.
        """
        fixed = _attention_call.fixed(self, position)
        return {"offset": position}, (position,) if fixed else self.bounded(position)

    def bounded(self, position: int) -> bool:
        """Whether a visible pair may be outside the table: then tiles outside it are walked without position logits."""
        if self.rel_key is None or self.batch_offset is not None:
            return self.rel_key is not None
        smallest, largest = position - (self.key.shape[1] - 1), position + self.query.shape[1] - 1
        if self.causal:
            smallest = max(smallest, self.causal_gap)
        if self.window is not None:
            largest = min(largest, self.window - 1)
        if self.window_block is not None:
            largest = min(largest, 2 * self.window_block - 1)
        return self.rel_start > smallest or self.rel_start + self.rel_key.shape[1] - 1 < largest

    def flops(self) -> tuple[int, int]:
        return _attention_call.flops(self, keys=self.key.shape[1], displacements=self.key.shape[1])
