"""Comparison of a backend's outputs and gradients with the float64 reference, by the table of tolerances."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

import retro_kernels as rk
from retro_kernels.reference_lib import attention

from . import inputs
from .errors import assert_passes
from .guard_bands import poisoned


@contextmanager
def eager_types():
    """Inside, the reference computes in the inputs' type: the eager formulation that tolerances are relative to."""
    with mock.patch.object(attention, "accumulator", lambda tensor: tensor.dtype):
        yield


def run(op: str, kw: dict, backend: str, grad_seed: int = 1) -> dict[str, Tensor]:
    """Return every floating output (`out0`, ...) and the gradient of every floating input, for random output gradients.

    The random gradients depend only on shapes, so runs in different types and backends can be compared. Infinite
    outputs (the lse of an empty row) get a zero gradient.
    """
    return _run(op, inputs.differentiable(kw), backend, grad_seed, lambda grad: grad)


def _run(op: str, leaves: dict, backend: str, grad_seed: int, view: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    extra = {"return_lse": True} if op in ("chunked_cross_attention", "relative_attention") else {}
    outs = getattr(rk, op)(**leaves, **extra, backend=backend)
    outs = outs if isinstance(outs, tuple) else (outs,)
    g = inputs.generator(grad_seed)
    floating = [o for o in outs if o.is_floating_point()]
    grads = [inputs.randn(g, *o.shape, dtype=o.dtype).to(o.device) for o in floating]
    grads = [view(torch.where(o.isfinite(), grad, 0)) for o, grad in zip(floating, grads, strict=True)]
    names = [n for n, v in leaves.items() if isinstance(v, Tensor) and v.requires_grad]
    results = torch.autograd.grad(floating, [leaves[n] for n in names], grads)
    result = {f"out{i}": o.detach() for i, o in enumerate(outs)}
    return result | {f"grad_{n}": grad for n, grad in zip(names, results, strict=True)}


def check(op: str, kw: dict, backend: str, seed: int = 0) -> dict[str, Tensor]:
    """Check the outputs and gradients of `backend` on `kw` against the float64 reference, and return them."""
    dtype = next(v.dtype for v in kw.values() if isinstance(v, Tensor) and v.is_floating_point())
    torch.manual_seed(seed)
    want = run(op, inputs.cast(kw, torch.float64), "reference")
    torch.manual_seed(seed)
    with eager_types():
        eager = run(op, kw, "reference")
    torch.manual_seed(seed)
    with poisoned():
        got = run(op, kw, backend)
    for name, value in want.items():
        if value.is_floating_point():
            assert_passes(f"{op}/{backend} {name}", got[name], value, eager[name], dtype)
        else:
            different = int((got[name] != value).sum())
            assert torch.equal(got[name], value), f"{op}/{backend} {name}: {different} entries differ"
    return got


def assert_equal(name: str, got: Tensor, want: Tensor) -> None:
    assert torch.equal(got, want), name


def check_layout(op: str, kw: dict, backend: str, view: Callable[[Tensor], Tensor], same=assert_equal) -> None:
    """Check that results have the same bits when `view` lays out the tensors and the outputs' gradients in memory.

    same: `same(name, got, want)` may assert something else.
    """
    want = run(op, kw, backend)
    leaves = {name: view(v) if isinstance(v, Tensor) else v for name, v in kw.items()}
    for v in leaves.values():
        if isinstance(v, Tensor) and v.is_floating_point():
            v.requires_grad_()
    got = _run(op, leaves, backend, 1, view)
    for name, value in want.items():
        same(name, got[name], value)
