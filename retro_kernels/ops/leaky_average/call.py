"""A call of `leaky_average` as a value. Letters: B batch, N tokens, H heads, D head dimension."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ... import checks
from ...core import arguments
from .. import _attention_call


class LeakyAverage(NamedTuple):
    x: Tensor  # [B,N,H,D]
    decay: Tensor  # [H]
    initial: Tensor | None  # [B,H,D]
    segment: Tensor | None = None  # int [B,N]

    DIFFERENTIABLE = ("x", "decay", "initial")
    RETURNS = ("y",)

    def checked(self) -> LeakyAverage:
        """Return the call checked, except the values of decay: the recurrence holds outside [0, 1) too."""
        sizes: dict[str, int] = {}
        checks.shape("x", self.x, "B,N,H,D", sizes)
        checks.floating("x", self.x)
        if checks.tensor("decay", self.decay).dim() == 1:
            _attention_call.check_heads("x", self.x, "decay", len(self.decay))
        checks.shape("decay", self.decay, "H", sizes)
        # bfloat16 rounds 0.999 to 1.0, so decay may be float32 if x has a half type
        checks.like("decay", self.decay, self.x, tuple({self.x.dtype: None, torch.float32: None}), first="x")
        if self.initial is not None:
            checks.shape("initial", self.initial, "B,H,D", sizes)
        if self.segment is not None:
            checks.shape("segment", self.segment, "B,N", sizes)
            checks.like("segment", self.segment, self.x, checks.INTEGERS, first="x")
        for name, value in (("x", self.x), ("initial", self.initial)):
            if value is not None:
                checks.like(name, value, self.x, first="x")
                checks.dense_rows(name, value)
        return self

    def empty_outputs(self) -> tuple[Tensor]:
        return (self.x.new_empty(self.x.shape),)

    def cast(self) -> LeakyAverage:
        """Return the call with its floating tensors in the type of x, where autocast is on; decay may stay float32.

        A running sum keeps its input's type, as torch's cumsum does. The other tensors may be outputs of layers under
        autocast, in a half type, or parameters in float32.
        """
        if not arguments.autocast_on(self.x):
            return self
        cast = LeakyAverage(*(arguments.cast_tensor(value, self.x.dtype) for value in self))
        float32 = isinstance(self.decay, Tensor) and self.decay.dtype == torch.float32
        return cast._replace(decay=self.decay) if float32 else cast

    def flops(self) -> tuple[int, int]:
        return 2 * self.x.numel(), 4 * self.x.numel()
