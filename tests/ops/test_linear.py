"""`linear`: float32 products on every instruction set, and the calls that are passed to torch."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

import retro_kernels as rk
from retro_kernels.core import eager, native
from retro_kernels.ops.linear import cpu
from retro_kernels.testing import compare, inputs
from tests.conftest import fast_backends
from tests.ops.same import assert_threads_do_not_show

WHY = native.unavailable("_cpu")
needs_kernel = pytest.mark.skipif(WHY is not None or not fast_backends("linear"), reason=str(WHY or "on a CPU"))
ISAS = [] if WHY else native.extension("_cpu").supported_isas().split()
#: tiles and blocks of every kind
SIZES = [(1, 1, 1), (37, 130, 67), (1100, 257, 40), (9, 128, 1100)]


@pytest.fixture
def isa(request):
    native.extension("_cpu").set_isa(request.param)
    yield request.param
    native.extension("_cpu").set_isa("")


@pytest.fixture
def served(monkeypatch):
    """Calls that reached a kernel, on a processor where large ones do."""
    calls, serve = [], eager.serve
    monkeypatch.setattr(cpu, "_processor", lambda: None)
    monkeypatch.setattr(eager, "serve", lambda *arguments: calls.append(arguments) or serve(*arguments))
    return calls


@needs_kernel
@pytest.mark.parametrize("isa", ISAS, indirect=True)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows, depth, columns", SIZES)
def test_values_and_gradients(isa, rows, depth, columns, bias):
    compare.check("linear", inputs.linear(1, B=1, N=rows, I=depth, J=columns, bias=bias), "cpu")


@needs_kernel
@pytest.mark.parametrize("isa", ISAS, indirect=True)
@pytest.mark.parametrize("rows, depth, columns", SIZES)
def test_matrices_may_lie_either_way(isa, rows, depth, columns):
    """By rows, by columns, with gaps; a matrix with gaps both ways is copied."""
    kw = inputs.linear(2, N=rows, I=depth, J=columns)
    kw["input"] = kw["input"][0]
    want = rk.linear(**kw, backend="cpu")

    def gaps(x):
        return torch.stack([x, x.new_full(x.shape, torch.nan)], 1).flatten(0, 1)[::2]

    for view in (lambda x: x.mT.contiguous().mT, gaps, lambda x: gaps(x.mT).mT, lambda x: gaps(gaps(x).mT).mT):
        got = rk.linear(view(kw["input"]), view(kw["weight"]), gaps(kw["bias"][:, None])[:, 0], backend="cpu")
        assert torch.equal(got, want)


@needs_kernel
def test_bits_do_not_depend_on_threads():
    assert_threads_do_not_show("linear", inputs.linear(1, N=250, I=300, J=700))


@needs_kernel
def test_large_products_are_the_kernels(served):
    kw = inputs.differentiable(inputs.linear(1, N=256, I=128, J=96))
    y = rk.linear(**kw)
    grads = torch.autograd.grad(y.square().sum(), list(kw.values()))
    want = rk.linear(**kw, backend="cpu")
    assert len(served) == 2 and torch.equal(y, want)
    assert all(map(torch.equal, grads, torch.autograd.grad(want.square().sum(), list(kw.values()))))


def test_what_is_torchs(served):
    x, weight, bias = inputs.linear(1, N=256, I=128, J=96).values()
    for args in ((x[:, :2], weight), (x[:0], weight), (x[..., :8], weight[:, :8]), (x[0], weight[:9], bias[:9])):
        assert torch.equal(rk.linear(*args), F.linear(*args))  # too small for the kernel
    assert torch.equal(rk.linear(x.double(), weight.double()), F.linear(x.double(), weight.double()))
    assert torch.equal(rk.linear(x.bfloat16(), weight.bfloat16()), F.linear(x.bfloat16(), weight.bfloat16()))
    assert rk.linear(x.to("meta"), weight.to("meta")).is_meta
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rk.linear(x, weight, bias), F.linear(x, weight, bias))
    torch.testing.assert_close(torch.func.vmap(lambda row: rk.linear(row, weight))(x), F.linear(x, weight))
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(rk.linear(forward_ad.make_dual(x, x), weight)).tangent is not None
    assert not served


def test_a_processor_of_intel_takes_torchs(monkeypatch):
    """So do processors without AVX-512 and other families; others use the kernel."""
    monkeypatch.setattr(cpu.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(cpu.Path, "read_text", lambda path: "vendor_id : AuthenticAMD")
    monkeypatch.setattr(cpu.native, "cpu_isa", lambda: "avx512")
    assert cpu._processor.__wrapped__() is None
    monkeypatch.setattr(cpu.Path, "read_text", lambda path: "vendor_id : GenuineIntel")
    assert "Intel" in cpu._processor.__wrapped__()
    monkeypatch.setattr(cpu.Path, "read_text", lambda path: "vendor_id : AuthenticAMD")
    monkeypatch.setattr(cpu.native, "cpu_isa", lambda: "avx2")
    assert "AVX-512" in cpu._processor.__wrapped__()
    monkeypatch.setattr(cpu.native, "cpu_isa", lambda: "avx512")
    monkeypatch.setattr(cpu.platform, "machine", lambda: "aarch64")
    assert "AVX-512" in cpu._processor.__wrapped__()


def test_use_backend_decides(served):
    kw = inputs.linear(1, N=256, I=128, J=96)
    with rk.use_backend("reference"):
        y = rk.linear(**kw)
    assert served[0][2] is None and torch.equal(y, rk.linear(**kw, backend="reference"))


def test_a_default_that_has_no_kernel_of_it_leaves_the_call_to_torch(served):
    x, weight, bias = inputs.linear(1, N=256, I=128, J=96).values()
    for name, dtype in (("triton", torch.float32), ("cuda", torch.float32), ("cpu", torch.bfloat16)):
        with rk.use_backend(name):
            args = [t.to(dtype) for t in (x, weight, bias)]
            assert torch.equal(rk.linear(*args), F.linear(*args))
            assert rk.rms_norm(x.to(dtype), x[0, 0].to(dtype)).dtype == dtype
    assert not served


BAD = {
    "input: expected a torch.Tensor; got list": dict(input=[1.0]),
    "input: expected [...,I] with I=16; got [2, 19, 15]": dict(input=torch.zeros(2, 19, 15)),
    "input: expected float32, float16, bfloat16 or float64; got torch.int64": dict(input=torch.ones(2, 16).long()),
    "weight: expected [J,I] (2 dimensions); got shape [16]": dict(weight=torch.zeros(16)),
    "weight: expected torch.float32 (the type of input); got torch.float64": dict(weight=torch.zeros(24, 16).double()),
    "weight: expected the device of input, cpu; got meta": dict(weight=torch.zeros(24, 16, device="meta")),
    "bias: expected [J] with J=24; got J=1": dict(bias=torch.zeros(1)),
    "bias: expected torch.float32 (the type of input); got torch.float16": dict(bias=torch.zeros(24).half()),
    "backend: expected None or one of": dict(backend="mkl"),
}


@pytest.mark.parametrize("message", BAD)
@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("asked", ["kernels", "torch"])
def test_errors_name_the_argument(message, backend, asked, monkeypatch):
    monkeypatch.setattr(cpu, "_processor", lambda: None if asked == "kernels" else "slow")
    with pytest.raises((TypeError, ValueError)) as error:
        rk.linear(**inputs.linear(1) | {"backend": backend} | BAD[message])
    assert str(error.value).startswith(message)
