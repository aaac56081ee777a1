"""Which backends a test process covers, and on which device.

Without a GPU: `reference` and `cpu` in the ordinary process, `triton` in processes of its own: interpreted
(TRITON_INTERPRET=1), or compiled and emulated (RETRO_KERNELS_EMULATE=90). With a GPU all of them, `triton` and `cuda`
on it.
"""

import contextlib
import os

import hypothesis
import pytest
import torch

import retro_kernels as rk
from retro_kernels.core import eager
from retro_kernels.testing import inputs
from tests import browser

os.environ.pop("COLUMNS", None)  # readline, which pytest loads, sets it for the workers; tables would be narrow

INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETER:
    from tests import bfloat16, interpreter

    bfloat16.mend()
    interpreter.mend()

#: RETRO_KERNELS_EMULATE=80 or 90: the Triton kernels as compiled for
#: that architecture, executed by bench.emulate on CPU tensors
COMPILED = int(os.environ.get("RETRO_KERNELS_EMULATE") or 0)
if COMPILED:
    import gc

    from bench.emulate import launches

    gc.set_threshold(50_000)  # a compile makes so many objects that collecting takes a sixth of it
    _EMULATION = contextlib.ExitStack()  # held: a context that nobody holds is closed at once
    _EMULATION.enter_context(launches.emulating(COMPILED))

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("repeatable")


def fast_backends(op: str) -> list[str]:
    """Backends of `op`, the reference left out, that this process can run; `triton` alone under its interpreter."""
    names = ["triton"] if INTERPRETER or COMPILED else ["cpu", "triton", "cuda"]
    return [name for name in names if rk.backends()[op][name]]


def examples(interpreted: int, native: int) -> int:
    """How many of a property: compiled, each shape is several kernels of a second apiece."""
    return 2 if COMPILED else interpreted if INTERPRETER else native


def each_with_each(cases, variants) -> list[tuple]:
    """(case, variant) of all; interpreted or emulated, which is slow, the cases take the variants in turn."""
    if INTERPRETER or COMPILED:
        return [(case, variants[i % len(variants)]) for i, case in enumerate(cases)]
    return [(case, variant) for case in cases for variant in variants]


def in_types(cases, dtypes) -> list:
    """(name, dtype) of cases in types."""
    return [pytest.param(name, dtype, id=f"{name}-{dtype}") for name, dtype in each_with_each(cases, dtypes)]


def pytest_generate_tests(metafunc):
    """`backend` in a test module with `OP = "..."`: every fast backend of that op that this process can run."""
    if "backend" in metafunc.fixturenames and hasattr(metafunc.module, "OP"):
        metafunc.parametrize("backend", fast_backends(metafunc.module.OP))


@pytest.fixture(scope="module")
def chromium():
    with browser.chromium() as started:
        yield started


@pytest.fixture(autouse=True)
def _afresh():
    torch.manual_seed(0)
    eager.forget()  # what another test patched while a plan was made


@pytest.fixture(autouse=True)
def _device(request, monkeypatch):
    """Inputs go where the test's backend runs."""
    callspec = getattr(request.node, "callspec", None)
    backend = callspec.params.get("backend") if callspec else None
    monkeypatch.setattr(
        inputs, "DEVICE", "cuda" if backend in ("triton", "cuda") and not (INTERPRETER or COMPILED) else "cpu"
    )
