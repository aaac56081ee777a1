"""A repeated call equals a first call.

A call under a dispatch mode uses the registered operator, which depends on no earlier call: repeated calls must give
its bits. These tests name no private function, so they hold for any cache of plans.
"""

import itertools

import pytest
import torch

import retro_kernels as rk
from retro_kernels.compile import tiles
from retro_kernels.testing import inputs
from tests.conftest import COMPILED, INTERPRETER, fast_backends, with_backends
from tests.ops.calls import Listener, floats, outputs
from tests.ops.test_contract import SMALL

EVERY = with_backends(SMALL)
every = pytest.mark.parametrize("op, backend", EVERY)


def results(op, kw, backend, wanted=(), listening=False) -> list[torch.Tensor]:
    """Return the outputs, and the gradients of the inputs `wanted`, from upstream gradients that depend only on the
    outputs' shapes.
    """
    kw = dict(kw)
    for name in wanted:
        kw[name] = kw[name].detach().clone().requires_grad_()
    with Listener() if listening else torch.enable_grad():
        outs = outputs(op, kw, backend)
        if not wanted:
            return list(outs)
        out = outs[0].where(outs[0].isfinite(), 0)
        outgoing = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
        return [*outs, *torch.autograd.grad(out, [kw[name] for name in wanted], outgoing)]


def same(op, kw, backend, wanted=()) -> None:
    got, want = (results(op, kw, backend, wanted, listening) for listening in (False, True))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.detach(), b.detach())


@every
def test_other_values_at_other_addresses(op, backend):
    for seed in range(2 if INTERPRETER or COMPILED else 5):
        kw = SMALL[op](seed=seed)
        same(op, kw, backend)
        same(op, kw, backend, floats(kw))


@every
def test_gradients_of_other_inputs(op, backend):
    """One layout's backward pass for a few inputs, then more, then others: each call gets its own gradients."""
    names = floats(SMALL[op](seed=0))
    subsets = [(name,) for name in names] + [tuple(names), *itertools.combinations(names[::-1], 2), tuple(names[:1])]
    for seed, wanted in enumerate(subsets[:: 9 if INTERPRETER or COMPILED else 1]):
        for again in range(2 if INTERPRETER or COMPILED else 3):
            same(op, SMALL[op](seed=10 * seed + again), backend, wanted)


#: layouts of a gradient: contiguous, last two dimensions transposed, every second number of a larger tensor
LAID_OUT = (
    lambda grad: grad.clone(),
    lambda grad: grad.mT.contiguous().mT if grad.dim() > 1 else grad.clone(),
    lambda grad: grad.repeat_interleave(2, -1)[..., ::2],
)


@every
def test_upstream_gradients_of_other_strides(op, backend):
    """The same values in several layouts, each with its own backward pass."""
    kw = SMALL[op](seed=1)
    for name in (wanted := floats(kw)):
        kw[name].requires_grad_()
    out = outputs(op, kw, backend)[0]
    outgoing = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
    leaves = [kw[name] for name in wanted]
    want, *others = [torch.autograd.grad(out, leaves, lay(outgoing), retain_graph=True) for lay in LAID_OUT * 2]
    for got in others:
        assert all(map(torch.equal, got, want))


#: layouts of an input: contiguous, longer rows cut, first two dimensions transposed
ROWS = (
    lambda x: x.clone(),
    lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    lambda x: x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() > 2 else x.clone(),
)


@every
def test_inputs_of_other_strides(op, backend):
    """The same shapes in several layouts."""
    for seed, lay in enumerate(ROWS * 2):
        kw = {n: lay(v) if isinstance(v, torch.Tensor) else v for n, v in SMALL[op](seed=seed).items()}
        same(op, kw, backend)


@pytest.mark.parametrize("backend", fast_backends("relative_attention"))
def test_one_of_two_arguments_of_one_shape(backend):
    """One bias, then the other: a plan does not confuse them."""
    kw = inputs.self_attention(1, B=1, N=5, H=2, causal=True, rel="all", biases=True)
    for left_out in ("content_bias", "position_bias") * 2:
        same("relative_attention", {name: value for name, value in kw.items() if name != left_out}, backend)


def test_a_plan_serves_its_own_op_alone():
    """A call served by one op is checked again by another."""
    logits, target = torch.randn(4, 9), torch.randint(9, (4,))
    rk.cross_entropy(logits, target, backend="reference")
    with pytest.raises(ValueError, match="outs: expected"):
        rk.merge_attention(logits, target, backend="reference")


# ---------------------------------------------------------------- one tensor for several arguments


def attention_of(query, key, value):
    return {"query": query, "key": key, "value": value, "causal": True}


SHARED = {
    "relative_attention": (attention_of, 3, (1, 6, 2, 16), ("xxx", "xyy", "xyx", "yyx")),
    "topk_chunks": (lambda query, key: {"query": query, "key": key, "k": 3}, 2, (1, 6, 16), ("xx",)),
}


@pytest.mark.parametrize(
    "op, backend, pattern", [(op, b, pattern) for op in SHARED for b in fast_backends(op) for pattern in SHARED[op][3]]
)
def test_one_tensor_given_for_several_arguments(op, backend, pattern):
    """Then separate tensors, then one again, with and without gradients: each argument has its own."""
    build, count, shape, _ = SHARED[op]
    for seed, given in enumerate([pattern] * 2 + ["xyz"[:count]] * 2 + [pattern]):
        g = inputs.generator(seed)
        tensors = {name: inputs.randn(g, *shape, dtype=torch.float32).to(inputs.DEVICE) for name in "xyz"}
        kw = build(*[tensors[name] for name in given])
        same(op, kw, backend)
        leaves = {name: x.requires_grad_() for name, x in tensors.items() if name in given}
        grads = []
        for listening in (False, True):
            with Listener() if listening else torch.enable_grad():
                out = outputs(op, build(*[leaves[name] for name in given]), backend)[0]
                grads.append(torch.autograd.grad(out.square().sum(), list(leaves.values())))
        for a, b in zip(*grads, strict=True):
            assert torch.equal(a, b)


# ---------------------------------------------------------------- positions that move from call to call

CHUNKED = inputs.cross_attention(1, B=1, N=3, M=4, K=1, R=2, H=1, query_start=20)  # 5 chunks, 0 to 4
CACHED = inputs.self_attention(1, B=1, N=2, S=9, H=1, causal=True, rel="bounded", rel_start=0, T=9)
WHOLE = inputs.self_attention(1, B=1, N=2, S=9, H=1)
ROWED = inputs.relative_logits(1, B=1, N=2, H=1, rel_start=0, T=9)
POSITIONED = {
    "chunked_cross_attention": ("query_start", CHUNKED, 0, (5 + 1) * 4 - 1 - 3),
    "relative_attention": ("query_offset", CACHED, -(2**29), 2**29),
    "relative_attention, all rows": ("query_offset", WHOLE, -(2**29), 2**29),
    "relative_logits": ("query_offset", ROWED, -(2**29), 2**29),
    "topk_chunks": ("query_offset", inputs.topk(1, B=1, Q=2, S=30, causal_gap=2), -(2**61), 2**61),
}
MOVING = [(name, backend) for name in POSITIONED for backend in fast_backends(name.split(",")[0])]


@pytest.mark.parametrize("gradient", [False, True], ids=["no gradient", "gradient"])
@pytest.mark.parametrize("name, backend", MOVING)
def test_a_position_is_held_to_its_range(name, backend, gradient):
    """After calls at other positions: from the first valid one to the last, and none beyond."""
    (position, kw, first, last), op = POSITIONED[name], name.split(",")[0]
    kw = {n: v.to(inputs.DEVICE) if isinstance(v, torch.Tensor) else v for n, v in kw.items()}
    wanted = floats(kw) if gradient else ()
    inside = [x for x in (5, 7, 12, 16, 9, first, last, 11) if first <= x <= last]
    for at in inside[-4:-1] if INTERPRETER or COMPILED else inside:
        same(op, kw | {position: at}, backend, wanted)
        for beyond in (first - 1, last + 1, 400 if last < 400 else 2**62):
            with pytest.raises(ValueError, match=f"{position}: expected|key: expected .*{position}={beyond}"):
                results(op, kw | {position: beyond}, backend, wanted)


@pytest.mark.parametrize("backend", fast_backends("topk_chunks"))
def test_a_position_that_needs_another_argument(backend):
    kw = inputs.topk(1, B=1, Q=2, S=30)
    for _ in range(3):
        same("topk_chunks", kw | {"query_offset": 0}, backend)
        with pytest.raises(ValueError, match="query_offset: expected 0 where causal_gap is None; got 3"):
            rk.topk_chunks(**kw, query_offset=3, backend=backend)


@pytest.mark.parametrize("backend", fast_backends("relative_attention"))
def test_a_position_that_another_argument_follows(backend):
    """Without rel_start each position has its own plan, for each layout."""
    for at, n in itertools.product((5, 7, 5, 9), (2, 3)):
        kw = inputs.self_attention(1, B=1, N=n, S=12, H=2, causal=True, rel="all")
        same("relative_attention", kw | {"query_offset": at}, backend)


# ---------------------------------------------------------------- tile tables


@pytest.mark.skipif(not (INTERPRETER or COMPILED), reason="tiles are Triton's; a process of its own runs them")
@pytest.mark.parametrize("op", ["relative_attention", "leaky_average"])
def test_calls_renew_what_followed_from_a_tile_table(op):
    """A call inside `replaced` uses the new rows, and a call after it the old, after any number of calls."""
    wanted = floats(SMALL[op](seed=1))

    def rows():
        with tiles.watched() as seen:
            results(op, SMALL[op](seed=1), "triton", wanted)
        return [row for _, row in seen]

    def repeat():
        for seed in range(3):
            results(op, SMALL[op](seed=seed), "triton", wanted)

    repeat()
    before = rows()
    assert before
    others = tuple({**row, "num_warps": 2 * row["num_warps"]} for row in tiles.table(op))
    with tiles.replaced(op, others):
        repeat()
        inside = rows()
    repeat()
    assert inside == [{**row, "num_warps": 2 * row["num_warps"]} for row in before]
    assert rows() == before
