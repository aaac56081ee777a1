"""Eager calls on the CPU are checked once: later calls give the same results and errors, and every listener sees each
call.
"""

import itertools
import sys
import weakref
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import retro_kernels as rk
from retro_kernels.compile import configs
from retro_kernels.core import eager, native, plan, private, steps
from retro_kernels.testing import inputs
from tests.conftest import INTERPRETER

MOST_FUNCTIONS = 8  # functions of the package in a call that is not its layout's first
pytestmark = pytest.mark.skipif(INTERPRETER, reason="plans are the CPU's")
CALLS = {
    "relative_attention": lambda seed: inputs.self_attention(seed, causal=True, key_mask=True),
    "chunked_cross_attention": lambda seed: inputs.cross_attention(seed, gate=True, mask="token"),
    "relative_logits": lambda seed: inputs.relative_logits(seed),
    "topk_chunks": lambda seed: inputs.topk(seed, docs=True),
    "leaky_average": lambda seed: inputs.leaky(seed, segments=3),
}


@pytest.fixture(autouse=True)
def _forgotten():
    plan._PLANS.clear()


def outputs(op, kw, **options):
    outs = getattr(rk, op)(**kw, **options)
    return outs if isinstance(outs, tuple) else (outs,)


@pytest.mark.parametrize("op", CALLS)
def test_later_calls_equal_the_first(op):
    """Other values at other addresses, by the plan of the first call and by the operator (with gradients)."""
    for differentiable in (inputs.differentiable, dict):  # with a gradient an int position is part of the plan
        outputs(op, differentiable(CALLS[op](1)))
    plans = set(plan._PLANS.values())
    for seed in (2, 3):
        kw = CALLS[op](seed)
        got, want = outputs(op, kw), outputs(op, inputs.differentiable(kw))
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
    assert set(plan._PLANS.values()) == plans


DECODING = {
    "chunked_cross_attention": ("query_start", {"N": 1, "M": 8, "query_start": 23, "mask": "neighbour"}),
    "relative_attention": (
        "query_offset",
        {"N": 1, "S": 24, "causal": True, "rel": "bounded", "rel_start": 0, "T": 24},
    ),
}


@pytest.mark.skipif(native.unavailable("_cpu") is not None, reason=str(native.unavailable("_cpu")))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", DECODING)
def test_what_the_cpu_prepares_of_a_call_takes_each_calls_own_tensors_and_position(op, dtype, monkeypatch):
    """Bit for bit equal to a first call of the kernel; no call's tensors are kept."""
    position, sizes = DECODING[op]
    build = inputs.cross_attention if op == "chunked_cross_attention" else inputs.self_attention
    calls = [build(seed, dtype=dtype, **sizes) | {position: at} for seed, at in enumerate((23, 9, 16))]
    got = [outputs(op, kw, backend="cpu", return_lse=True) for kw in calls]
    assert len(plan._PLANS) == 1
    monkeypatch.setattr(steps.Pass, "run", lambda self, values: self.function(values))
    for kw, outs in zip(calls, got):
        plan._PLANS.clear()
        for a, b in zip(outs, outputs(op, kw, backend="cpu", return_lse=True), strict=True):
            assert torch.equal(a, b)
    monkeypatch.undo()
    plan._PLANS.clear()
    outputs(op, calls[0], backend="cpu")
    query, first = weakref.ref(calls[0]["query"]), calls.pop(0)
    del first, kw
    assert query() is None


def entered(run) -> list[str]:
    """Return the functions of the package that `run` enters, without comprehensions and the test bench."""
    package, names = str(Path(rk.__file__).parent), []

    def profile(frame, event, argument):
        code = frame.f_code
        ours = code.co_filename.startswith(package) and "testing" not in code.co_filename
        if event == "call" and ours and not code.co_name.startswith("<"):
            names.append(code.co_name)

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return names


@pytest.mark.parametrize("op", CALLS)
def test_a_warm_call_enters_few_functions(op):
    plain, leaves = CALLS[op](1), inputs.differentiable(CALLS[op](1))
    for kw in (plain, leaves):
        for _ in range(2):
            out = outputs(op, kw)[0]
        assert len(found := entered(lambda: getattr(rk, op)(**kw))) <= MOST_FUNCTIONS, found
    for _ in range(2):
        out = outputs(op, leaves)[0]
        loss = out.where(out.isfinite(), 0).sum()
        found = entered(loss.backward)
    assert len(found) <= MOST_FUNCTIONS, found


@pytest.mark.parametrize("op", ["rms_norm", "cross_entropy"])
def test_a_warm_call_of_an_op_that_torch_has_enters_few_functions(op):
    """By the kernel, and by torch's own function if the call names no backend."""
    build = {"rms_norm": inputs.rms, "cross_entropy": inputs.entropy}[op]
    for backend in ("cpu", None):
        for kw in (build(1), inputs.differentiable(build(1))):
            for _ in range(2):
                outputs(op, kw, backend=backend)
            found = entered(lambda kw=kw, backend=backend: getattr(rk, op)(**kw, backend=backend))
            assert len(found) <= MOST_FUNCTIONS, found


def test_one_tensor_given_for_several_arguments():
    """Later calls of these shapes with separate tensors use each argument's own, in the same plan."""
    x, rest = torch.randn(1, 8, 2, 16), [torch.randn(1, 8, 2, 16) for _ in range(3)]
    rk.relative_attention(x, x, x)
    got = rk.relative_attention(*rest)
    assert len(plan._PLANS) == 1
    torch.testing.assert_close(got, rk.relative_attention(*rest, backend="reference"))


def test_positions_that_move_into_their_own_field():
    kw = inputs.self_attention(1, B=2, N=1, S=20, causal=True, rel="bounded", rel_start=0, T=20)
    for lengths in ([3, 17], [8, 2]):
        got = rk.relative_attention(**kw, query_offset=torch.tensor(lengths))
        rows = [
            rk.relative_attention(
                **{n: v[b : b + 1] if n in ("query", "key", "value") else v for n, v in kw.items()}, query_offset=i
            )
            for b, i in enumerate(lengths)
        ]
        torch.testing.assert_close(got, torch.cat(rows))


def test_an_equal_option_of_another_type_is_still_refused():
    kw = inputs.self_attention(1, causal=True)
    rk.relative_attention(**kw)
    with pytest.raises(TypeError, match="causal: expected a bool; got int"):
        rk.relative_attention(**kw | {"causal": 1})
    with pytest.raises(TypeError, match="causal_gap: expected an int; got bool"):
        rk.relative_attention(**kw, causal_gap=False)
    with pytest.raises(TypeError, match="scale: expected a number; got list"):
        rk.relative_attention(**kw, scale=[1])
    with pytest.raises(ValueError, match="key: expected"):
        rk.relative_attention(**kw | {"key": kw["key"][:1]})


def test_the_backend_is_part_of_the_plan():
    kw = inputs.leaky(1)
    rk.leaky_average(**kw)
    served = []
    for name in ("reference", None, "reference"):
        with rk.use_backend(name):
            rk.leaky_average(**kw)
        served.append(len(plan._PLANS))
    assert served == [2, 2, 2]
    for count, name in ((3, "reference"), (4, None)):
        with FlopCounterMode(display=False):
            rk.leaky_average(**kw, backend=name)
        assert len(plan._PLANS) == count
    with pytest.raises(ValueError, match="backend: expected None or one of"):
        rk.leaky_average(**kw, backend="mkl")


@pytest.mark.parametrize("listening", [False, True], ids=["eager", "by the operator"])
def test_each_part_of_a_layout_is_part_of_the_plan(listening):
    """Shape, strides, type and alignment, one at a time."""
    query, key = torch.randn(2, 8, 2, 16), torch.randn(2, 15, 16)
    layouts = (
        query,
        query[:1],
        query.transpose(1, 2).contiguous().transpose(1, 2),
        query.bfloat16(),
        torch.randn(query.numel() + 1)[1:].view(query.shape),
    )
    for count, given in enumerate(layouts, 1):
        for _ in range(2):
            with FlopCounterMode(display=False) if listening else torch.enable_grad():
                rk.relative_logits(given, key.to(given.dtype), key_len=8)
            assert len(plan._PLANS) == count


@pytest.mark.parametrize("listening", [False, True], ids=["eager", "by the operator"])
def test_the_tile_tables_are_part_of_the_plan(listening):
    kw = inputs.leaky(1)
    served = []
    for table in (configs.table("leaky_average"), configs.table("leaky_average")[:1]):
        with (
            configs.replaced("leaky_average", table),
            FlopCounterMode(display=False) if listening else torch.enable_grad(),
        ):
            rk.leaky_average(**kw)
        served.append(len(plan._PLANS))
    assert served == [1, 2]


def test_those_who_listen_hear_of_every_call():
    """A dispatch mode, the profiler, autocast, a gradient: each after the plan was made."""
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


def test_autocast_is_served_by_plans_and_stays_on():
    """The tensors are cast first; gradients have the inputs' types."""
    kw = inputs.relative_logits(1)
    kw["query"].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            logits = rk.relative_logits(**kw, backend="cpu")
        assert torch.is_autocast_enabled("cpu")
        with pytest.raises(ValueError, match="rel_key: expected"):
            rk.relative_logits(**kw | {"rel_key": kw["rel_key"][:, 1:]})
        assert torch.is_autocast_enabled("cpu")
    assert logits.dtype == torch.bfloat16 and len(plan._PLANS) == 1
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
        assert rk.relative_logits(**kw).dtype == torch.float32 and len(plan._PLANS) == 1
        assert not torch.is_autocast_enabled("cpu")
    finally:
        torch.set_autocast_enabled("cuda", False)


def test_transforms_see_torchs_own_function_where_nobody_names_a_backend():
    """Even where a kernel would be faster, because torch's function has every rule."""
    x, weight = torch.randn(2**9, 2**7), torch.randn(2**7)
    tangent = torch.randn_like(x)

    def ours(x):
        return rk.rms_norm(x, weight)

    def torchs(x):
        return torch.rms_norm(x, (2**7,), weight)

    got, want = (torch.func.jvp(f, (x,), (tangent,))[1] for f in (ours, torchs))
    assert torch.equal(got, want)


def test_a_gradients_alignment_is_part_of_its_pass():
    query = torch.randn(2, 8, 2, 16, requires_grad=True)
    out = rk.relative_logits(query, torch.randn(2, 15, 16), key_len=8)
    (served,) = plan._PLANS.values()
    for offset in (0, 1, 0):
        grad = torch.ones(out.numel() + 1)[offset:][: out.numel()].view(out.shape)
        torch.autograd.grad(out, query, grad, retain_graph=True)
    assert len(served.backwards) == 2


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


def test_plans_are_bounded(monkeypatch):
    monkeypatch.setattr(plan, "_MOST_PLANS", 3)
    used = []
    for n in range(1, 9):
        rk.leaky_average(torch.ones(1, n, 1, 1), torch.tensor([0.5]))
        assert 1 <= len(plan._PLANS) <= 3
        rk.leaky_average(
            torch.ones(1, 1, 1, 1), torch.tensor([0.5])
        )  # the least recently used one is evicted, not this one
        used.append(next(reversed(plan._PLANS.values())))
    assert len({id(one) for one in used}) == 1


def test_a_tensor_in_another_guise_is_no_step():
    """It has the argument's memory and layout, so it shares the argument's slot."""
    listed = steps.Pass(lambda given: [torch.ops.aten.alias(given[0].detach()).mul_(2)], True)
    x = torch.ones(3)
    (out,) = listed.run([x])
    assert len(listed.ways[0].steps) == 1 and out.data_ptr() == x.data_ptr() and x.tolist() == [2.0] * 3


def test_plans_of_the_operator_are_bounded_too(monkeypatch):
    """In calls through the registered operator the least recently used plan is evicted."""
    monkeypatch.setattr(plan, "_MOST_PLANS", 3)
    decay, used = torch.tensor([0.5]), []
    for n in range(1, 9):
        for length in (n, 1):
            torch.ops.retro_kernels.leaky_average(torch.ones(1, length, 1, 1), decay, None, None, None)
            assert len(plan._PLANS) <= 3
        used.append(next(reversed(plan._PLANS.values())))
    assert len({id(one) for one in used}) == 1


def test_a_pass_knows_its_device_while_it_is_listed():
    """Triton's tiles depend on it."""
    x = torch.ones(2)
    with steps.Listing((x,)) as listing:
        (given,) = listing.given
        assert given.is_meta and steps.device_of(given) == x.device
    assert steps.device_of(x) == x.device


class Shared(OrderedDict):
    """Cache whose entries another thread evicts right after each look-up."""

    def get(self, key):
        found = super().get(key)
        self.pop(key, None)
        return found


def test_a_plan_that_another_thread_evicts_still_serves(monkeypatch):
    monkeypatch.setattr(plan, "OrderedDict", Shared)  # backward passes
    monkeypatch.setattr(plan, "_PLANS", Shared())
    kw = inputs.differentiable(inputs.leaky(1))
    out, operator = rk.leaky_average(**kw), torch.ops.retro_kernels.leaky_average
    (want,) = torch.autograd.grad(out.sum(), kw["x"], retain_graph=True)
    for _ in range(3):
        assert torch.equal(rk.leaky_average(**kw), out)
        assert torch.equal(torch.autograd.grad(out.sum(), kw["x"], retain_graph=True)[0], want)
        assert torch.equal(operator(kw["x"], kw["decay"], kw["initial"], None, None), out)


def test_backward_passes_of_a_plan_are_bounded(monkeypatch):
    """One per layout of the upstream gradient: the least recently used one is evicted."""
    monkeypatch.setattr(plan, "_MOST_BACKWARDS", 2)
    kw = inputs.differentiable(inputs.leaky(1, B=2, N=3, H=4, D=5, initial=False))
    usual, seen = None, set()
    for order in itertools.permutations(range(4)):
        out = rk.leaky_average(**kw)
        grad = torch.ones([out.shape[at] for at in order]).permute([order.index(at) for at in range(4)])
        for given in (grad, torch.ones_like(out)):
            torch.autograd.grad(out, list(kw.values()), given, retain_graph=True)
        (served,) = plan._PLANS.values()
        passes = list(served.backwards.values())
        usual = usual or passes[-1]
        assert len(passes) <= 2 and usual is passes[-1]
        seen.update(passes)
    assert len(seen) > 2


def test_a_torch_that_lacks_a_private_name_takes_the_public_way(monkeypatch):
    """Every call uses the registered operator, as under a mode."""
    kw = inputs.differentiable(inputs.leaky(3, N=9))
    want = [rk.leaky_average(**kw), *torch.autograd.grad(rk.leaky_average(**kw).sum(), list(kw.values()))]
    monkeypatch.setattr(private, "_tells", False)
    monkeypatch.setattr(eager._Differentiable, "forward", None)
    got = [rk.leaky_average(**kw), *torch.autograd.grad(rk.leaky_average(**kw).sum(), list(kw.values()))]
    assert all(map(torch.equal, got, want))
