"""A call of `cross_entropy` as a value. Letters: T rows, V classes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ... import checks
from ...core import arguments


class CrossEntropy(NamedTuple):
    input: Tensor  # [T,V]
    target: Tensor  # int64 [T]

    DIFFERENTIABLE = ("input",)
    RETURNS = ("losses",)
    KEPT = ()
    TWICE = True

    def checked(self) -> CrossEntropy:
        """Return the call checked, except the values of target."""
        sizes: dict[str, int] = {}
        checks.shape("input", self.input, "T,V", sizes)
        checks.floating("input", self.input)
        checks.like("input", self.input, self.input, first="input")
        checks.dense_rows("input", self.input)
        if sizes["V"] < 1:
            raise ValueError("input: expected [T,V] with V >= 1; got V=0")
        checks.shape("target", self.target, "T", sizes)
        checks.like("target", self.target, self.input, (torch.int64,), first="input")
        return self

    def cast(self) -> CrossEntropy:
        """Autocast changes nothing: losses are float32 even for logits of a half type."""
        return self

    def empty_outputs(self) -> tuple[Tensor]:
        return (self.input.new_empty(self.input.shape[:1], dtype=arguments.accumulator(self.input)),)

    def flops(self) -> tuple[int, int]:
        return 3 * self.input.numel(), 4 * self.input.numel()
