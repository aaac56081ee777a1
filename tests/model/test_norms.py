"""`layers.RMSNorm`: values and gradients are float64's on every instruction set, and it serves only what it can."""

import pytest
import torch
import torch.nn.functional as F

from retro_kernels.core import native
from retro_kernels.cpu_lib import rms_norm as _rms_norm
from retro_model import layers
from retro_model.layers import norms

WHY = native.unavailable("_cpu")
needs_kernels = pytest.mark.skipif(WHY is not None, reason=str(WHY))
ISAS = [] if WHY else native.extension("_cpu").supported_isas().split()


@pytest.fixture
def served(monkeypatch):
    """How often the kernels normalised."""
    calls, plain = [], norms._normalise
    monkeypatch.setattr(norms, "_normalise", lambda *args: calls.append(args) or plain(*args))
    return calls


def build(width, eps=1e-3):
    torch.manual_seed(0)
    norm = layers.RMSNorm(width, eps=eps)
    torch.nn.init.normal_(norm.weight)
    return norm


def exact(norm, x, grad):
    """Output and gradients of x and the weight, in float64."""
    args = [t.detach().double().requires_grad_() for t in (x, norm.weight)]
    out = F.rms_norm(args[0], norm.normalized_shape, args[1], norm.eps)
    return out, *torch.autograd.grad(out, args, grad.double())


@needs_kernels
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", [(1, 300, 384), (5, 65, 67), (17, 3, 1001)], ids=str)
def test_outputs_and_gradients_are_those_of_float64(served, isa, shape):
    norm, x = build(shape[-1]), torch.randn(shape) * 0.1  # eps counts
    x.requires_grad_()
    grad = torch.randn(shape)
    native.extension("_cpu").set_isa(isa)
    try:
        out = norm(x)
        results = (out, *torch.autograd.grad(out, (x, norm.weight), grad))
    finally:
        native.extension("_cpu").set_isa("")
    assert len(served) == 1
    for ours, theirs in zip(results, exact(norm, x, grad)):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=2e-6 * theirs.abs().max().item())


@needs_kernels
@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_a_frozen_side_gets_no_gradient(served, frozen):
    norm, x = build(384), torch.randn(100, 384, requires_grad=True)
    (x if frozen == "x" else norm.weight).requires_grad_(False)
    norm(x).square().sum().backward()
    assert (x.grad is None, norm.weight.grad is None) == (frozen == "x", frozen == "weight") and served


@needs_kernels
def test_strides_do_not_matter(served):
    norm, x = build(384), torch.randn(384, 100).T.requires_grad_()
    grad = torch.randn(384, 100).T
    out = norm(x)
    for ours, theirs in zip((out, *torch.autograd.grad(out, (x, norm.weight), grad)), exact(norm, x, grad)):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-4)
    assert len(served) == 1


@needs_kernels
def test_a_gradient_can_be_differentiated_again(served):
    def gradient_of_a_gradient(norm, x):
        (grad,) = torch.autograd.grad(norm(x).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().mean(), (x, norm.weight))

    norm, x = build(384), torch.randn(100, 384, requires_grad=True)
    theirs = torch.nn.RMSNorm(384, eps=norm.eps)
    theirs.weight = norm.weight
    for got, want in zip(gradient_of_a_gradient(norm, x), gradient_of_a_gradient(theirs, x)):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    assert len(served) == 1


def test_what_only_torch_serves(served):
    norm, x = build(384), torch.randn(100, 384)
    double = layers.RMSNorm(384, dtype=torch.float64)
    assert double(x.double()).dtype == torch.float64
    assert norm(x[:2]).shape == (2, 384)  # too small to be worth it
    assert norm(x[:0]).shape == (0, 384)
    assert torch.func.vmap(norm)(x).shape == x.shape
    assert layers.RMSNorm((4, 96), eps=1e-6)(x.view(100, 4, 96)).shape == (100, 4, 96)
    assert layers.RMSNorm(384, elementwise_affine=False)(x).shape == x.shape
    assert norm.to("meta")(x.to("meta")).device.type == "meta"
    with pytest.raises(RuntimeError, match="normalized_shape"):
        build(96)(x)
    assert not served


def test_compiled_and_eager_agree():
    torch._dynamo.reset()
    norm, x = build(384), torch.randn(100, 384)
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), norm(x), rtol=1e-5, atol=1e-5)


@needs_kernels
def test_bits_do_not_depend_on_threads():
    x, weight, grad, threads = torch.randn(700, 384), torch.randn(384), torch.randn(700, 384), torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            y, rstd = _rms_norm.forward(x, weight, 1e-6)
            results.append((y, *_rms_norm.backward(x, weight, rstd, grad, (True, True))))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


def test_it_is_nn_rmsnorm():
    ours, theirs = layers.RMSNorm(64, eps=1e-6), torch.nn.RMSNorm(64, eps=1e-6)
    assert isinstance(ours, torch.nn.RMSNorm) and list(ours.state_dict()) == list(theirs.state_dict())
    assert torch.equal(ours.weight, theirs.weight) and repr(ours) == repr(theirs)
