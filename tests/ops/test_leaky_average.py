"""Every backend of the leaky average against the float64 reference, and its properties."""

import pytest
import torch

import retro_kernels as rk
from retro_kernels import extensions
from retro_kernels.testing import compare, inputs
from tests.conftest import in_types

OP = "leaky_average"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

CASES = {
    "plain": dict(),
    "no initial state": dict(initial=False),
    "decay at the edges": dict(decay=[0.0, 0.5, 0.99]),
    "nearly no decay": dict(decay=[0.9999, 0.999, 0.0], N=140),
    "one step": dict(N=1),
    "one column": dict(H=1, D=1, B=1, decay=[0.5]),
    "wide head": dict(D=70, N=9, H=1),
    "time in chunks": dict(N=300, B=1, H=1, D=4, decay=[0.99]),
    "whole chunks": dict(N=256, B=1, H=2, D=3, decay=[0.5, 0.995]),
    "documents": dict(segments=4),
    "documents of a token or two": dict(segments=30, N=40, initial=False),
    "documents, time in chunks": dict(N=300, B=2, H=1, D=4, decay=[0.99], segments=3),
    "documents, whole chunks": dict(N=256, B=1, H=2, D=3, decay=[0.5, 0.995], segments=2),
    "documents, one step": dict(N=1, segments=1),
}


@pytest.mark.parametrize(("name", "dtype"), in_types(CASES, DTYPES))
def test_values_and_gradients(backend, name, dtype):
    kw = inputs.leaky(3, dtype=dtype, **CASES[name])
    compare.check(OP, kw, backend)


@pytest.mark.skipif(extensions.unavailable("_cpu") is not None, reason=str(extensions.unavailable("_cpu")))
@pytest.mark.parametrize("D", [3, 64])
def test_a_sum_over_a_thousand_steps_drifts_little_further_than_its_terms_round(D):
    """The decay's gradient against the products of the kernel's own y and dx, summed in float64.

    It is within twice the effect of half a last place of each product; float32 sums of 64 steps have 2.5 to 3.2 times.
    Errors of y and dx cannot be repaired by the sum.
    """
    ratios = []
    for seed in range(24):
        kw = inputs.leaky(seed, B=1, N=1000, H=1, D=D, initial=False)
        got = compare.run(OP, kw, "cpu")
        terms = got["out0"][:, :-1].double() * got["grad_x"][:, 1:].double()
        ratios.append((got["grad_decay"].double() - terms.sum()).item() / (2**-24 * terms.norm().item()))
    assert torch.tensor(ratios).square().mean().sqrt() < 1.9


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_decay_may_stay_float32(backend, dtype):
    kw = inputs.leaky(4, dtype=dtype)
    kw["decay"] = torch.tensor([0.999, 0.5, 0.0], device=inputs.DEVICE)
    got = compare.check(OP, kw, backend)
    assert got["grad_decay"].dtype == torch.float32


def cancelling(backend, dtype):
    """The decay's gradient is a sum of 8192 products, of which a twentieth is left."""
    x = torch.rand(1, 8192, 1, 8, generator=inputs.generator(0)).to(inputs.DEVICE, dtype)
    upstream = torch.ones_like(x)
    upstream[:, x.shape[1] // 2 :] = -0.9
    decay = torch.tensor([0.875], device=inputs.DEVICE, dtype=dtype, requires_grad=True)
    return torch.autograd.grad(rk.leaky_average(x, decay, backend=backend), decay, upstream)[0]


def test_the_gradient_of_decay_is_not_summed_step_by_step(backend):
    want = cancelling("reference", torch.float64)
    for name in (backend, "reference"):
        compare.assert_passes(f"{name} grad_decay", cancelling(name, torch.float32), want, None, torch.float32)


@pytest.mark.parametrize("N", [40, 300])
def test_nothing_of_a_document_reaches_another(backend, N):
    """NaN and infinity stay in their document, in both passes, though 0 * NaN is NaN."""
    kw = inputs.leaky(10, B=1, N=N, H=1, D=4, decay=[0.9])
    kw["segment"] = torch.zeros(1, N, dtype=torch.int64, device=kw["x"].device)
    kw["segment"][:, N // 2 :] = 1
    for bad in (slice(0, N // 2), slice(N // 2, N)):
        good = slice(N // 2, N) if bad.start == 0 else slice(0, N // 2)
        poisoned = inputs.differentiable({**kw, "x": kw["x"].clone()})
        with torch.no_grad():
            poisoned["x"][:, bad.start + 3], poisoned["x"][:, bad.start + 5] = torch.nan, torch.inf
        y = rk.leaky_average(**poisoned, backend=backend)
        assert y[:, good].isfinite().all() and y[:, bad.stop - 1].isnan().all()
        upstream = torch.ones_like(y)
        upstream[:, bad.stop - 2] = torch.nan
        dx = torch.autograd.grad(y, poisoned["x"], upstream)[0]
        assert dx[:, good].isfinite().all() and dx[:, bad.start].isnan().all()
