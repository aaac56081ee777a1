"""A call of `cross_entropy` as a value. Letters: T rows, V classes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ... import checks
from ...reference_lib.attention import accumulator


class CrossEntropy(NamedTuple):
    input: Tensor  # [T,V]
    target: Tensor  # int64 [T]
    ignore_index: int = -100

    DIFFERENTIABLE = ("input",)
    RETURNS = ("losses",)
    KEPT = ()
    TWICE = True

    def checked(self) -> CrossEntropy:
        """Return the call checked, except the values of target, which a backend checks."""
        sizes: dict[str, int] = {}
        checks.shape("input", self.input, "T,V", sizes)
        checks.floating("input", self.input)
        checks.like("input", self.input, self.input, first="input")
        checks.dense_rows("input", self.input)
        if sizes["V"] < 1:
            raise ValueError("input: expected [T,V] with V >= 1; got V=0")
        checks.shape("target", self.target, "T", sizes)
        checks.like("target", self.target, self.input, (torch.int64,), first="input")
        checks.integer("ignore_index", self.ignore_index, -(2**63), 2**63 - 1)
        return self

    def classes(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (target, ignored, wrong): the class of each row, and whether the row is ignored or its target is out
        of range. Both kinds of rows get class 0, so that no index is out of range. Raises ValueError for a wrong target
        on the CPU; the host does not read a GPU's values.
        """
        last, target = self.input.shape[1] - 1, self.target
        ignored = target == self.ignore_index
        wrong = ((target < 0) | (target > last)) & ~ignored
        if target.device.type == "cpu" and checks.readable(target.as_subclass(Tensor)) and wrong.any():
            expected = f"0 to V-1={last} or ignore_index={self.ignore_index}"
            raise ValueError(f"target: expected {expected}; got {target[wrong][0].item()}")
        return target.masked_fill(ignored | wrong, 0), ignored, wrong

    def cast(self) -> CrossEntropy:
        """Autocast changes nothing: losses are float32 even for logits of a half type."""
        return self

    def empty_outputs(self) -> tuple[Tensor]:
        return (self.input.new_empty(self.input.shape[:1], dtype=accumulator(self.input)),)

    def flops(self) -> tuple[int, int]:
        return 3 * self.input.numel(), 4 * self.input.numel()
