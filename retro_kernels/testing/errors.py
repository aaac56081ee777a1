"""Errors relative to the float64 reference: relative Frobenius norm and greatest difference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import tolerances


@dataclass(frozen=True)
class Error:
    """Relative Frobenius norm and greatest absolute difference; both None where the tensors can't be compared: NaN,
    infinities that differ, or other shapes.
    """

    frobenius: float | None
    maximum: float | None


def error(got: Tensor, want: Tensor) -> Error:
    """Return ||got - want|| / ||want||, or ||got - want|| where `want` is zero. Infinities must be equal, and are left
    out.

    >>> error(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0]))
    Error(frobenius=0.7071067811865475, maximum=1.0)
    """
    if got.shape != want.shape:
        return Error(None, None)
    got, want = got.detach().double(), want.detach().double()
    same = (got == want) & want.isinf()
    difference = torch.where(same, 0.0, got - want)
    if not bool(difference.isfinite().all()):
        return Error(None, None)
    size = float(torch.where(same, 0.0, want).norm())
    return Error(float(difference.norm()) / (size or 1.0), float(difference.abs().max()) if difference.numel() else 0.0)


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return the Frobenius norm of `error`. Raises AssertionError for tensors that can't be compared."""
    relative = error(got, want).frobenius
    shapes = f"shapes {list(got.shape)} and {list(want.shape)}"
    assert relative is not None, f"not comparable: {shapes}, or NaN or infinities that differ"
    return relative


def assert_passes(name: str, got: Tensor, want: Tensor, eager: Tensor | None, dtype: torch.dtype) -> None:
    """Raise an AssertionError if `got` differs from `want` (float64) by more than the table allows. It names the place
    of the largest difference.
    """
    assert got.shape == want.shape, f"{name}: shape {list(got.shape)}, expected {list(want.shape)}"
    bad = got.isnan() & ~want.isnan()
    assert not bad.any(), f"{name}: {int(bad.sum())} NaN of {bad.numel()}, first at {bad.nonzero()[0].tolist()}"
    # a number beyond the range of got's type is infinite there
    want = torch.where(want.to(got.dtype).isinf(), torch.inf * want.sign(), want)
    relative = relative_error(got, want)
    eager_error = None if eager is None else error(eager, want).frobenius
    limit = tolerances.allowed(float("nan") if eager_error is None else eager_error, dtype)
    if relative > limit:
        gap = (got.double() - want).nan_to_num().abs()
        at = tuple(int(i) for i in torch.unravel_index(gap.argmax(), gap.shape)) if gap.dim() else ()
        raise AssertionError(
            f"{name} ({dtype}): relative error {relative:.3e} > {limit:.3e} (eager {eager_error or float('nan'):.3e}); "
            f"worst at {list(at)}: got {got[at].item():.6g}, want {want[at].item():.6g}"
        )
