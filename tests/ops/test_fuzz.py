"""Random calls of every op on every backend, values and gradients by the tolerance table.

Shapes, strides between NaN, offsets, masks, documents, gates, positions of each entry, and the outputs with a gradient.
Then each layout is repeated among others on threads and must give the same bits. `RETRO_KERNELS_FUZZ=20000 pytest
tests/ops/test_fuzz.py --timeout 0` draws 20000 of each op instead of a handful, different ones each time;
`--hypothesis-seed=N` repeats them. A tensor that exceeds the table within the rounding of the inputs is an event:
`--hypothesis-show-statistics` counts them.
"""

import itertools
import os
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from retro_kernels.testing import assert_passes, compare, guarded, inputs, poisoned, sliced
from tests.conftest import COMPILED, INTERPRETER, fast_backends
from tests.ops.calls import Listener, outputs
from tests.refusals import refused

NIGHTLY = os.environ.get("RETRO_KERNELS_FUZZ")
EXAMPLES = int(NIGHTLY) if NIGHTLY else 3 if INTERPRETER else 40
LARGE = NIGHTLY or not INTERPRETER  # whether calls may have many tokens and wide heads
fuzz = settings(max_examples=EXAMPLES, derandomize=NIGHTLY is None, database=None, print_blob=True)
DTYPES = [torch.float32, torch.float32, torch.float16] + ([] if INTERPRETER else [torch.bfloat16])

VIEWS = {"dense": lambda t: t.clone(), "guarded": guarded, "sliced": sliced}
NOTHING = 1e-13  # remainder in float64 where terms cancel exactly
FEW = 64  # numbers; with fewer, mostly sums that cancel, chance decides whose error is less
DRAWS, TIMES = 8, 4.0  # rounded inputs, and the allowed multiple of their effect on the exact result
# the reference's products over the width of a head: with keys, of gradients with values, with relative keys
PAIRS, POSITIONS, WEIGHTED = "bnhd,bshd->bhns", "bnhe,hte->bhnt", "bhns,bshd->bnhd"
ATTENTIONS = ("relative_attention", "chunked_cross_attention")  # ops that can return a log-sum-exp
#: outputs that get a gradient: of one output and of two
UPSTREAM = ["out", "lse", "both"]
common = dict(
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from(DTYPES),
    view=st.sampled_from(sorted(VIEWS)),
    upstream=st.sampled_from(UPSTREAM),
    B=st.integers(1, 3),
)
heads = st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)])
widths = st.sampled_from([16, 24, 40, 64] + [72, 128, 200, 256] * bool(LARGE))
relative = dict(
    rel=st.sampled_from([None, "all", "bounded"]),
    heads=st.sampled_from(["each", "shared"]),
    rel_start=st.integers(-30, 30),
    T=st.integers(1, 40),
    E=st.sampled_from([None, 1, 3, 16] + [72] * bool(LARGE)),
    biases=st.booleans(),
)
few_or_many = st.one_of(st.integers(1, 3), st.integers(1, 40), st.integers(1, 160 if LARGE else 40))


class Weighted(torch.autograd.Function):
    """Probabilities times values, with gradients by named products."""

    @staticmethod
    def forward(ctx, probabilities, value):
        ctx.save_for_backward(probabilities, value)
        return (probabilities @ value.transpose(1, 2)).transpose(1, 2)

    @staticmethod
    def backward(ctx, grad):
        probabilities, value = ctx.saved_tensors
        return torch.einsum(PAIRS, grad, value), torch.einsum("bhns,bnhd->bshd", probabilities, grad)


class Noise:
    """The effect of a last place of every input: inputs and upstream gradients move by up to half of eps.

    A log-sum-exp is one float32: its absolute error is a relative error of every probability, which equals an error of
    its row's upstream gradient. A running sum is one float32 after every step, which equals an error of that step's
    input as large as the sum's. A score is a running sum over the width of its head. In a half type the sum of a query
    and its bias is rounded once to that type, in the kernels as in eager PyTorch.
    """

    def __init__(self, seed: int, eps: float, exact: dict[str, torch.Tensor]):
        self.generator, self.eps, self.exact, self.phase = inputs.generator(seed), eps, exact, 0.7 * seed + 0.3

    def like(self, t: torch.Tensor) -> torch.Tensor:
        return self.eps * (torch.rand(*t.shape, generator=self.generator, dtype=torch.float64) - 0.5).to(t.device)

    def rounded(self, t: torch.Tensor) -> torch.Tensor:
        return t * (1 + self.like(t)) if t.is_floating_point() else t

    def of_steps(self, t: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return t + state * self.like(t) * (2**-23 / self.eps)

    def of_query(self, query: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        if bias is None or dtype == torch.float32:
            return query
        return query + (query + bias).detach() * self.like(query) * (torch.finfo(dtype).eps / self.eps)

    def rounding_of_sums(self, sums: torch.Tensor, squares: torch.Tensor, terms: int) -> torch.Tensor:
        """Return the error of sums of D = `terms` terms whose partial sums are rounded one after another.

        With s the sum and p its terms, the j-th partial sum is s j/D plus a random walk. The squares of all add up to
        D/3 s^2 + D/2 sum(p^2). The error is a function of the sum: a recomputed sum has the same error.
        """
        uniform = (torch.sin(sums * 1e6 + self.phase) * 1e4) % 1 - 0.5
        return 2**-23 * uniform * (terms / 3 * sums.square() + terms / 2 * squares).sqrt()

    @contextmanager
    def of_sums(self, op: str) -> Iterator[None]:
        """Within this context the reference's sums have rounding errors: attention's products with keys and relative
        keys, and the products of gradients with values.
        """
        honest = torch.einsum

        def einsum(equation, *operands):
            if equation == WEIGHTED:
                return Weighted.apply(*operands)
            exact = honest(equation, *operands)
            if equation not in (PAIRS, POSITIONS):
                return exact
            squares = honest(equation, *(x.detach().square() for x in operands))
            return exact + self.rounding_of_sums(exact.detach(), squares, operands[0].shape[-1])

        if op in ATTENTIONS:
            with mock.patch.object(torch, "einsum", einsum):
                yield
        else:
            yield

    def of_rows(self, grad: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        off = 1 + torch.where(lse.isfinite(), lse.abs(), 0).double() * self.like(lse) * (2**-23 / self.eps)
        return grad * (off.transpose(1, 2).unsqueeze(-1) if grad.dim() == 4 else off)


def first(kw: dict) -> torch.Tensor:
    """Return the tensor whose type is the call's."""
    return next(v for v in kw.values() if isinstance(v, torch.Tensor) and v.is_floating_point())


def run(
    op: str, kw: dict, backend: str, view, upstream: str, dtype: torch.dtype, noise: Noise | None = None
) -> dict[str, torch.Tensor]:
    """Return outputs and gradients; `view` sets the layout of tensors. Upstream gradients are rounded to `dtype`."""
    there = {n: (noise.rounded(v) if noise else view(v)) if isinstance(v, torch.Tensor) else v for n, v in kw.items()}
    attention, leaky = op in ATTENTIONS, op == "leaky_average"
    if noise and leaky:
        there["x"] = noise.of_steps(there["x"], noise.exact["out0"])
    leaves = {n: v.requires_grad_() for n, v in there.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    call = dict(there)
    if noise and attention:
        call["query"] = noise.of_query(there["query"], there.get("content_bias"), dtype)
        if there.get("rel_key") is not None:
            rel_query = there["query"] if there.get("rel_query") is None else there["rel_query"]
            call["rel_query"] = noise.of_query(rel_query, there.get("position_bias"), dtype)
    outs = outputs(op, call, backend, lse=True)
    result = {f"out{i}": out.detach() for i, out in enumerate(outs)}
    used = [
        out
        for i, out in enumerate(outs)
        if out.is_floating_point() and (upstream == "both" or i == (upstream == "lse") or len(outs) < 2)
    ]
    if not used:  # only indices
        return result
    g = inputs.generator(first(kw).shape[1])
    grads = [inputs.randn(g, *out.shape, dtype=dtype).to(out.device, out.dtype) for out in used]
    grads = [torch.where(out.isfinite(), grad, 0) for out, grad in zip(used, grads, strict=True)]
    if noise:
        grads = [noise.rounded(grad) for grad in grads]
        grads = [noise.of_rows(grad, outs[1].detach()) for grad in grads] if attention else grads
        grads = [noise.of_steps(grad, noise.exact["grad_x"]) for grad in grads] if leaky else grads
    results = torch.autograd.grad(used, list(leaves.values()), grads, allow_unused=True)
    return result | {
        f"grad_{n}": torch.zeros_like(v) if grad is None else grad
        for (n, v), grad in zip(leaves.items(), results, strict=True)
    }


def reseed(kw: dict) -> None:
    """Reset the generator of dropout; torch.manual_seed would record a traceback for later GPUs."""
    if kw.get("dropout_p"):
        (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)


def rounding(op: str, kw: dict, upstream: str, dtype: torch.dtype, name: str, exact: dict, eps: float) -> float:
    """Return the mean effect of rounding on the exact result, the error that no arithmetic can avoid."""
    total, call = 0.0, inputs.cast(kw, torch.float64)
    for seed in range(DRAWS):
        noise = Noise(seed, eps, exact)
        reseed(call)
        with noise.of_sums(op):
            moved = run(op, call, "reference", None, upstream, dtype, noise)[name]
        total += float((moved.detach() - exact[name]).nan_to_num(0.0, 0.0, 0.0).square().sum()) / DRAWS
    return total**0.5


def check(op: str, backend: str, kw: dict, view: str, upstream: str) -> None:
    dtype = first(kw).dtype
    results = []
    for name, call in (("reference", inputs.cast(kw, torch.float64)), ("eager", kw), (backend, kw)):
        reseed(kw)
        if name == "eager":
            with compare.eager_types():
                results.append(run(op, call, "reference", VIEWS["dense"], upstream, dtype))
        else:
            with poisoned():
                results.append(run(op, call, name, VIEWS[view if name == backend else "dense"], upstream, dtype))
    want, eager, got = results
    for name, value in want.items():
        if not value.is_floating_point():
            assert torch.equal(got[name], value), f"{op}/{backend} {name}"
            continue
        value = torch.where(value.abs() < NOTHING, 0, value)
        try:
            assert_passes(f"{op}/{backend} {name}", got[name], value, eager[name], dtype)
        except AssertionError:
            here = got[name].double()
            off = float(torch.where(here == value, 0, here - value).norm())  # rows that attend nothing: both -inf
            eps = torch.finfo(dtype if value.numel() < FEW else torch.float32).eps
            if not off <= TIMES * rounding(op, kw, upstream, dtype, name, want, eps):  # NaN too
                raise
            event(f"{op}: {name} beyond the table, within the rounding of its inputs")
            count["beyond the table, within rounding"] += 1
    count["judged"] += 1
    if not INTERPRETER:  # there test_repeated_calls.py repeats calls, and each call is slow
        recent.append((Call(op, kw, backend, view, upstream, dtype), got))
    if len(recent) == LAYOUTS:
        repeat_among_layouts(recent, count["judged"])
        recent.clear()


#: layouts repeated together, and repeats of each of a layout's two calls
LAYOUTS, REPEATS = (4, 2) if COMPILED else (16, 6)
#: the last checked calls with their results, and the number of each kind
recent: list[tuple] = []
count: Counter[str] = Counter()


class Call(NamedTuple):
    op: str
    kw: dict
    backend: str
    view: str
    upstream: str
    dtype: torch.dtype

    def results(self) -> dict[str, torch.Tensor]:
        reseed(self.kw)
        return run(self.op, self.kw, self.backend, VIEWS[self.view], self.upstream, self.dtype)


def repeat_among_layouts(judged: list[tuple], seed: int) -> None:
    """Repeat each layout with the checked values and with other values, in alternation, on threads.

    The results must have the checked bits and the operator's bits.
    """
    known = list(judged)
    for i, (call, _) in enumerate(judged):
        other = call._replace(kw=shuffled(call.kw, seed + i))
        with Listener():
            known.append((other, other.results()))
    known *= REPEATS
    random.Random(seed).shuffle(known)
    # threads would draw seeds in their own order, so calls with dropout stay in this one
    aside = [(call, want) for call, want in known if not call.kw.get("dropout_p")]
    here = [(call, want) for call, want in known if call.kw.get("dropout_p")]
    if COMPILED:
        aside, here = [], known
    with ThreadPoolExecutor(4) as threads:
        waited = threads.map(lambda one: same_bits(*one), aside)
        for one in here:
            same_bits(*one)
        list(waited)  # raises a thread's error
    count["repeated"] += len(known)


def same_bits(call: Call, want: dict[str, torch.Tensor]) -> None:
    got = call.results()
    for name, value in want.items():
        if not torch.equal(got[name].nan_to_num(), value.nan_to_num()):
            shapes = {n: list(v.shape) if isinstance(v, torch.Tensor) else v for n, v in call.kw.items()}
            raise AssertionError(f"{call._replace(kw=shapes)}: {name} of a repeated call has other bits")


def shuffled(kw: dict, seed: int) -> dict:
    """Return the same numbers in another order, in every floating tensor."""
    g = inputs.generator(seed)

    def moved(t: torch.Tensor) -> torch.Tensor:
        return t.flatten()[torch.randperm(t.numel(), generator=g).to(t.device)].view(t.shape)

    return {n: moved(v) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for n, v in kw.items()}


@pytest.fixture(scope="module", autouse=True)
def _counted(request):
    yield
    if NIGHTLY:
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print("\n" + ", ".join(f"{number} {what}" for what, number in count.items()))


def of_one(case: dict) -> dict:
    """Return the call that a case of `relative_attention` describes."""
    H, G = case.pop("grouping")
    if not case["causal"]:
        case["causal_gap"] = 0
    if case["window"]:
        case["window_block"] = None
    if case.pop("each_offset") and case["rel"] != "all":
        case["query_offset"] = inputs.randint(case["seed"], -20, 170, case["B"])
    return inputs.self_attention(H=H, G=G, **case)


def of_chunks(case: dict) -> dict:
    """Return the call that a case of `chunked_cross_attention` describes."""
    (H, G), scale, each = (case.pop(name) for name in ("grouping", "scale", "each_start"))
    case["N"] = min(case["N"], 12 * case["M"])  # a dozen chunks suffice
    case["query_start"] = min(case["query_start"], 12 * case["M"])
    kw = inputs.cross_attention(H=H, G=G, **case) | {"scale": scale}
    return kw | {"query_start": inputs.randint(case["seed"], -5, 100, case["B"])} if each else kw


def of_logits(case: dict) -> dict:
    """Return the call that a case of `relative_logits` describes."""
    if bounded := case.pop("bounded"):
        case["rel_start"], case["T"] = bounded
    return inputs.relative_logits(**case)


def of_search(case: dict) -> dict:
    """Return the call that a case of `topk_chunks` describes.

    Small integers have exact scores in every type, so order and ties can be compared.
    """
    if case["causal_gap"] is None:
        del case["query_offset"]
    return inputs.topk(integers=True, **case)


def of_rows(case: dict) -> dict:
    """Return the call that a case of `rms_norm` describes. A gradient of few numbers cancels by chance."""
    if case["B"] * case["N"] * case["D"] < FEW:
        case["D"] += FEW
    return inputs.rms(**case)


dropout = st.sampled_from([0.0, 0.0, 0.0, 0.3, 0.9])
scales = st.sampled_from([None, None, 0.01, 1.0])
rows = {name: common[name] for name in ("seed", "view")} | {"N": few_or_many}  # float32 alone, of one output
wide = st.one_of(st.integers(1, 80), st.integers(1, 700))
#: op -> the function that makes a call of a case, and the draws of a case
DRAWN = {
    "relative_attention": (
        of_one,
        common
        | relative
        | dict(
            N=few_or_many,
            S=few_or_many,
            D=widths,
            grouping=heads,
            causal=st.booleans(),
            causal_gap=st.integers(0, 2),
            window=st.sampled_from([None, None, 1, 2, 7, 60]),
            window_block=st.sampled_from([None, None, 1, 5, 23, 64]),
            query_offset=st.one_of(st.none(), st.integers(-20, 170)),
            each_offset=st.booleans(),
            key_mask=st.booleans(),
            segments=st.booleans(),
            dropout_p=dropout,
            scale=scales,
        ),
    ),
    "chunked_cross_attention": (
        of_chunks,
        common
        | relative
        | dict(
            N=few_or_many,
            M=st.integers(1, 80),
            K=st.integers(1, 3),
            R=st.one_of(st.integers(1, 3), st.integers(1, 70)),
            D=widths,
            grouping=heads,
            query_start=st.integers(0, 90),
            each_start=st.booleans(),
            gate=st.booleans(),
            mask=st.sampled_from([None, "neighbour", "token"]),
            scale=scales,
            extra_chunks=st.integers(0, 1),
            dropout_p=dropout,
        ),
    ),
    "relative_logits": (
        of_logits,
        common
        | dict(
            N=few_or_many,
            key_len=few_or_many,
            H=st.integers(1, 3),
            E=st.sampled_from([1, 3, 16, 72, 256]),
            heads=st.sampled_from(["each", "shared"]),
            biases=st.booleans(),
            query_offset=st.integers(-50, 50),
            bounded=st.one_of(st.none(), st.tuples(st.integers(-40, 40), st.integers(1, 40))),
        ),
    ),
    "topk_chunks": (
        of_search,
        common
        | dict(
            Q=few_or_many,
            S=few_or_many,
            D=st.sampled_from([1, 3, 16, 40, 130]),
            k=st.sampled_from([1, 2, 5, 17, 128]),
            shared=st.booleans(),
            docs=st.booleans(),
            mask=st.booleans(),
            metric=st.sampled_from(["dot", "l2"]),
            causal_gap=st.one_of(st.none(), st.integers(-10, 40)),
            query_offset=st.integers(-20, 150),
        ),
    ),
    "leaky_average": (
        lambda case: inputs.leaky(**case),
        common
        | dict(
            N=st.one_of(*[few_or_many] * 4, st.integers(1000, 1100)) if LARGE else few_or_many,
            H=st.integers(1, 3),
            D=st.integers(1, 40),
            initial=st.booleans(),
            segments=st.sampled_from([0, 1, 3, 50]),
        ),
    ),
    "merge_attention": (
        lambda case: inputs.merged(**case),
        common
        | dict(P=st.integers(2, 9), N=few_or_many, H=st.integers(1, 3), D=st.integers(1, 130), dead=st.booleans()),
    ),
    # the gradient of a norm of one number cancels
    "rms_norm": (
        of_rows,
        rows | dict(B=st.integers(1, 3), D=wide.filter(lambda d: d > 1), eps=st.sampled_from([0.0, 1e-6, 0.1])),
    ),
    "cross_entropy": (lambda case: inputs.entropy(**case), rows | dict(V=st.integers(1, 3000))),
}


@pytest.mark.parametrize("op, backend", [(op, backend) for op in DRAWN for backend in fast_backends(op)])
@fuzz
@given(data=st.data())
def test_a_random_call(op, backend, data):
    build, drawn = DRAWN[op]
    case = data.draw(st.fixed_dictionaries(drawn))
    view, upstream = case.pop("view"), case.pop("upstream", "out")
    check(op, backend, build(case), view, upstream)


FLOAT, HALF = (torch.float32, 1e-4), (torch.bfloat16, 0.05)
SMALL = {
    "relative_attention": lambda dtype: inputs.self_attention(5, B=1, N=9, H=2, D=16, dtype=dtype),
    "merge_attention": lambda dtype: inputs.merged(5, B=1, dtype=dtype),
    "rms_norm": lambda dtype: inputs.rms(5, B=1, dtype=dtype),
    "cross_entropy": lambda dtype: inputs.entropy(5, dtype=dtype),
}
WRONG = [
    *itertools.product(
        ["relative_attention"], ["grad_content_bias", "grad_position_bias", "grad_value", "out1"], [FLOAT, HALF]
    ),
    *itertools.product(["merge_attention"], ["out0", "grad_lses"], [FLOAT, HALF]),
    *itertools.product(["rms_norm"], ["out0", "grad_input", "grad_weight"], [FLOAT]),
    *itertools.product(["cross_entropy"], ["out0", "grad_input"], [FLOAT]),
]


@pytest.mark.parametrize("op, name, type_and_part", WRONG)
def test_what_rounding_does_not_explain_is_refused(op, name, type_and_part, monkeypatch):
    """An error of 1e-4 is not rounding, for few numbers and for many; nor is 0.05 in a half type."""
    (dtype, part), honest = type_and_part, run
    kw, upstream = SMALL[op](dtype), "both" if op in ATTENTIONS else "out"

    def wrong(op, kw, backend, view, *rest, **more):
        got = honest(op, kw, "reference", view, *rest, **more)
        return got | {name: got[name] * (1 + part)} if backend == "wrong" else got

    monkeypatch.setitem(globals(), "run", wrong)
    monkeypatch.setitem(globals(), "recent", [])  # calls of other tests were judged by the honest `run`
    check(op, "reference", kw, "dense", upstream)
    refused(f"{name}.*relative error", check, op, "wrong", kw, "dense", upstream, error=AssertionError)


def test_a_repeated_call_that_has_another_bit_is_refused(monkeypatch):
    kw, honest, calls = inputs.leaky(5, B=1, N=9, H=2, D=4), run, itertools.count(1)
    call = Call("leaky_average", kw, "reference", "dense", "out", torch.float32)
    judged = [(call, call.results())]
    repeat_among_layouts(judged, 1)

    def off_once(*args, **more):
        got = honest(*args, **more)
        if next(calls) == 5:
            got["grad_x"].view(torch.int32)[0, 3, 1, 2] ^= 1
        return got

    monkeypatch.setitem(globals(), "run", off_once)
    refused("grad_x of a repeated call has other bits", repeat_among_layouts, judged, 1, error=AssertionError)
