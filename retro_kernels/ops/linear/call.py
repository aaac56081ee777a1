"""A call of `linear` as a value. Letters: I, J width of a row before and after."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ... import checks
from ...core import arguments


class Linear(NamedTuple):
    input: Tensor  # [...,I]
    weight: Tensor  # [J,I]
    bias: Tensor | None  # [J]

    DIFFERENTIABLE = ("input", "weight", "bias")
    RETURNS = ("y",)
    KEPT = ()
    TWICE = True

    def checked(self) -> Linear:
        sizes = arguments.weighted_rows(self, "J,I")
        if self.bias is not None:
            checks.shape("bias", self.bias, "J", sizes)
        for name, value in zip(self._fields, self):
            if value is not None:
                checks.like(name, value, self.input, first="input")
        return self

    def strict(self) -> bool:
        """Whether torch's function serves the call without broadcasting, casting or dropping anything."""
        x, weight, bias = self
        like = weight.is_meta == x.is_meta and x.is_floating_point()
        return like and weight.dim() == 2 and (bias is None or bias.shape == weight.shape[:1])

    def empty_outputs(self) -> tuple[Tensor]:
        return (self.input.new_empty((*self.input.shape[:-1], self.weight.shape[0])),)

    def flops(self) -> tuple[int, int]:
        products = 2 * self.input.numel() * self.weight.shape[0]
        return products, 2 * products
