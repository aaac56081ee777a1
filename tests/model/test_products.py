"""`layers.linear` and `matmul`: oneDNN's products and the kernels' equal torch's, and serve only what they can."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from retro_kernels.core import native
from retro_kernels.cpu_lib import matmul as _matmul
from retro_model import layers
from retro_model.layers import products

SHAPES = [((2, 256, 128), 96), ((3, 5, 40, 64), 512), ((2048, 40), 33)]  # of x, and rows of the weight


@pytest.fixture(params=["onednn", "kernels"])
def served(monkeypatch, request):
    """oneDNN or the kernels wherever they can serve, and how often they did."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch was built without oneDNN")
    if request.param == "kernels" and (why := native.unavailable("_cpu")):
        pytest.skip(why)
    calls = []
    plain = products._product
    monkeypatch.setattr(products, "_preferred", lambda: request.param)
    monkeypatch.setattr(products, "_product", lambda *args: calls.append(args) or plain(*args))
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


@pytest.mark.parametrize("bias", ["strided", "expanded", "of one number"])
def test_a_bias_that_is_no_row_of_floats_is_torchs(served, bias):
    """oneDNN reads a bias as if it lay in a row, and as long as the weight has rows."""
    x, weight = torch.randn(4, 256, 128), torch.randn(96, 128)
    row = {"strided": torch.randn(192)[::2], "expanded": torch.randn(1).expand(96), "of one number": torch.randn(1)}[
        bias
    ]
    torch.testing.assert_close(layers.linear(x, weight, row), F.linear(x, weight, row))
    assert not served


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
    onednn = "onednn" if torch.backends.mkldnn.is_available() else "torch"
    kernels = onednn if native.unavailable("_cpu") or onednn == "torch" else "kernels"
    for wish, expected in (("torch", "torch"), ("onednn", onednn), ("kernels", kernels)):
        monkeypatch.setenv("RETRO_MODEL_GEMM", wish)
        assert products._preferred.__wrapped__() == expected
    monkeypatch.setenv("RETRO_MODEL_GEMM", "mkl")
    with pytest.raises(ValueError, match="RETRO_MODEL_GEMM: expected torch, onednn, kernels; got 'mkl'"):
        products._preferred.__wrapped__()


def test_a_linear_layer_is_nn_linear():
    torch.manual_seed(0)
    ours = layers.Linear(64, 32)
    torch.manual_seed(0)
    theirs = torch.nn.Linear(64, 32)
    assert isinstance(ours, torch.nn.Linear) and list(ours.state_dict()) == list(theirs.state_dict())
    assert torch.equal(ours.weight, theirs.weight)


@pytest.mark.skipif(native.unavailable("_cpu") is not None, reason=str(native.unavailable("_cpu")))
@pytest.mark.parametrize("isa", [] if native.unavailable("_cpu") else native.extension("_cpu").supported_isas().split())
@pytest.mark.parametrize("sizes", [(1, 1, 1), (37, 130, 67), (1100, 257, 40), (9, 128, 1100)], ids=str)
def test_the_kernels_products(isa, sizes):
    """Tiles and blocks of every kind, matrices that lie either way, a bias, gaps between rows."""
    rows, depth, columns = sizes
    generator = torch.Generator().manual_seed(0)
    bias = torch.randn(columns, generator=generator)
    native.extension("_cpu").set_isa(isa)
    try:
        for a_lies in (1, -1):
            for b_lies in (1, -1):
                a = torch.randn((rows, depth + 3)[::a_lies], generator=generator)
                b = torch.randn((depth, columns + 5)[::b_lies], generator=generator)
                a, b = (a if a_lies == 1 else a.T)[:, :depth], (b if b_lies == 1 else b.T)[:, :columns]
                exact = a.double() @ b.double()
                torch.testing.assert_close(_matmul.matmul(a, b).double(), exact, rtol=1e-5, atol=1e-4)
                with_bias = _matmul.matmul(a, b, bias).double()
                torch.testing.assert_close(with_bias, exact + bias.double(), rtol=1e-5, atol=1e-4)
    finally:
        native.extension("_cpu").set_isa("")


def test_bits_of_products_do_not_depend_on_threads():
    if why := native.unavailable("_cpu"):
        pytest.skip(why)
    a, b, threads = torch.randn(500, 300), torch.randn(300, 700), torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(_matmul.matmul(a, b))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
