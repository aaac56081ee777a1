"""A call of `rms_norm` as a value. Letters: D width of a row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ... import checks
from ...reference_lib.attention import accumulator


class RMSNorm(NamedTuple):
    input: Tensor  # [...,D]
    weight: Tensor  # [D]
    eps: float

    DIFFERENTIABLE = ("input", "weight")
    RETURNS = ("y", "rstd")  # rstd [...] = 1 / sqrt(mean(input^2) + eps)
    KEPT = ("rstd",)
    TWICE = True

    def checked(self) -> RMSNorm:
        sizes: dict[str, int] = {}
        checks.floating("input", checks.tensor("input", self.input))
        checks.shape("weight", self.weight, "D", sizes)
        if list(self.input.shape[-1:]) != [sizes["D"]]:
            raise ValueError(f"input: expected [...,D] with D={sizes['D']}; got {list(self.input.shape)}")
        checks.like("input", self.input, self.input, first="input")
        types = tuple({self.input.dtype: None, torch.float32: None})
        checks.like("weight", self.weight, self.input, types, first="input")
        if checks.number("eps", self.eps) < 0:
            raise ValueError(f"eps: expected a number >= 0; got {self.eps}")
        return self._replace(eps=float(self.eps))

    def strict(self) -> bool:
        """Whether torch's function serves the call without broadcasting, casting or dropping anything."""
        x, weight, eps = self
        like = weight.is_meta == x.is_meta and x.is_floating_point() and weight.dtype in (x.dtype, torch.float32)
        return like and weight.dim() == 1 and eps.__class__ is float and eps >= 0

    def cast(self) -> RMSNorm:
        """Autocast changes nothing: a norm keeps its input's type, like torch's."""
        return self

    def empty_outputs(self) -> tuple[Tensor, Tensor]:
        x, dtype = self.input, accumulator(self.input)
        return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=dtype)

    def flops(self) -> tuple[int, int]:
        return 4 * self.input.numel(), 8 * self.input.numel()
