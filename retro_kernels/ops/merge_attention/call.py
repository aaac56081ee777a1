"""A call of `merge_attention` as a value. Letters: P parts, B batch, N queries, H heads, D head dimension."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ... import checks
from ...reference_lib.attention import accumulator


class MergeAttention(NamedTuple):
    outs: Tensor  # [P,B,N,H,D]
    lses: Tensor  # [P,B,H,N]

    DIFFERENTIABLE = ("outs", "lses")
    RETURNS = ("out", "lse")

    def checked(self) -> MergeAttention:
        sizes: dict[str, int] = {}
        checks.shape("outs", self.outs, "P,B,N,H,D", sizes)
        checks.floating("outs", self.outs)
        if sizes["P"] < 2:
            raise ValueError(f"outs: expected [P,B,N,H,D] with P >= 2; got P={sizes['P']}")
        checks.like("outs", self.outs, self.outs)
        checks.dense_rows("outs", self.outs)
        checks.shape("lses", self.lses, "P,B,H,N", sizes)
        checks.like("lses", self.lses, self.outs, (accumulator(self.outs),), first="outs")
        return self

    def cast(self) -> MergeAttention:
        """Autocast changes nothing: parts are outputs of attentions, and lses stay float32."""
        return self

    def empty_outputs(self) -> tuple[Tensor, Tensor]:
        return self.outs.new_empty(self.outs.shape[1:]), self.lses.new_empty(self.lses.shape[1:])

    def flops(self) -> tuple[int, int]:
        return 2 * self.outs.numel(), 4 * self.outs.numel()
