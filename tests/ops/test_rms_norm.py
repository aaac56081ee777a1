"""`rms_norm`: one pass over memory, and the calls that are passed to torch."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

import retro_kernels as rk
from retro_kernels import extensions
from retro_kernels.core import call
from retro_kernels.ops import rms_norm
from retro_kernels.testing import compare, inputs
from tests.conftest import fast_backends

WHY = extensions.unavailable("_cpu")
needs_kernel = pytest.mark.skipif(WHY is not None or not fast_backends("rms_norm"), reason=str(WHY or "on a CPU"))


@pytest.fixture
def served(monkeypatch):
    """Calls that reached a kernel."""
    calls, serve = [], call.serve
    for module in (call, rms_norm):
        monkeypatch.setattr(module, "serve", lambda *arguments: calls.append(arguments) or serve(*arguments))
    return calls


@needs_kernel
def test_strides_do_not_matter():
    kw = inputs.rms(1, B=1, N=100, D=384)
    compare.check_layout("rms_norm", kw, "cpu", lambda x: x.mT.contiguous().mT if x.dim() > 1 else x)


@pytest.mark.parametrize("backend", [*fast_backends("rms_norm"), "reference"])
def test_the_operators_second_output_has_a_gradient(backend):
    """1 / rms, which the public function does not return."""
    x, weight, eps = inputs.differentiable(inputs.rms(1, D=67)).values()
    outs = torch.ops.retro_kernels.rms_norm(x, weight, eps, backend)
    exact, exact_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    rstd = (exact.square().mean(-1) + eps).rsqrt()
    want = exact * rstd[..., None] * exact_weight, rstd
    for used in ((0,), (1,), (0, 1)):
        got = torch.autograd.grad([outs[i].sum() for i in used], x, retain_graph=True)[0]
        expected = torch.autograd.grad([want[i].sum() for i in used], exact, retain_graph=True)[0]
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@needs_kernel
def test_large_inputs_are_the_kernels(served):
    kw = inputs.differentiable(inputs.rms(1, N=100, D=384))
    y = rk.rms_norm(**kw)
    assert len(served) == 1 and torch.equal(y, rk.rms_norm(**kw, backend="cpu"))
    with torch.autocast("cpu", torch.bfloat16):  # changes nothing: a norm keeps its input's type
        served.clear()
        assert torch.equal(y, rk.rms_norm(**kw)) and served


def test_what_is_torchs(served):
    x, weight, eps = inputs.rms(1, N=100, D=384).values()
    for dtype in (torch.float64, torch.bfloat16):
        args = x.to(dtype), weight.to(dtype)
        assert torch.equal(rk.rms_norm(*args, eps), F.rms_norm(args[0], (384,), args[1], eps))
    assert rk.rms_norm(x.bfloat16(), weight, eps).dtype == torch.bfloat16
    for small in (x[:, :2], x[:0]):
        assert torch.equal(rk.rms_norm(small, weight), F.rms_norm(small, (384,), weight))
    torch.testing.assert_close(torch.func.vmap(lambda row: rk.rms_norm(row, weight))(x), F.rms_norm(x, (384,), weight))
    assert rk.rms_norm(x.to("meta"), weight.to("meta")).is_meta
    assert not served


def test_use_backend_decides(served):
    kw = inputs.rms(1, N=100, D=384)
    with rk.use_backend("reference"):
        y = rk.rms_norm(**kw)
    assert served[0][2] is None and torch.equal(y, rk.rms_norm(**kw, backend="reference"))


def test_a_default_backend_without_a_kernel_leaves_the_call_to_torch(served):
    x, weight, eps = inputs.rms(1, N=100, D=384).values()
    for name, dtype in (("triton", torch.float32), ("cuda", torch.float32), ("cpu", torch.bfloat16)):
        args = x.to(dtype), weight.to(dtype)
        with rk.use_backend(name):
            assert torch.equal(rk.rms_norm(*args, eps), F.rms_norm(args[0], (384,), args[1], eps))
    assert not served


def test_forward_mode_without_a_backend_is_torchs(served):
    x, weight, eps = inputs.rms(1, N=100, D=384).values()
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(rk.rms_norm(forward_ad.make_dual(x, x), weight, eps)).tangent is not None
    assert not served


def test_without_eps_it_is_torchs_default():
    x, weight, _ = inputs.rms(1, N=100, D=384).values()
    torch.testing.assert_close(rk.rms_norm(x * 1e-4, weight), F.rms_norm(x * 1e-4, (384,), weight))
