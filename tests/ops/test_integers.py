"""Integers that become addresses are checked by the kernel that uses them, so that no entrance bypasses the check."""

import functools
import warnings

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import retro_kernels as rk
from retro_kernels import checks
from retro_kernels.core import arguments
from retro_kernels.core.arguments import CALLS
from retro_kernels.testing import compare, inputs
from tests.conftest import COMPILED, INTERPRETER, fast_backends
from tests.ops.calls import resolved
from tests.ops.test_contract import SMALL
from tests.ops.test_transforms import AsModule
from tests.refusals import refused

OPS = torch.ops.retro_kernels
T, V = 5, 7


class Plain(torch.Tensor):
    """A subclass that changes nothing."""


def compiled(function, args):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def traced(function, args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(function, args, check_trace=False)


def vmapped(function, args):
    return lambda *values: torch.func.vmap(function)(*(torch.stack([x, x]) for x in values))[0]


def with_gradient(function, args):
    """Return the values and run the backward pass too."""

    def run(x, *rest):
        torch.func.grad(lambda x: function(x, *rest).sum())(x)
        return function(x, *rest)

    return run


#: (function, good arguments) -> a function of the same arguments, which enters the package in another way
ENTRANCES = {
    "eager": lambda function, args: function,
    "compile": compiled,
    "func.grad": with_gradient,
    "vmap": vmapped,
    "vmap of grad": lambda function, args: vmapped(with_gradient(function, args), args),
    "jit.trace": traced,
    "make_fx": lambda function, args: make_fx(function)(*args),
    "make_fx symbolic": lambda function, args: make_fx(function, tracing_mode="symbolic")(*args),
    "export": lambda function, args: torch.export.export(AsModule(function), args).module(),
    "subclass": lambda function, args: lambda *values: function(*(x.as_subclass(Plain) for x in values)),
}
entrances = pytest.mark.parametrize("entrance", ENTRANCES)
of_cpu = pytest.mark.skipif(INTERPRETER or COMPILED, reason="of the cpu kernels and the reference")


def of_targets(backend):
    return lambda logits, target: rk.cross_entropy(logits, target, reduction="none", backend=backend)


def raw_targets(backend):
    return lambda logits, target: OPS.cross_entropy(logits, target, -100, backend)


def logits_and_target():
    return torch.randn(T, V), torch.arange(T)


@of_cpu
@entrances
@pytest.mark.parametrize("backend", [*fast_backends("cross_entropy"), "reference"])
@pytest.mark.parametrize("make", [of_targets, raw_targets], ids=["public", "raw operator"])
def test_a_wrong_target_is_named(make, backend, entrance):
    """Also one far away, which a kernel would turn into an address of another mapping. TorchScript makes a RuntimeError
    of every error, with the message in it.
    """
    if make is raw_targets and "grad" in entrance:
        pytest.skip("transforms that differentiate do not serve raw operators")
    logits, target = logits_and_target()
    want = torch.nn.functional.cross_entropy(logits, target, reduction="none")
    run = ENTRANCES[entrance](make(backend), (logits, target))
    torch.testing.assert_close(run(logits, target).as_subclass(torch.Tensor), want)
    for wrong in (V, -1, 10**12, -(10**12)):
        bad = target.clone()
        bad[2] = wrong
        words = f"target: expected 0 to V-1={V - 1} or ignore_index=-100; got {wrong}"
        refused(words, run, logits, bad, error=RuntimeError if entrance == "jit.trace" else ValueError)


@of_cpu
@pytest.mark.parametrize("backend", [*fast_backends("cross_entropy"), "reference"])
def test_a_wrong_target_of_a_backward_pass_is_named(backend):
    logits, _ = logits_and_target()
    bad = torch.full((T,), V)
    with pytest.raises(ValueError, match=f"target: expected 0 to V-1={V - 1} or ignore_index=-100; got {V}"):
        OPS.cross_entropy_backward(logits, bad, -100, backend, torch.ones(T), [True])


@of_cpu
def test_a_wrong_target_that_the_host_does_not_read_gives_nan(monkeypatch):
    """On a GPU the host reads no value: a row with a wrong target has loss and gradient NaN, and no other row has."""
    monkeypatch.setattr(checks, "readable", lambda value: False)
    logits, target = logits_and_target()
    logits.requires_grad_()
    want = torch.nn.functional.cross_entropy(logits, target, reduction="none")
    (grad,) = torch.autograd.grad(want.sum(), logits)
    target[1], target[3] = V, -1
    losses = rk.cross_entropy(logits, target, reduction="none", backend="reference")
    (got,) = torch.autograd.grad(losses.sum(), logits)
    for result, right in ((losses, want), (got, grad)):
        assert result[[1, 3]].isnan().all()
        torch.testing.assert_close(result[[0, 2, 4]], right[[0, 2, 4]])


# ---------------------------------------------------------------- boundaries of packed documents

N = 6
FALLING, LATE, SHORT = [0, 4, 2, N], [1, N], [0, N - 1]


def of_boundaries(query, cu_seqlens):
    return rk.relative_attention(query, query, query, cu_seqlens=cu_seqlens, backend="reference")


@of_cpu
@pytest.mark.parametrize("entrance", sorted(ENTRANCES.keys() - {"jit.trace"}))  # it makes tensors of lengths
def test_wrong_boundaries_are_named(entrance):
    query, ends = torch.randn(1, N, 2, 16), torch.tensor([0, 2, 4, N], dtype=torch.int32)
    run = ENTRANCES[entrance](of_boundaries, (query, ends))
    torch.testing.assert_close(run(query, ends).as_subclass(torch.Tensor), of_boundaries(query, ends))
    for wrong in ([0, 4, 2, N], [1, 2, 4, N], [0, 2, 4, N - 1]):
        with pytest.raises(ValueError, match=f"cu_seqlens: expected to begin with 0, .*N={N}; got .{wrong[0]}, "):
            run(query, torch.tensor(wrong, dtype=torch.int32))


# ---------------------------------------------------------------- indices of top-k's gradient


def backward_of_topk(backend, indices, metric="dot"):
    g = inputs.generator(1)
    query, key, grad = (
        inputs.randn(g, *s, dtype=torch.float32).to(inputs.DEVICE) for s in ((2, 3, 8), (2, 5, 8), (2, 3, 4))
    )
    options = (4, metric, None, 0, None, None, None, backend)
    scores = torch.zeros_like(grad)
    return OPS.topk_chunks_backward(query, key, *options, scores, indices.to(inputs.DEVICE), grad, None, [True, True])


@of_cpu
@pytest.mark.parametrize("wrong", [5, -2, 10**12])
def test_a_wrong_index_of_a_gradient_is_named(wrong):
    indices = torch.zeros(2, 3, 4, dtype=torch.int64)
    indices[1, 2, 3] = wrong
    refused(f"indices: expected -1 to S-1=4; got {wrong}", backward_of_topk, "cpu", indices)


@pytest.mark.parametrize("metric", ["dot", "l2"])
@pytest.mark.parametrize("backend", [b for b in fast_backends("topk_chunks") if b in ("triton", "cuda")])
def test_a_gpu_skips_a_wrong_index_of_a_gradient(backend, metric):
    """As it skips an empty slot: the host does not read the indices."""
    indices = torch.arange(24).view(2, 3, 4) % 5
    for wrong in (5, 7, 10**12):
        bad, empty = indices.clone(), indices.clone()
        bad[0, 1, 2], empty[0, 1, 2] = wrong, -1
        for a, b in zip(*(backward_of_topk(backend, x, metric) for x in (bad, empty)), strict=True):
            assert torch.equal(a, b)


# ---------------------------------------------------------------- integers that are only compared


DOCUMENTS = {
    "relative_attention": (("query_segment", "key_segment"), functools.partial(inputs.self_attention, segments=True)),
    "leaky_average": (("segment",), functools.partial(inputs.leaky, segments=2)),
    "topk_chunks": (("query_doc", "key_doc"), functools.partial(inputs.topk, docs=True)),
}


@pytest.mark.parametrize("op, backend", [(op, backend) for op in DOCUMENTS for backend in fast_backends(op)])
def test_numbers_of_documents_may_be_any_integers(op, backend):
    """They are compared and never become addresses. Far numbers, and numbers that differ beyond 32 bits or a float's
    24, give the same bits; another type, which may be another kernel, gives the same values.
    """
    names, build = DOCUMENTS[op]
    kw = build(2)
    want, ids = compare.run(op, kw, backend), {name: kw[name].long() for name in names}
    for change in (lambda x: (x - 1) * (2**62 - 1), lambda x: x * 2**32 + 2**40, lambda x: x + 2**40):
        got = compare.run(op, kw | {name: change(x) for name, x in ids.items()}, backend)
        assert all(torch.equal(got[name], value) for name, value in want.items())
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        high = torch.iinfo(dtype).max
        narrow = {name: torch.where(x == 1, high, x).to(dtype) for name, x in ids.items()}
        for name, value in compare.run(op, kw | narrow, backend).items():
            torch.testing.assert_close(value, want[name], msg=f"{dtype}, {name}")


# ---------------------------------------------------------------- raw operators

RAW = [
    ("chunked_cross_attention", {"chunk_len": 0}, "chunk_len: expected an int >= 1; got 0"),
    ("chunked_cross_attention", {"query_start": 10**6}, "key: expected .* with L >= "),
    ("chunked_cross_attention", {"query_start": -(10**6)}, "query_start: expected an int >= 0"),
    ("chunked_cross_attention", {"rel_start": 2**40}, "rel_start: expected an int <= "),
    ("relative_attention", {"rel_start": -(2**40)}, "rel_start: expected an int >= "),
    ("relative_attention", {"query_offset": 2**40}, "query_offset: expected an int <= "),
    ("relative_attention", {"window": 0}, "window: expected an int >= 1; got 0"),
    ("relative_attention", {"causal_gap": -1}, "causal_gap: expected an int >= 0"),
    ("relative_attention", {"batch_offset": torch.zeros(5).long()}, r"query_offset: expected \[B\]"),
    ("relative_attention", {"key_segment": torch.zeros(1, 9).long()}, "query_segment: expected a tensor"),
    ("relative_logits", {"key_len": -1}, "key_len: expected an int >= 0"),
    ("relative_logits", {"rel_start": 2**40}, "rel_start: expected an int <= "),
    ("topk_chunks", {"k": 1000}, "k: expected an int <= 128"),
    ("topk_chunks", {"k": -1}, "k: expected an int >= 1"),
    ("topk_chunks", {"query_offset": 2**62}, "query_offset: expected an int <= "),
    ("leaky_average", {"segment": torch.zeros(1, 1).long()}, r"segment: expected \[B,N\]"),
    ("cross_entropy", {"target": torch.zeros(3).long()}, r"target: expected \[T\]"),
    ("merge_attention", {"lses": torch.zeros(2, 1, 1, 1)}, r"lses: expected \[P,B,H,N\]"),
]


WANTED = r"seed: expected int64 \[1\] on .* for dropout_p > 0; got "
RAW += [
    (op, {"dropout_p": 0.5, "seed": seed}, WANTED + got)
    for op in ("chunked_cross_attention", "relative_attention")
    for seed, got in (
        (None, "None"),
        (torch.zeros(0).long(), r"torch.int64 \[0\]"),
        (torch.tensor(0), r"torch.int64 \[\]"),
        (torch.zeros(1), r"torch.float32 \[1\]"),
    )
] + [
    (op, {"dropout_p": p, "seed": torch.zeros(1).long()}, "dropout_p: expected ")
    for op in ("chunked_cross_attention", "relative_attention")
    for p in (1.0, -0.5, float("nan"))
]


@pytest.mark.parametrize("op, change, message", RAW)
def test_a_raw_operator_checks_integers_and_sizes(op, change, message):
    call = resolved(op, SMALL[op]())
    for backend in [*fast_backends(op), "reference"]:
        refused(message, getattr(OPS, op), *call._replace(**change), backend)


@of_cpu
@entrances
@pytest.mark.parametrize("op", ["chunked_cross_attention", "relative_attention"])
def test_a_raw_attention_without_a_seed_is_refused_by_name(op, entrance):
    """A null pointer reached the cpu kernels."""
    if entrance == "make_fx symbolic":
        pytest.skip("symbolic traces take no tensors besides their arguments")
    problem = resolved(op, SMALL[op]())._replace(dropout_p=0.5)
    for backend in [*fast_backends(op), "reference"]:
        torch._dynamo.reset()
        run = lambda x: getattr(OPS, op)(x, *problem[1:], backend)[0]  # noqa: E731
        with pytest.raises(Exception, match=WANTED + "None"):  # also in the trace
            ENTRANCES[entrance](run, (problem.query,))(problem.query)


@pytest.mark.parametrize("op", sorted(CALLS))
def test_a_raw_backward_pass_checks_what_it_is_given(op):
    call = resolved(op, SMALL[op]())
    backend = [*fast_backends(op), "reference"][0]
    outs = getattr(OPS, op)(*call, backend)
    outs = outs if isinstance(outs, tuple) else (outs,)
    names = [name for name in call.RETURNS if name in arguments.kept(call)]
    kept = [outs[call.RETURNS.index(name)] for name in names]
    grads = [torch.ones_like(out) if out.is_floating_point() else None for out in outs]
    needs = [getattr(call, name) is not None for name in call.DIFFERENTIABLE]
    backward = getattr(OPS, f"{op}_backward")
    backward(*call, backend, *kept, *grads, needs)
    with pytest.raises(ValueError, match=f"grad_{call.RETURNS[0]}: expected torch.float32 .*; got torch.float32 "):
        backward(*call, backend, *kept, grads[0][:0], *grads[1:], needs)
    for at in range(len(kept)):
        spoilt = [out.double() if i == at else out for i, out in enumerate(kept)]
        refused(f"{names[at]}: expected .*; got torch.float64 ", backward, *call, backend, *spoilt, *grads, needs)
