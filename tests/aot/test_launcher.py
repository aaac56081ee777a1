"""A launch by the handle of a compiled kernel passes the driver the same arguments as Triton's launcher, on a stub
device.
"""

import pytest
import torch

import retro_kernels as rk
from retro_kernels.compile.target import NVIDIA
from retro_kernels.core import layouts
from retro_kernels.testing import inputs, stub
from tests.conftest import COMPILED, INTERPRETER
from tests.ops.calls import outputs
from tests.ops.test_layouts import MOST_FUNCTIONS, entered

if INTERPRETER or COMPILED:
    pytest.skip("launches are replaced in this process", allow_module_level=True)
pytest.importorskip("triton")

import importlib
import pkgutil

import triton

from retro_kernels.triton_lib.launch import Scalars, launches_to

CALLS = {
    "leaky_average": lambda seed: inputs.leaky(seed, segments=3),
    "relative_attention": lambda seed: inputs.self_attention(seed, N=3, causal=True, key_mask=True),
}


def addresses(arguments: tuple) -> tuple:
    """Return the launcher's arguments, with addresses instead of tensors and None instead of the hooks' metadata."""
    *head, _, enter, leave = arguments[:9]
    assert not getattr(enter, "calls", enter) and not getattr(leave, "calls", leave)
    return (*head, *(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments[9:]))


@pytest.mark.parametrize("op", CALLS)
def test_bound_launches_are_tritons(op, monkeypatch):
    heard = []
    with stub.device(90, heard.append):
        kw = CALLS[op](1)
        leaf = kw[next(iter(kw))].requires_grad_()
        seen = {}
        for kind in ("bound", "anew"):
            if kind == "anew":
                monkeypatch.setattr(Scalars, "bind", lambda scalars, launch, given: launch.run())
            layouts.forget()
            kept = []  # else one call would reuse the freed memory of another
            for _ in range(4):
                out = outputs(op, kw, "triton")[0]
                kept += [out, *torch.autograd.grad(out, leaf, torch.ones_like(out))]
                seen[kind] = [addresses(launch) for launch in heard]
                heard.clear()
    inputs = {t.data_ptr() for t in kw.values() if isinstance(t, torch.Tensor)}
    assert len(seen["bound"]) == len(seen["anew"]) > 1
    assert named(seen["bound"], inputs) == named(seen["anew"], inputs)


#: decode steps with the position as an int
STEP = {"dtype": torch.bfloat16, "B": 1}
CACHE = {"rel": "bounded", "rel_start": 0, "S": 64, "T": 64, "causal": True}
STEPS = {
    "chunked_cross_attention": (lambda: inputs.cross_attention(1, **STEP, N=1, M=4, query_start=67), "query_start"),
    "relative_attention": (lambda: inputs.self_attention(1, **STEP, N=1, **CACHE), "query_offset"),
    "relative_logits": (
        lambda: inputs.relative_logits(1, **STEP, N=1, key_len=64, T=127, rel_start=-63),
        "query_offset",
    ),
    "topk_chunks": (lambda: inputs.topk(1, **STEP, Q=1, S=64, causal_gap=0), "query_offset"),
}


@pytest.mark.parametrize("op", STEPS)
def test_sixty_four_decode_steps_have_two_layouts_at_most(op):
    """One, and one more where the position decides something: whether a table reaches all keys.

    Every launch has the numbers that it would have in a first call.
    """
    make, name = STEPS[op]
    heard = []
    with stub.device(90, heard.append):
        kw, got, want = make(), [], []
        given = {t.data_ptr() for t in kw.values() if isinstance(t, torch.Tensor)}
        for position in range(64):
            getattr(rk, op)(**kw | {name: position}, backend="triton")
            got.append(named([addresses(launch) for launch in heard], given))
            heard.clear()
        assert len(layouts._MEMO) <= 4  # two values per layout: its check and its backend
        for position in range(64):
            layouts.forget()
            getattr(rk, op)(**kw | {name: position}, backend="triton")
            want.append(named([addresses(launch) for launch in heard], given))
            heard.clear()
    assert got == want and len({tuple(step) for step in got}) == 64


@pytest.mark.parametrize("op", STEPS)
def test_no_kernel_is_specialised_to_a_number_that_moves(op):
    """A handle of a compiled kernel is kept for every position, so none of these numbers may be compiled in."""
    package = importlib.import_module(f"retro_kernels.ops.{op}.triton")
    modules = [importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    kernels = {x for m in modules for x in vars(m).values() if isinstance(x, triton.JITFunction) and launchable(x)}
    moving = {"query_start", "first_chunk", "offset", "shift", "causal_shift"}
    found = [p for kernel in kernels for p in kernel.params if p.name in moving]
    assert found and all(p.do_not_specialize and not p.is_constexpr for p in found)


def launchable(function) -> bool:
    return function.__name__.endswith("_kernel")


def named(launches: list[tuple], inputs: set[int]) -> list[tuple]:
    """Replace addresses of memory that each call allocates by their order of occurrence in a launch."""
    launches_named = []
    for launch in launches:
        order: dict[int, int] = {}
        # larger than any size, stride or seed of these calls; a heap may lie below 2**32
        made = {x for x in launch[6:] if isinstance(x, int) and x > 2**24 and x not in inputs}
        launches_named.append(
            (*launch[:6], *(("made", order.setdefault(x, len(order))) if x in made else x for x in launch[6:]))
        )
    return launches_named


@pytest.mark.parametrize("op", CALLS)
def test_a_warm_call_enters_few_functions(op):
    """Few for each launch, and few others."""
    heard = []

    def few(run) -> None:
        heard.clear()
        found = entered(run)
        assert len(found) <= 2 * MOST_FUNCTIONS + 8 * len(heard) and heard, found

    with stub.device(90, heard.append):
        kw = CALLS[op](1)
        for _ in range(2):
            getattr(rk, op)(**kw)
        few(lambda: getattr(rk, op)(**kw))
        leaves = inputs.differentiable(kw)
        for _ in range(2):
            getattr(rk, op)(**leaves).sum().backward()
        few(getattr(rk, op)(**leaves).sum().backward)


def test_what_a_profiler_hooks_is_heard(monkeypatch):
    import triton

    heard = []
    with stub.device(90, heard.append), torch.no_grad():
        kw = CALLS["leaky_average"](1)
        for _ in range(3):
            rk.leaky_average(**kw, backend="triton")
        assert not getattr(heard[-1][7], "calls", heard[-1][7])
        monkeypatch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [lambda metadata: None])
        rk.leaky_average(**kw, backend="triton")
        assert heard[-1][7].calls


def test_products_are_fused_with_sums_whatever_tritons_default(monkeypatch):
    """Triton 3.10 changes the default, and 3.9 warns at the first compilation that leaves the choice open."""
    from retro_kernels.compile import triton_private
    from retro_kernels.triton_lib import sums

    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    launched = []
    with launches_to(launched.append):
        sums.sum_parts({"x": sums.Parts(torch.empty(3, 4, device="meta"), torch.empty(4, device="meta"))})
    assert triton_private.source(launched[0], NVIDIA[90])[1].enable_fp_fusion
