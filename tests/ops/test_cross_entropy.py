"""`cross_entropy`: losses and gradients of rows of logits on every instruction set."""

import functools

import pytest
import torch
import torch.nn.functional as F

import retro_kernels as rk
from retro_kernels import extensions
from retro_kernels.testing import inputs
from tests.conftest import fast_backends

WHY = extensions.unavailable("_cpu")
needs_kernel = pytest.mark.skipif(WHY is not None or not fast_backends("cross_entropy"), reason=str(WHY or "on a CPU"))
ISAS = [] if WHY else extensions.extension("_cpu").supported_isas().split()
every = pytest.mark.parametrize("backend", [*fast_backends("cross_entropy"), "reference"])


@needs_kernel
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocabulary", [1, 7, 64, 1001, 32000])
def test_values_and_gradients(isa, vocabulary):
    """Rows of every remainder, logits far from 0, upstream gradients of 0 and more than 1; the logits
    are not changed.
    """
    g = torch.Generator().manual_seed(0)
    logits = 8 * torch.randn(6, vocabulary, generator=g) + 90 * torch.randn(6, 1, generator=g)
    target = torch.randint(vocabulary, (6,), generator=g)
    target[0] = vocabulary - 1
    weights = torch.tensor([1.0, 0.0, 0.5, 3.0, 1.0, 1.0])
    exact, leaf = logits.double().requires_grad_(), logits.clone().requires_grad_()
    want = F.cross_entropy(exact, target, reduction="none")
    extensions.extension("_cpu").set_isa(isa)
    try:
        losses = rk.cross_entropy(leaf, target, reduction="none", backend="cpu")
        (grad,) = torch.autograd.grad(losses, leaf, weights)
        spoilt = logits.clone()
        spoilt[3, vocabulary // 2] = float("nan")
        assert rk.cross_entropy(spoilt, target, reduction="none", backend="cpu").isnan().tolist() == [
            row == 3 for row in range(6)
        ]
    finally:
        extensions.extension("_cpu").set_isa("")
    assert torch.equal(leaf, logits)
    torch.testing.assert_close(losses.double(), want, rtol=2e-6, atol=2e-5)
    torch.testing.assert_close(grad.double(), torch.autograd.grad(want, exact, weights)[0], rtol=1e-5, atol=1e-6)


@every
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_reductions_are_torchs(backend, reduction):
    kw = inputs.entropy(2) | {"reduction": reduction}
    torch.testing.assert_close(rk.cross_entropy(**kw, backend=backend), F.cross_entropy(**kw), rtol=1e-5, atol=1e-5)
    assert rk.cross_entropy(kw["input"], kw["target"]).dim() == 0


def test_the_references_gradient_is_autograds():
    kw = inputs.cast(inputs.entropy(3), torch.float64)
    leaf = kw["input"].requires_grad_()
    for a, b in zip(
        *(
            [f(leaf, kw["target"]), *torch.autograd.grad(f(leaf, kw["target"]), leaf)]
            for f in (lambda x, t: rk.cross_entropy(x, t, backend="reference"), F.cross_entropy)
        )
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_of_halves_are_float32(dtype):
    kw = inputs.entropy(2, dtype=dtype)
    losses = rk.cross_entropy(**kw)
    torch.testing.assert_close(losses, F.cross_entropy(kw["input"].float(), kw["target"], reduction="none"))


def losses_and_gradient(function, logits, target, **options):
    leaf = logits.clone().requires_grad_()
    losses = function(leaf, target, reduction="none", **options)
    return losses.detach(), torch.autograd.grad(losses.sum(), leaf)[0]


@every
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("ignore_index", [-100, 3])
def test_ignored_targets_are_torchs(backend, reduction, ignore_index):
    kw = inputs.entropy(2)
    kw["target"][:4] = ignore_index
    kw |= {"reduction": reduction, "ignore_index": ignore_index}
    results = []
    for function in (functools.partial(rk.cross_entropy, backend=backend), F.cross_entropy):
        leaf = kw["input"].clone().requires_grad_()
        losses = function(**kw | {"input": leaf})
        results.append([losses, *torch.autograd.grad(losses.square().sum(), leaf)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@every
def test_an_ignored_row_may_be_nan(backend):
    kw = inputs.entropy(2)
    kw["target"][:4] = -100
    kw["input"][:4] = torch.nan
    losses, grad = losses_and_gradient(rk.cross_entropy, kw["input"], kw["target"], backend=backend)
    assert (losses[:4] == 0).all() and (grad[:4] == 0).all()
    assert losses.isfinite().all() and grad.isfinite().all()
    assert rk.cross_entropy(kw["input"], kw["target"], backend=backend).isfinite()
    assert rk.cross_entropy(kw["input"], torch.full_like(kw["target"], -100), backend=backend).isnan()


@every
@pytest.mark.parametrize("shift", [0.0, 1e5, -1e5, 2.0**100])
def test_a_shift_of_the_logits_changes_nothing(backend, shift):
    """The logits are whole numbers, so that the shift of 1e5 loses nothing. With 2**100 all logits are equal."""
    logits = torch.arange(-8.0, 8.0).repeat(3, 1)
    logits = torch.zeros(3, 16) if shift > 1e9 else logits
    target = torch.tensor([0, 7, 15])
    want = losses_and_gradient(F.cross_entropy, logits.double(), target)
    for got, exact in zip(losses_and_gradient(rk.cross_entropy, logits + shift, target, backend=backend), want):
        torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=1e-7)


@every
def test_infinite_logits_give_what_torch_gives(backend):
    """+inf gives NaN; -inf has probability 0; a row of -inf alone gives NaN."""
    logits = torch.randn(8, 40)
    logits[0, 3] = logits[1, 5] = torch.inf
    logits[2, 3] = logits[3, 5] = -torch.inf
    logits[4] = -torch.inf
    logits[5] = torch.inf
    logits[6, 39] = torch.inf
    target = torch.full((8,), 3)
    want = losses_and_gradient(F.cross_entropy, logits, target)
    for got, right in zip(losses_and_gradient(rk.cross_entropy, logits, target, backend=backend), want):
        torch.testing.assert_close(got, right, equal_nan=True)
