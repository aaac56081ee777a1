"""Calls of one layout are checked once: later calls give the same results and errors, every listener sees each call,
and the memo holds no tensor.
"""

import gc
import itertools
import sys
import weakref
from pathlib import Path
from types import FunctionType, ModuleType

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import retro_kernels as rk
from retro_kernels import extensions
from retro_kernels.compile import tiles
from retro_kernels.core import layouts
from retro_kernels.core.arguments import CALLS as CLASSES
from retro_kernels.testing import inputs
from tests.conftest import INTERPRETER
from tests.ops.calls import BUILDERS, outputs
from tests.ops.test_contract import SMALL
from tests.refusals import refused

MOST_FUNCTIONS = 30  # functions of the package in a repeated call of a layout, apart from functions of `extensions`
pytestmark = pytest.mark.skipif(INTERPRETER, reason="of calls on the CPU")
OPS = ("relative_attention", "chunked_cross_attention", "relative_logits", "topk_chunks", "leaky_average")


def entries(op: str, part: str | None = None) -> list[tuple]:
    """Return the memo's names of an op's layouts: ("public", op, backend) or (op, "backward", backend), and
    (op, backend) of the raw operator.
    """
    names = [name for name, _ in layouts._MEMO]
    return [name for name in names if op in name and (part is None or part in name)]


def tensors_in(value) -> list[torch.Tensor]:
    """Return the tensors that a value refers to, by Python's garbage collector."""
    seen, left, found = set(), [value], []
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, (type, ModuleType, FunctionType)):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            found.append(one)
        left += gc.get_referents(one)
    return found


@pytest.mark.parametrize("op", OPS)
def test_the_memo_holds_no_tensor(op):
    kw = inputs.differentiable(SMALL[op]())
    out = outputs(op, kw)[0]
    out.where(out.isfinite(), 0).sum().backward()
    assert entries(op, "backward") and not tensors_in(layouts._MEMO)


KEYS = {
    "shape": lambda x: x[:1],
    "strides": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "type": lambda x: x.bfloat16(),
    "device": lambda x: x.to("meta"),
    "alignment": lambda x: torch.randn(x.numel() + 1)[1:].view(x.shape),
}


@pytest.mark.parametrize("part", KEYS)
def test_each_part_of_a_tensors_layout_is_part_of_its_key(part):
    query, key = torch.randn(2, 8, 2, 16), torch.randn(2, 15, 16)
    usual = CLASSES["relative_logits"](query, key, 8, None, None, 0)
    assert layouts.key(usual) == layouts.key(usual._replace(query=query.clone()))
    assert layouts.key(usual) != layouts.key(usual._replace(query=KEYS[part](query)))


def test_whether_a_gradient_is_wanted_is_no_part_of_a_key():
    """Each call decides again whether autograd records it."""
    kw = inputs.leaky(1)
    rk.leaky_average(**kw)
    before = len(layouts._MEMO)
    assert rk.leaky_average(**inputs.differentiable(kw)).requires_grad
    with torch.no_grad():
        assert not rk.leaky_average(**inputs.differentiable(kw)).requires_grad
    assert len(layouts._MEMO) == before


@pytest.mark.parametrize(
    "value",
    [[1.0], torch.ones(2).to_sparse(), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), object()],
    ids=["list", "sparse", "nested", "object"],
)
def test_values_without_a_plain_layout_have_no_key(value):
    """Such a call is checked each time."""
    made = CLASSES["relative_logits"](torch.ones(1, 4, 1, 16), torch.ones(1, 7, 16), 4, None, None, 0)
    assert layouts.key(made) is not None
    assert layouts.key(made._replace(rel_key=value)) is None


DECODING = {
    "chunked_cross_attention": ("query_start", {"N": 1, "M": 8, "query_start": 23, "mask": "neighbour"}),
    "relative_attention": (
        "query_offset",
        {"N": 1, "S": 24, "causal": True, "rel": "bounded", "rel_start": 0, "T": 24},
    ),
}


@pytest.mark.skipif(extensions.unavailable("_cpu") is not None, reason=str(extensions.unavailable("_cpu")))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", DECODING)
def test_what_the_cpu_prepares_of_a_call_takes_each_calls_own_tensors_and_position(op, dtype):
    """Bit for bit equal to a first call of the kernel; no call's tensors are kept."""
    position, sizes = DECODING[op]
    calls = [BUILDERS[op](seed, dtype=dtype, **sizes) | {position: at} for seed, at in enumerate((23, 9, 16))]
    got = [outputs(op, kw, "cpu", lse=True) for kw in calls]
    assert len(entries(op)) == 1
    for kw, outs in zip(calls, got):
        layouts.forget()
        for a, b in zip(outs, outputs(op, kw, "cpu", lse=True), strict=True):
            assert torch.equal(a, b)
    query, first = weakref.ref(calls[0]["query"]), calls.pop(0)
    del first, kw
    assert query() is None


@pytest.mark.parametrize("op", DECODING)
def test_a_position_that_moves_does_not_grow_the_memo(op):
    """With and without gradients. All of these positions decide the same."""
    position, sizes = DECODING[op]
    for differentiable in (dict, inputs.differentiable):
        layouts.forget()
        for at in range(8, 24):
            outputs(op, differentiable(BUILDERS[op](1, **sizes) | {position: at}))
        assert len(entries(op)) == 1


def entered(run) -> list[str]:
    """Return the functions of the package that `run` enters, without comprehensions and the test bench."""
    package, names = str(Path(rk.__file__).parent), []

    def profile(frame, event, argument):
        code = frame.f_code
        ours = code.co_filename.startswith(package) and not {"testing", "extensions.py", "native_call.py"} & set(
            Path(code.co_filename).parts
        )
        if event == "call" and ours and not code.co_name.startswith("<"):
            names.append(code.co_name)

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return names


@pytest.mark.parametrize("op", OPS)
def test_a_warm_call_enters_few_functions(op):
    plain, leaves = SMALL[op](), inputs.differentiable(SMALL[op]())
    for kw in (plain, leaves):
        for _ in range(2):
            out = outputs(op, kw)[0]
        assert len(found := entered(lambda: getattr(rk, op)(**kw))) <= MOST_FUNCTIONS, found
    for _ in range(2):
        out = outputs(op, leaves)[0]
        loss = out.where(out.isfinite(), 0).sum()
        found = entered(loss.backward)
    assert len(found) <= MOST_FUNCTIONS, found


@pytest.mark.parametrize("op", OPS)
def test_tensors_that_are_computed_when_they_are_read(op):
    """A tensor with a pending negation, and one of zeros without memory, as an input and as an upstream gradient."""
    kw = SMALL[op]()
    name = "x" if op == "leaky_average" else "query"
    for lazy, plain in (
        (torch._neg_view(kw[name]), -kw[name]),
        (torch._efficientzerotensor(kw[name].shape), torch.zeros_like(kw[name])),
    ):
        for _ in range(2):
            torch.testing.assert_close(outputs(op, kw | {name: lazy}), outputs(op, kw | {name: plain}))
    leaves = inputs.differentiable(kw)
    out = outputs(op, leaves)[0]
    upstream = torch.where(out.isfinite(), torch.randn_like(out), 0).detach()
    (expected,) = torch.autograd.grad(out, leaves[name], -upstream)
    (found,) = torch.autograd.grad(outputs(op, leaves)[0], leaves[name], torch._neg_view(upstream))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("op", ["rms_norm", "cross_entropy"])
def test_a_warm_call_of_an_op_that_torch_has_enters_few_functions(op):
    """By the kernel, and by torch's own function if the call names no backend."""
    for backend in ("cpu", None):
        for kw in (BUILDERS[op](1), inputs.differentiable(BUILDERS[op](1))):
            for _ in range(2):
                outputs(op, kw, backend)
            found = entered(lambda kw=kw, backend=backend: getattr(rk, op)(**kw, backend=backend))
            assert len(found) <= MOST_FUNCTIONS, found


def test_an_equal_option_of_another_type_is_still_refused():
    kw = inputs.self_attention(1, causal=True)
    rk.relative_attention(**kw)
    refused("causal: expected a bool; got int", rk.relative_attention, **kw | {"causal": 1}, error=TypeError)
    refused("causal_gap: expected an int; got bool", rk.relative_attention, **kw, causal_gap=False, error=TypeError)
    refused("query_offset: expected an int", rk.relative_attention, **kw, query_offset=False, error=TypeError)
    refused("scale: expected a number; got list", rk.relative_attention, **kw, scale=[1], error=TypeError)
    refused("key: expected", rk.relative_attention, **kw | {"key": kw["key"][:1]})


def test_the_backend_is_part_of_the_key():
    kw = inputs.leaky(1)
    rk.leaky_average(**kw)
    for name in ("reference", None, "reference"):
        with rk.use_backend(name):
            rk.leaky_average(**kw)
    for name in ("reference", None):
        with FlopCounterMode(display=False):
            rk.leaky_average(**kw, backend=name)
    names = [("public", "leaky_average", None), ("public", "leaky_average", "reference")]
    assert entries("leaky_average") == names + [("leaky_average", "reference"), ("leaky_average", None)]
    refused("backend: expected None or one of", rk.leaky_average, **kw, backend="mkl")


@pytest.mark.parametrize("listening", [False, True], ids=["eager", "under a mode"])
def test_a_tile_table_renews_the_memo(listening):
    kw = inputs.leaky(1)
    rk.leaky_average(**kw)
    for table in (tiles.table("leaky_average"), tiles.table("leaky_average")[:1]):
        with (
            tiles.replaced("leaky_average", table),
            FlopCounterMode(display=False) if listening else torch.enable_grad(),
        ):
            assert not layouts._MEMO
            rk.leaky_average(**kw)
            assert layouts._MEMO
        assert not layouts._MEMO


def test_those_who_listen_hear_of_every_call():
    """A dispatch mode, the profiler, autocast, a gradient: each after a first call."""
    kw = inputs.leaky(1)
    rk.leaky_average(**kw)
    seen = []

    class Listener(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function._schema.name)
            return function(*args, **(kwargs or {}))

    with Listener():
        rk.leaky_average(**kw)
    assert "retro_kernels::leaky_average" in seen
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        rk.leaky_average(**kw)
    assert any("retro_kernels::leaky_average" in event.key for event in profile.key_averages())
    logits = inputs.relative_logits(1)
    assert rk.relative_logits(**logits).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert rk.relative_logits(**logits).dtype == torch.bfloat16
    assert rk.leaky_average(**kw | {"x": kw["x"].clone().requires_grad_()}).requires_grad
    with torch.no_grad():
        assert not rk.leaky_average(**kw | {"x": kw["x"].clone().requires_grad_()}).requires_grad


def test_autocast_casts_first_and_stays_on():
    """The tensors are cast first; gradients have the inputs' types."""
    kw = inputs.relative_logits(1)
    kw["query"].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            logits = rk.relative_logits(**kw, backend="cpu")
        assert torch.is_autocast_enabled("cpu")
        refused("rel_key: expected", rk.relative_logits, **kw | {"rel_key": kw["rel_key"][:, 1:]})
        assert torch.is_autocast_enabled("cpu")
    assert logits.dtype == torch.bfloat16 and len(entries("relative_logits")) == 1
    (grad,) = torch.autograd.grad(logits.float().sum(), kw["query"])
    narrow = {name: x.detach().bfloat16() if isinstance(x, torch.Tensor) else x for name, x in kw.items()}
    query = narrow["query"].requires_grad_()
    again = rk.relative_logits(**narrow, backend="cpu")
    assert torch.equal(logits, again)
    assert torch.equal(grad, torch.autograd.grad(again.float().sum(), query)[0].float())


def test_autocast_of_another_device_changes_nothing():
    kw = inputs.relative_logits(1)
    torch.set_autocast_enabled("cuda", True)
    try:
        assert rk.relative_logits(**kw).dtype == torch.float32
        assert not torch.is_autocast_enabled("cpu")
    finally:
        torch.set_autocast_enabled("cuda", False)


def test_a_gradients_alignment_is_part_of_its_key():
    query = torch.randn(2, 8, 2, 16, requires_grad=True)
    out = rk.relative_logits(query, torch.randn(2, 15, 16), key_len=8)
    for offset in (0, 1, 0):
        grad = torch.ones(out.numel() + 1)[offset:][: out.numel()].view(out.shape)
        torch.autograd.grad(out, query, grad, retain_graph=True)
    assert len(entries("relative_logits", "backward")) == 2


class Nothing(torch.autograd.Function):
    """Its input has no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def test_without_a_gradient_from_above_none_comes_back():
    kw = inputs.differentiable(inputs.leaky(1))
    Nothing.apply(rk.leaky_average(**kw)).sum().backward()
    assert all(value.grad is None for value in kw.values())


def test_dropout_draws_another_seed_every_time():
    kw = inputs.self_attention(1, dropout_p=0.5)
    first, second = rk.relative_attention(**kw), rk.relative_attention(**kw)
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    drawn = [rk.relative_attention(**kw) for _ in range(2)]
    torch.manual_seed(7)
    assert all(torch.equal(rk.relative_attention(**kw), out) for out in drawn)


@pytest.mark.parametrize("raw", [False, True], ids=["eager", "raw operator"])
def test_the_memo_is_bounded(raw, monkeypatch):
    """A full memo is emptied, and later calls fill it again with equal results."""
    monkeypatch.setattr(layouts, "_MOST", 6)
    decay, sizes = torch.tensor([0.5]), []
    for n in range(1, 9):
        for length in (n, 1):
            x = torch.ones(1, length, 1, 1)
            if raw:
                out = torch.ops.retro_kernels.leaky_average(x, decay, None, None, None)
            else:
                out = rk.leaky_average(x, decay)
            sizes.append(len(layouts._MEMO))
            assert torch.equal(out, rk.leaky_average(x, decay))
    assert max(sizes) <= 6
    assert any(later < earlier for earlier, later in itertools.pairwise(sizes))


def test_an_error_is_not_stored():
    kw = inputs.leaky(1)
    for _ in range(2):
        refused("decay: expected", rk.leaky_average, kw["x"], kw["decay"][1:])
    assert not layouts._MEMO


class Shared(layouts.Known):
    """Memo whose entries another thread evicts right after each look-up."""

    def get(self, key):
        found = super().get(key)
        self.pop(key, None)
        return found


def test_an_entry_that_another_thread_evicts_still_serves(monkeypatch):
    monkeypatch.setattr(layouts, "_MEMO", Shared())
    kw = inputs.differentiable(inputs.leaky(1))
    out, operator = rk.leaky_average(**kw), torch.ops.retro_kernels.leaky_average
    (want,) = torch.autograd.grad(out.sum(), kw["x"], retain_graph=True)
    for _ in range(3):
        assert torch.equal(rk.leaky_average(**kw), out)
        assert torch.equal(torch.autograd.grad(out.sum(), kw["x"], retain_graph=True)[0], want)
        assert torch.equal(operator(kw["x"], kw["decay"], kw["initial"], None, None), out)
