"""A call of `relative_logits` as a value. Letters: B batch, N queries, H heads, E width of the relative keys, T their
rows.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ... import checks
from .. import _attention_call


class RelativeLogits(NamedTuple):
    query: Tensor  # [B,N,H,E]
    rel_key: Tensor  # [H or 1,T,E]
    key_len: int
    rel_start: int
    position_bias: Tensor | None  # [H,E]
    query_offset: int

    DIFFERENTIABLE = ("query", "rel_key", "position_bias")
    MOVES = "query_offset"
    RETURNS = ("logits",)

    def checked(self) -> RelativeLogits:
        """The call checked, with rel_start filled in."""
        sizes: dict[str, int] = {}
        key_len = checks.integer("key_len", self.key_len, 0, checks.POSITION_MAX)
        offset = checks.position("query_offset", self.query_offset)
        checks.shape("query", self.query, "B,N,H,E", sizes)
        checks.floating("query", self.query)
        checks.like("query", self.query, self.query)
        checks.dense_rows("query", self.query)
        rows = sizes["N"] + key_len - 1
        start = _attention_call.rel_table(self, sizes, offset - (key_len - 1), rows, "N+key_len-1")
        _attention_call.bias(self, "position_bias", "H,E", sizes)
        return self._replace(rel_start=start)

    def empty_outputs(self) -> tuple[Tensor]:
        b, n, h, _ = self.query.shape
        return (self.query.new_empty((b, h, n, self.key_len)),)

    def place(self, position: int) -> tuple[dict[str, int], object]:
        """Return the number that kernels take of a position, and its branch."""
        fixed = _attention_call.fixed(self, position)
        return {"shift": position - (self.rel_start or 0)}, (position,) if fixed else None

    def flops(self) -> tuple[int, int]:
        pairs = self.query.numel() * min(self.key_len, self.rel_key.shape[1])
        return 2 * pairs, 4 * pairs
