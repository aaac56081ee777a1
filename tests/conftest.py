"""Backends and device of a test process.

Without a GPU: `reference` and `cpu` in the ordinary process, `triton` in separate processes, either interpreted
(TRITON_INTERPRET=1) or compiled and emulated (RETRO_KERNELS_EMULATE=90). With a GPU all of them, `triton` and `cuda` on
it.
"""

import contextlib
import gc
import os

import hypothesis
import pytest
import torch

import retro_kernels as rk
from retro_kernels.core import layouts
from retro_kernels.testing import inputs
from tests import browser

os.environ.pop("COLUMNS", None)  # readline, loaded by pytest, sets COLUMNS for the workers; tables would be narrow

INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETER:
    from tests import bfloat16, interpreter

    bfloat16.mend()
    interpreter.mend()

#: RETRO_KERNELS_EMULATE=80 or 90: the Triton kernels as compiled for
#: that architecture, executed by ptx_emulator on CPU tensors
COMPILED = int(os.environ.get("RETRO_KERNELS_EMULATE") or 0)
if INTERPRETER or COMPILED:
    gc.set_threshold(50_000)  # garbage collection takes a sixth of a compile
if COMPILED:
    from tests.emulating import emulating

    _EMULATION = contextlib.ExitStack()  # keep a reference: without one the context closes at once
    _EMULATION.enter_context(emulating(COMPILED))

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("repeatable")


def fast_backends(op: str) -> list[str]:
    """Return the backends of `op` in this process, without the reference; `triton` alone in the interpreter."""
    names = ["triton"] if INTERPRETER or COMPILED else ["cpu", "triton", "cuda"]
    return [name for name in names if rk.backends()[op][name]]


@contextlib.contextmanager
def noted_launches():
    """List the launches inside. They run as outside: by the emulator, if this process emulates, or by Triton."""
    from retro_kernels.triton_lib import launch

    made, sinks = [], launch._sinks
    run = sinks[-1][0] if sinks else launch.Launch.run
    with launch.launches_to(lambda each: made.append(each) or run(each)):
        yield made


def with_backends(ops) -> list[tuple[str, str]]:
    """Return (op, backend) of all backends of the ops, with the reference in the ordinary process."""
    reference = [] if INTERPRETER or COMPILED else ["reference"]
    return [(op, backend) for op in ops for backend in (*fast_backends(op), *reference)]


def before_the_kernels(pairs) -> list:
    """Return the (op, backend) of a test of what lies before the kernels: every change needs one backend of an op."""
    return [pytest.param(*pair, marks=[pytest.mark.nightly] * (pair[1] == "reference")) for pair in pairs]


def examples(interpreted: int, native: int) -> int:
    """Return the number of examples of a property; compiled, each shape costs several kernels of a second."""
    return 2 if COMPILED else interpreted if INTERPRETER else native


def each_with_each(cases, variants) -> list[tuple]:
    """Return all (case, variant). Interpreted or emulated, which is slow, the cases take the variants in turn."""
    if INTERPRETER or COMPILED:
        return [(case, variants[i % len(variants)]) for i, case in enumerate(cases)]
    return [(case, variant) for case in cases for variant in variants]


def in_types(cases, dtypes) -> list:
    """Return (name, dtype) for all cases."""
    return [pytest.param(name, dtype, id=f"{name}-{dtype}") for name, dtype in each_with_each(cases, dtypes)]


def pytest_generate_tests(metafunc):
    """Parametrise `backend` in a test module with `OP = "..."` by the fast backends of that op."""
    if "backend" in metafunc.fixturenames and hasattr(metafunc.module, "OP"):
        metafunc.parametrize("backend", fast_backends(metafunc.module.OP))


#: Tests of `make nightly` where the interpreter runs the kernels: each takes 5 to 100 s there. Other backends run them
#: for every change. Left for every change: the tiles of one architecture, the slabs of other shapes, and of what lies
#: before the kernels one op.
INTERPRETED_AT_NIGHT = (
    "test_triton_tables.py::test_every_tile_with_an_option_computes_right",
    "test_triton_relative.py::test_slabs_of_the_stored_gradient[half a group]",
    "test_triton_relative.py::test_slabs_of_the_stored_gradient[a block]",
    "test_leaky_average.py::test_the_gradient_of_decay_is_not_summed_step_by_step",
    "test_integers.py::test_numbers_of_documents_may_be_any_integers",
    "test_fuzz.py::test_a_random_call[relative_attention",
    "test_fuzz.py::test_a_random_call[chunked_cross_attention",
    "test_transforms.py::test_a_compiled_transform_is_right_or_refused_by_name",
    "test_transforms.py::test_transform[`func.jvp`, `jacfwd`, `autograd.forward_ad`-relative_logits",
    "test_transforms.py::test_a_hook_that_returns_another_tensor_is_refused",
    "test_repeated_calls.py::test_gradients_of_other_inputs[chunked_cross_attention",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    shortened = INTERPRETER and "RETRO_KERNELS_FUZZ" not in os.environ  # which asks for long runs
    for item in items:
        name = item.nodeid.rpartition("/")[2]
        if shortened and name.startswith(INTERPRETED_AT_NIGHT) and not name.endswith("-80]"):
            item.add_marker("nightly")


@pytest.fixture(scope="module")
def chromium():
    with browser.chromium() as started:
        yield started


@pytest.fixture(autouse=True)
def _afresh():
    # torch.manual_seed records a traceback for later GPUs, which takes a millisecond
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)
    layouts.forget()  # an entry may follow from another test's patch


@pytest.fixture(autouse=True)
def _device(request, monkeypatch):
    """Put inputs on the device of the test's backend."""
    callspec = getattr(request.node, "callspec", None)
    backend = callspec.params.get("backend") if callspec else None
    monkeypatch.setattr(
        inputs, "DEVICE", "cuda" if backend in ("triton", "cuda") and not (INTERPRETER or COMPILED) else "cpu"
    )
