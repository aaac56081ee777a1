"""Leaky average on the CPU: every instruction set, both ways to split the work, any number of threads."""

import pytest
import torch

import retro_kernels as rk
from retro_kernels import extensions
from retro_kernels.testing import compare, inputs
from tests.ops.same import assert_threads_do_not_show

from .test_cpu_infrastructure import isas

OP = "leaky_average"
pytestmark = pytest.mark.skipif(extensions.unavailable("_cpu") is not None, reason=str(extensions.unavailable("_cpu")))

CASES = {
    "small": dict(),
    "no initial state": dict(initial=False),
    "one step": dict(N=1),
    "lanes of two strips": dict(B=1, N=9, H=140, D=64),
    "time is cut": dict(B=1, N=2500, H=2, D=24),
    "time is cut, no initial state": dict(B=2, N=2049, H=1, D=8, initial=False),
    "time is cut, and what is carried over a cut lasts": dict(B=1, N=2500, H=2, D=24, decay=[0.9995, 0.998]),
    "no decay and slow decay": dict(H=2, decay=[0.0, 0.999], N=300),
    "documents": dict(segments=5, N=70),
    "documents, time is cut": dict(B=2, N=2500, H=2, D=24, decay=[0.9995, 0.998], segments=6),
    "documents of a token or two, time is cut": dict(B=1, N=2100, H=3, decay=[0.5, 0.99, 0.0], segments=900),
    "one document, time is cut": dict(B=1, N=2500, H=2, D=24, decay=[0.9995, 0.998], segments=1),
    "decays of 0, a half and 0.99": dict(H=3, decay=[0.0, 0.5, 0.99], N=200),
    "decays of 0, a half and 0.99, time is cut": dict(B=1, H=3, decay=[0.0, 0.5, 0.99], N=2100),
}


#: what narrow types change: how a vector and its tail are loaded and stored
NARROW = [(name, t) for name in ("small", "lanes of two strips") for t in (torch.bfloat16, torch.float16)]


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in CASES), *NARROW], ids=str)
def test_values_and_gradients(kernels, name, dtype, isa):
    kernels.set_isa(isa)
    compare.check(OP, inputs.leaky(3, dtype=dtype, **CASES[name]), "cpu")


def test_bits_do_not_depend_on_threads():
    for case in (dict(N=2500, B=1), dict(B=3, H=40, D=64, segments=7), dict(B=1, N=20, H=7, D=24)):
        assert_threads_do_not_show(OP, inputs.leaky(4, **case))


def test_float32_decay_beside_bfloat16():
    kw = inputs.leaky(6, dtype=torch.bfloat16) | {"decay": torch.tensor([0.5, 0.9, 0.999])}
    compare.check(OP, kw, "cpu")


@pytest.mark.parametrize("begin", [1023, 1024, 1025, 2047, 2048, 2099])
def test_a_document_that_begins_beside_a_cut(begin):
    """Time is cut at 1024 and 2048; the state carried over a cut stops at a document's start, values and gradients."""
    kw = inputs.leaky(8, B=1, N=2100, H=2, D=8, decay=[0.999, 0.9])
    kw["segment"] = (torch.arange(2100) >= begin).long().unsqueeze(0)
    compare.check(OP, kw, "cpu")
    kw["x"][:, begin - 1] = torch.inf
    assert rk.leaky_average(**kw, backend="cpu")[:, begin:].isfinite().all()


@pytest.mark.parametrize("N", [40, 2100])
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.99])
def test_gradient_of_each_decay(decay, N):
    """One head at a time: in a common norm a slow decay's large gradient would hide an error of a decay of 0."""
    got = compare.check(OP, inputs.leaky(7, B=1, N=N, H=1, D=16, decay=[decay]), "cpu")
    assert got["grad_decay"].abs().item() > 0
