"""`layers.linear` and `matmul`: oneDNN's products equal torch's, and serve only what they can."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from retro_model import layers
from retro_model.layers import products

SHAPES = [((2, 256, 128), 96), ((3, 5, 40, 64), 512), ((2048, 40), 33)]  # of x, and rows of the weight


@pytest.fixture
def served(monkeypatch):
    """oneDNN wherever it can serve, and how often it did."""
    calls = []
    plain = products._product
    monkeypatch.setattr(products, "_preferred", lambda: torch.backends.mkldnn.is_available())
    monkeypatch.setattr(products, "_product", lambda *args: calls.append(args) or plain(*args))
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch was built without oneDNN")
    return calls


def operands(shape, rows, bias=True):
    torch.manual_seed(0)
    x, weight = torch.randn(shape), torch.randn(rows, shape[-1])
    return [t.requires_grad_() for t in ((x, weight, torch.randn(rows)) if bias else (x, weight))]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("shape", "rows"), SHAPES)
def test_outputs_and_gradients_are_those_of_float64(served, shape, rows, bias):
    args = operands(shape, rows, bias)
    exact = [t.detach().double().requires_grad_() for t in args]
    out, expected = layers.linear(*args), F.linear(*exact)
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, args, grad)
    expected_grads = torch.autograd.grad(expected, exact, grad.double())
    assert len(served) == 3  # the output, the gradient of x, the gradient of the weight
    for ours, theirs in zip((out, *grads), (expected, *expected_grads)):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())


def test_strides_do_not_matter(served):
    x, weight = torch.randn(128, 512).T, torch.randn(128, 2 * 96)[:, ::2].T
    torch.testing.assert_close(layers.linear(x, weight), F.linear(x.contiguous(), weight.contiguous()))
    a, b = torch.randn(512, 96).T, torch.randn(128, 512).T
    torch.testing.assert_close(products.matmul(a, b), a @ b, rtol=1e-5, atol=1e-4)
    assert len(served) == 2


def test_a_gradient_can_be_differentiated_again(served):
    def gradient_of_a_gradient(function):
        x, weight = operands(*SHAPES[0], bias=False)
        (grad,) = torch.autograd.grad(function(x, weight).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().mean(), (x, weight))

    for ours, theirs in zip(gradient_of_a_gradient(layers.linear), gradient_of_a_gradient(F.linear)):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert served


def test_what_only_torch_serves(served):
    x, weight = torch.randn(4, 256, 128), torch.randn(96, 128)
    torch.testing.assert_close(layers.linear(x.double(), weight.double()), F.linear(x.double(), weight.double()))
    with torch.autocast("cpu", torch.bfloat16):
        assert layers.linear(x, weight).dtype == torch.bfloat16
    assert torch.func.vmap(lambda row: layers.linear(row, weight))(x).shape == (4, 256, 96)
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(layers.linear(forward_ad.make_dual(x, x), weight)).tangent is not None
    assert layers.linear(x[:, :2], weight).shape == (4, 2, 96)  # too small to be worth it
    assert layers.linear(x[:0], weight).shape == (0, 256, 96)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layers.linear(x, weight[:, :100])
    assert not served


def test_compiled_and_eager_agree(served):
    torch._dynamo.reset()
    layer, x = layers.Linear(128, 96), torch.randn(4, 256, 128)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x), rtol=1e-5, atol=1e-5)


def test_the_environment_decides(monkeypatch):
    for wish, expected in (("torch", False), ("onednn", torch.backends.mkldnn.is_available())):
        monkeypatch.setenv("RETRO_MODEL_GEMM", wish)
        assert products._preferred.__wrapped__() is expected
    monkeypatch.setenv("RETRO_MODEL_GEMM", "mkl")
    with pytest.raises(ValueError, match="RETRO_MODEL_GEMM: expected torch or onednn; got 'mkl'"):
        products._preferred.__wrapped__()


def test_a_linear_layer_is_nn_linear():
    torch.manual_seed(0)
    ours = layers.Linear(64, 32)
    torch.manual_seed(0)
    theirs = torch.nn.Linear(64, 32)
    assert isinstance(ours, torch.nn.Linear) and list(ours.state_dict()) == list(theirs.state_dict())
    assert torch.equal(ours.weight, theirs.weight)
