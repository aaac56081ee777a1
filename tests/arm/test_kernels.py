"""The CPU kernels for 64-bit ARM, in an emulator. The nightly test runs every op; the others compile within seconds."""

import subprocess

import pytest
import torch

from retro_kernels import extensions
from retro_kernels.testing import compare
from tests.arm import cases, emulated

pytestmark = pytest.mark.skipif(emulated.missing() is not None, reason=str(emulated.missing()))
SMALL = ("leaky_average", "rms_norm", "cross_entropy", "topk_chunks", "topk_chunks_backward")
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
    """Kernels for scalable vectors are compiled for one length."""
    found = subprocess.run(emulated.emulator(processor, choice), capture_output=True, text=True, check=True)
    assert found.stdout.split()[-1] == best


def test_functions_of_a_vector(extension):
    extension.check_primitives()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_and_gradients(extension, monkeypatch, dtype):
    monkeypatch.setattr(extensions, "extension", lambda name: extension)
    before = extension.calls
    for _, op, arguments in cases.small(dtype):
        if op in KERNELS[extension.isa]:
            compare.check(op, arguments, "cpu")
    assert extension.calls > before


@pytest.mark.nightly
@pytest.mark.parametrize("isa", emulated.ISAS)
def test_values_and_gradients_of_every_op(isa, monkeypatch, tmp_path):
    """The kernels of one instruction set take about a minute to compile."""
    ours = emulated.Extension(emulated.build(isa, tmp_path), isa)
    monkeypatch.setattr(extensions, "extension", lambda name: ours)
    ours.check_primitives()
    for _, op, arguments in cases.every():
        compare.check(op, arguments, "cpu")
    ours.close()


def test_a_store_outside_a_tensor_is_reported(extension):
    x = torch.zeros(1, 3, 1, 4)
    y = torch.zeros(1, 2, 1, 4)  # a row too few
    with pytest.raises(RuntimeError, match="outside a tensor"):
        extension.leaky_average_forward(*map(extensions.view, (x, torch.zeros(1), None, None, y)), 1)
