"""Without the extension the reference serves, and one warning gives the reason and the remedy."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from retro_kernels import extensions, triton_lib
from retro_kernels.compile.target import Target
from retro_kernels.ops.topk_chunks import cuda

CODE = """
import sys, warnings, torch
sys.modules["retro_kernels._cpu"] = None  # what an import finds where it was not built
import retro_kernels as rk
x, decay = torch.randn(1, 4, 1, 8), torch.full((1,), 0.5)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    rk.leaky_average(x, decay, backend="reference")  # asked for
    rk.leaky_average(x.double(), decay.double())  # no kernel serves float64
    rk.leaky_average(x[:, :0], decay)  # nothing to compute
    print(len(said))
    for _ in range(3):
        rk.leaky_average(x, decay)
print(*[str(one.message) for one in said if one.category is RuntimeWarning], sep="\\n")
"""


def test_said_once_with_the_remedy_and_not_where_no_kernel_is_missed():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, said = done.stdout.splitlines()
    assert before == "0"
    assert "leaky_average" in said and "retro_kernels._cpu was not built (python setup.py build_ext --inplace" in said


def test_a_driver_older_than_the_runtime_is_named():
    assert extensions.driver_too_old(13000, 13000) is None and extensions.driver_too_old(12080, 12020) is None
    assert extensions.driver_too_old(12040, 13000) is None
    assert "built with CUDA 13.0, the driver runs CUDA 12.4" in extensions.driver_too_old(13000, 12040)


@pytest.mark.parametrize("arch", [70, 75])
def test_a_card_that_is_too_old_is_named(monkeypatch, arch):
    """A V100 or a T4: a reason, and no error of a compiler."""
    pytest.importorskip("triton")
    card = Target(arch, 65536, 40)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(triton_lib, "current_target", lambda device: card)
    assert triton_lib.unavailable() == f"the kernels need sm_80 (A100, RTX 30) or newer; the GPU is sm_{arch}"
    monkeypatch.setattr(triton_lib, "device_type", lambda: "cpu")
    assert f"the GPU is sm_{arch}" in triton_lib.unsupported_tensors({"q": torch.ones(1)})
    half = torch.ones(1, 8, 8, dtype=torch.bfloat16)
    call = SimpleNamespace(query=half, key=half)
    assert cuda.unsupported_on(call, card) == f"sm_{arch} has no asynchronous copies; needs sm_80"
