"""Backends that cannot serve: one warning or an error gives the reason and the remedy, and another backend serves."""

from types import SimpleNamespace

import pytest
import torch

from retro_kernels import extensions, triton_lib
from retro_kernels.compile.target import Target
from retro_kernels.ops.topk_chunks import cuda
from tests.conftest import INTERPRETER
from tests.fresh import python

NOT_BUILT = """
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


def test_a_lacking_extension_is_said_once_with_the_remedy_and_not_where_no_kernel_is_missed():
    before, said = python("-c", NOT_BUILT).splitlines()
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


HALVES = """
import torch
import retro_kernels as rk
from retro_kernels.core import dispatch
from tests.ops.calls import BUILDERS

for op in dispatch.OPS:
    if dispatch.exists(op, "triton"):
        kw = BUILDERS[op](1, dtype=torch.bfloat16)
        getattr(rk, op)(**kw)  # another backend serves it
        try:
            getattr(rk, op)(**kw, backend="triton")
        except ValueError as error:
            print(error)
"""


@pytest.mark.skipif(INTERPRETER, reason="the interpreter of this process is repaired")
@pytest.mark.skipif(triton_lib.unavailable() == "triton is not installed", reason="needs triton")
def test_the_interpreter_without_the_repairs_of_the_tests_refuses_bfloat16_by_name():
    """The interpreter takes the bits of bfloat16 for integers, which gives values of 1e8."""
    refused = python("-c", HALVES, TRITON_INTERPRET="1").splitlines()
    assert len(refused) == 6
    for line in refused:
        assert "backend: 'triton' cannot serve this call of" in line
        assert "is torch.bfloat16, whose bits Triton's interpreter takes for integers; use float32" in line
