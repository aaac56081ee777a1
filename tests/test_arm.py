"""Kernels for 64-bit ARM, under an emulator: those that compile within seconds. `python -m tools.arm` runs all."""

import subprocess

import pytest
import torch

from retro_kernels.core import native
from retro_kernels.testing import compare
from tools.arm import cases, emulated

pytestmark = pytest.mark.skipif(emulated.missing() is not None, reason=str(emulated.missing()))
SMALL = ("leaky_average", "matmul", "rms_norm", "softmax_losses", "topk_chunks", "topk_chunks_backward")
KERNELS = {"neonbf16": (*SMALL, "relative_logits"), "sve": SMALL}  # relative_logits takes as long as the others


@pytest.fixture(scope="module", params=["neonbf16", "sve"])
def extension(request, tmp_path_factory):
    isa = request.param
    ours = emulated.Extension(emulated.build(isa, tmp_path_factory.mktemp("arm"), KERNELS[isa]), isa)
    yield ours
    ours.close()


@pytest.fixture(scope="module")
def choice(tmp_path_factory):
    return emulated.build_choice(tmp_path_factory.mktemp("choice"))


@pytest.mark.parametrize(
    "processor, best",
    [
        ("cortex-a57", "neon"),
        ("a64fx", "neon"),  # vectors of 64 bytes, no bfloat16
        ("max,sve=off", "neonbf16"),
        ("max,sve-default-vector-length=16", "neonbf16"),
        ("max,sve-default-vector-length=32", "sve"),
        ("max,sve-default-vector-length=64", "neonbf16"),
    ],
)
def test_what_a_processor_runs(choice, processor, best):
    """Kernels for scalable vectors know their length, and are for that one alone."""
    found = subprocess.run(emulated.emulator(processor, choice), capture_output=True, text=True, check=True)
    assert found.stdout.split()[-1] == best


def test_functions_of_a_vector(extension):
    extension.check_primitives()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_and_gradients(extension, monkeypatch, dtype):
    monkeypatch.setattr(native, "extension", lambda name: extension)
    before = extension.calls
    for _, op, arguments in cases.small(dtype):
        if op in KERNELS[extension.isa]:
            compare.check(op, arguments, "cpu")
    assert extension.calls > before


@pytest.mark.parametrize(("transposed_a", "transposed_b"), [(False, False), (True, False), (False, True)])
def test_products(extension, monkeypatch, transposed_a, transposed_b):
    from retro_kernels.cpu_lib import matmul as _matmul

    monkeypatch.setattr(native, "extension", lambda name: extension)
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(139, 41, generator=generator).T if transposed_a else torch.randn(41, 139, generator=generator)
    b = torch.randn(75, 139, generator=generator).T if transposed_b else torch.randn(139, 75, generator=generator)
    torch.testing.assert_close(_matmul.matmul(a, b), a @ b, rtol=1e-5, atol=1e-4)


def test_norms(extension, monkeypatch):
    from retro_kernels.cpu_lib import rms_norm as _rms_norm

    monkeypatch.setattr(native, "extension", lambda name: extension)
    x, weight, grad = torch.randn(70, 43, requires_grad=True), torch.randn(43, requires_grad=True), torch.randn(70, 43)
    expected = torch.nn.functional.rms_norm(x, (43,), weight, 1e-6)
    y, rstd = _rms_norm.forward(x.detach(), weight.detach(), 1e-6)
    grads = _rms_norm.backward(x.detach(), weight.detach(), rstd, grad, (True, True))
    for ours, theirs in zip((y, *grads), (expected, *torch.autograd.grad(expected, (x, weight), grad))):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_losses(extension, monkeypatch):
    from retro_kernels.cpu_lib import softmax_losses as _softmax_losses

    monkeypatch.setattr(native, "extension", lambda name: extension)
    logits, targets, weights = torch.randn(5, 139, requires_grad=True), torch.arange(5), torch.rand(5)
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="none") * weights
    got = logits.detach().clone()
    losses = _softmax_losses.softmax_losses_(got, targets, weights, True)
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got, torch.autograd.grad(expected.sum(), logits)[0], rtol=1e-5, atol=1e-6)


def test_a_store_outside_a_tensor_is_reported(extension):
    x = torch.zeros(1, 3, 1, 4)
    y = torch.zeros(1, 2, 1, 4)  # a row too few
    with pytest.raises(RuntimeError, match="outside a tensor"):
        extension.leaky_average_forward(*map(native.view, (x, torch.zeros(1), None, None, y)), 1)
