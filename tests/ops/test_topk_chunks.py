"""Every backend of topk_chunks against the float64 reference, and its properties."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import retro_kernels as rk
from retro_kernels.testing import compare, guard_bands, inputs
from tests.conftest import INTERPRETER, each_with_each, examples

OP = "topk_chunks"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ALL_MASKS = dict(shared=True, docs=True, mask=True, causal_gap=1, query_offset=9)

CASES = {
    "plain": dict(),
    "causal": dict(causal_gap=0),
    "causal, gap and offset": dict(causal_gap=2, query_offset=9),
    "causal, a negative gap": dict(causal_gap=-3),
    "causal, nothing visible": dict(causal_gap=7),
    "causal, a row at a time": dict(Q=40, S=40, causal_gap=1, k=3, B=1),
    "documents": dict(docs=True),
    "key mask": dict(mask=True),
    "shared keys": dict(shared=True),
    "all masks": ALL_MASKS,
    "one query": dict(B=1, Q=1, S=50),
    "one key": dict(S=1),
    "many query tiles": dict(B=1, Q=50, S=70, k=9),
    "k of one": dict(k=1),
    "more than there are": dict(S=5, k=12),
    "list of 16": dict(B=1, Q=3, S=200, k=16),
    "list of 17": dict(B=1, Q=3, S=200, k=17),
    "k of 128": dict(B=1, Q=3, S=200, k=128),
    "k of 128, few keys": dict(B=1, Q=3, S=37, k=128, causal_gap=0, query_offset=37),
    "one wide": dict(D=1),
    "three wide": dict(D=3),
    "seventeen wide": dict(D=17, **ALL_MASKS),
    "twenty-four wide": dict(D=24),
    "a hundred wide": dict(D=100),
    "a hundred and thirty wide": dict(D=130),
}


VARIANTS = list(itertools.product(DTYPES, ("dot", "l2")))


@pytest.mark.parametrize(("name", "variant"), each_with_each(CASES, VARIANTS))
def test_values_and_gradients(backend, name, variant):
    """Integer inputs give exact scores and many ties: indices must equal the reference's, ties included."""
    dtype, metric = variant
    kw = inputs.topk(1, dtype=dtype, metric=metric, integers=True, **CASES[name])
    got = compare.check(OP, kw, backend)
    exact = rk.topk_chunks(**inputs.cast(kw, torch.float64), backend="reference")[0]
    assert torch.equal(got["out0"].double(), exact)


@pytest.mark.parametrize("metric", ["dot", "l2"])
@pytest.mark.parametrize(
    "case", [dict(), dict(D=4096, B=1, Q=3, S=9), dict(D=1030, B=1, Q=2, S=11, **ALL_MASKS)], ids=str
)
def test_rounding_stays_within_the_table(backend, case, metric):
    compare.check(OP, inputs.topk(2, metric=metric, **case), backend)


shapes = st.fixed_dictionaries(
    dict(
        B=st.integers(1, 3),
        Q=st.integers(1, 35),
        S=st.integers(1, 80),
        D=st.integers(1, 40),
        k=st.integers(1, 20),
        shared=st.booleans(),
        docs=st.booleans(),
        mask=st.booleans(),
        metric=st.sampled_from(["dot", "l2"]),
        seed=st.integers(0, 99),
        causal=st.sampled_from(
            [{}, dict(causal_gap=0), dict(causal_gap=1, query_offset=30), dict(causal_gap=5, query_offset=-2)]
        ),
    )
)


def drawn(case, **more):
    case = dict(case)
    causal, seed = case.pop("causal"), case.pop("seed")
    return inputs.topk(seed, **case, **causal, **more)


@settings(max_examples=examples(4, 60))
@given(case=shapes)
def test_properties(backend, case):
    """Sorted, unique, each score is its pair's score, slots are filled from the front, and no better
    key is left out.
    """
    kw = drawn(case)
    scores, indices = rk.topk_chunks(**kw, backend=backend)
    assert (scores[..., :-1] >= scores[..., 1:]).all()
    assert ((indices == -1) == (scores == -torch.inf)).all()
    for row in indices.flatten(0, 1).tolist():
        valid = [j for j in row if j >= 0]
        assert len(set(valid)) == len(valid)
    key = kw["key"].expand(kw["query"].shape[0], -1, -1).double()
    rows = key.gather(1, indices.clamp(min=0).flatten(1).unsqueeze(-1).expand(-1, -1, key.shape[-1])).view(
        *indices.shape, -1
    )
    query = kw["query"].double().unsqueeze(2)
    exact = (query * rows).sum(-1) if kw["metric"] == "dot" else -(query - rows).square().sum(-1)
    torch.testing.assert_close(scores.double(), exact.masked_fill(indices < 0, -torch.inf), rtol=1e-5, atol=1e-5)
    half = torch.arange(kw["key"].shape[1], device=inputs.DEVICE) % 2 == 0
    mask = kw.get("key_mask", torch.ones(kw["key"].shape[:2], dtype=torch.bool, device=inputs.DEVICE)) & half
    fewer, _ = rk.topk_chunks(**{**kw, "key_mask": mask}, backend=backend)
    assert (fewer <= scores).all()


def column(values, **more):
    """Return one query [1.0] and one-dimensional keys, so that the scores are the keys."""
    key = torch.tensor(values, dtype=torch.float32, device=inputs.DEVICE).view(1, -1, 1)
    return {"query": torch.ones(1, 1, 1, device=inputs.DEVICE), "key": key, **more}


STEP = torch.finfo(torch.float32).eps  # scores 1 + i*STEP share all their leading bits

ADVERSARIAL = {
    "all equal": [2.0] * 70,
    "equal but the last": [2.0] * 69 + [3.0],
    "sorted up": [float(i) for i in range(70)],
    "sorted down": [float(-i) for i in range(70)],
    "equal leading bits": [1.0 + (i * 37 % 64) * STEP for i in range(64)],
    "equal leading bits, negative": [-1.0 - (i * 37 % 64) * STEP for i in range(64)],
    "both zeros": [0.0, -0.0] * 20,
    "infinities": [1.0, torch.inf, -torch.inf, 2.0, torch.inf, -3.0] * 5,
    "only minus infinity": [-torch.inf] * 9,
    "NaN among numbers": [1.0, torch.nan, 3.0, torch.nan, 2.0] * 7,
    "only NaN": [torch.nan] * 9,
    "subnormals": [1e-40, 3e-40, 2e-40, 0.0],
    "the largest": [3e38, 3.1e38, -3e38, 3.2e38],
}


@pytest.mark.parametrize("k", [1, 4, 33])
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_scores(backend, name, k):
    kw = column(ADVERSARIAL[name], k=k)
    if name == "subnormals" and backend == "triton":
        pytest.skip("a GPU may flush subnormals")
    scores, indices = rk.topk_chunks(**kw, backend=backend)
    values = kw["key"].flatten().tolist()  # as float32 rounds them
    want = sorted(((v, i) for i, v in enumerate(values) if v > -torch.inf), key=lambda pair: (-pair[0], pair[1]))[:k]
    want += [(-torch.inf, -1)] * (k - len(want))
    assert indices.flatten().tolist() == [i for _, i in want]
    assert scores.flatten().tolist() == [v for v, _ in want]


def test_nan_in_one_element_or_one_query(backend):
    kw = inputs.topk(4, Q=20, S=40, D=19)
    want = compare.run(OP, {**kw, "key_mask": torch.arange(40, device=inputs.DEVICE).expand(2, 40) != 5}, backend)
    kw["key"][:, 5, 18] = torch.nan
    scores, indices = rk.topk_chunks(**kw, backend=backend)
    assert torch.equal(scores, want["out0"]) and torch.equal(indices, want["out1"])
    kw["query"][1, 3, 0] = torch.nan
    again = rk.topk_chunks(**kw, backend=backend)
    assert (again[1][1, 3] == -1).all() and (again[0][1, 3] == -torch.inf).all()
    others = torch.ones(2, 20, dtype=torch.bool, device=inputs.DEVICE)
    others[1, 3] = False
    assert torch.equal(again[0][others], scores[others]) and torch.equal(again[1][others], indices[others])


@pytest.mark.parametrize("metric", ["dot", "l2"])
def test_masked_keys_may_hold_anything(backend, metric):
    kw = inputs.topk(5, S=60, mask=True, metric=metric)
    want = compare.run(OP, kw, backend)
    for value in (torch.nan, torch.inf, 3e38):
        kw["key"] = kw["key"].masked_fill(~kw["key_mask"].unsqueeze(-1), value)
        got = compare.run(OP, kw, backend)
        assert torch.equal(got["out0"], want["out0"]) and torch.equal(got["out1"], want["out1"])
        assert torch.equal(got["grad_query"], want["grad_query"])


def test_l2_does_not_cancel(backend):
    """Keys close together and far from the origin: q.q - 2 q.k + k.k would have no correct digit."""
    g = inputs.generator(6)
    centre = 1000 * inputs.randn(g, 1, 1, 24, dtype=torch.float64)
    kw = {"query": (centre + inputs.randn(g, 1, 9, 24, dtype=torch.float64)).float(), "k": 5, "metric": "l2"}
    kw["key"] = (centre + inputs.randn(g, 1, 60, 24, dtype=torch.float64)).float()
    kw = {name: v.to(inputs.DEVICE) if isinstance(v, torch.Tensor) else v for name, v in kw.items()}
    kw["key"][:, 7] = kw["query"][:, 0]
    got = compare.check(OP, kw, backend)
    assert got["out0"][0, 0, 0] == 0 and got["out1"][0, 0, 0] == 7


@pytest.mark.parametrize("size", [1e18, 3e19, 1e-20, 1e-25])
def test_l2_of_extreme_sizes(backend, size):
    """Squares that overflow or underflow: no candidate is lost, no overflow becomes one."""
    kw = inputs.topk(7, B=1, S=50, metric="l2", integers=True, causal_gap=0, query_offset=20)
    kw["query"], kw["key"] = kw["query"] * size, kw["key"] * size
    scores, indices = rk.topk_chunks(**kw, backend=backend)
    want, where = rk.topk_chunks(**kw, backend="reference")
    filled = indices >= 0
    assert torch.equal(filled, where >= 0)
    torch.testing.assert_close(scores[filled], want[filled], rtol=1e-5, atol=0)


def test_l2_where_only_the_square_of_the_query_overflows(backend):
    kw = column([1e18, 2e18, 1.5e18], k=2, metric="l2") | {"query": torch.full((1, 1, 1), 1.9e19, device=inputs.DEVICE)}
    scores, indices = rk.topk_chunks(**kw, backend=backend)
    assert indices.flatten().tolist() == [1, 2] and scores.isfinite().all()


@pytest.mark.parametrize("sizes", [dict(S=0), dict(Q=0), dict(B=0, shared=True), dict(causal_gap=60)], ids=str)
def test_nothing_to_search(backend, sizes):
    """The upstream gradient of an empty slot may be NaN and does not arrive."""
    kw = inputs.differentiable(inputs.topk(9, **sizes))
    scores, indices = rk.topk_chunks(**kw, backend=backend)
    assert scores.shape == indices.shape == (*kw["query"].shape[:2], 4)
    assert (scores == -torch.inf).all() and (indices == -1).all()
    query, key = torch.autograd.grad(scores, (kw["query"], kw["key"]), torch.full_like(scores, torch.nan))
    assert (query == 0).all() and (key == 0).all()


@pytest.mark.parametrize("metric", ["dot", "l2"])
def test_gradients_are_those_of_the_dense_formulation(backend, metric):
    """Several batch entries choose shared keys; some slots are empty, with an upstream gradient that is not zero."""
    kw = inputs.differentiable(inputs.topk(10, B=3, Q=9, S=8, k=6, shared=True, causal_gap=0, metric=metric))
    scores, indices = rk.topk_chunks(**kw, backend=backend)
    g = inputs.randn(inputs.generator(1), *scores.shape, dtype=torch.float32).to(inputs.DEVICE)
    got = torch.autograd.grad(scores, (kw["query"], kw["key"]), g)
    query, key = (kw[n].detach().double().requires_grad_() for n in ("query", "key"))
    difference = query.unsqueeze(2) - key.unsqueeze(1)
    dense = (
        torch.einsum("bqd,bsd->bqs", query, key.expand(3, -1, -1)) if metric == "dot" else -difference.square().sum(-1)
    )
    selected = dense.gather(-1, indices.clamp(min=0))
    want = torch.autograd.grad(selected, (query, key), g.double().masked_fill(indices < 0, 0))
    for name, a, b in zip(("query", "key"), got, want, strict=True):
        compare.assert_passes(f"grad_{name}", a, b, None, torch.float32)


def test_a_popular_key_gathers_every_query(backend):
    """More than one step of the segment sum: all 2*40 queries choose key 3, most also key 9."""
    kw = inputs.topk(9, Q=40, S=12, D=16, k=2, shared=True)
    kw["query"] = kw["query"].abs()
    kw["key"][0, 3] = 50.0
    kw["key"][0, 9] = 20.0
    got = compare.check(OP, kw, backend)
    assert (got["out1"][..., 0] == 3).all()


def test_expanded_gradient(backend):
    kw = inputs.differentiable(inputs.topk(12))
    scores, _ = rk.topk_chunks(**kw, backend=backend)
    summed = torch.autograd.grad(scores.sum(), kw["query"], retain_graph=True)[0]
    assert torch.equal(summed, torch.autograd.grad(scores, kw["query"], torch.ones_like(scores))[0])


@pytest.mark.parametrize("dtype", [t for t in (torch.float16, torch.bfloat16) if t in DTYPES], ids=str)
def test_recall_of_half_types(backend, dtype):
    """Rounding the embeddings moves only a few near-ties across the k-th place."""
    kw = inputs.topk(13, B=1, Q=24, S=300, D=64, k=10)
    exact = rk.topk_chunks(**inputs.cast(kw, torch.float64), backend="reference")[1]
    got = rk.topk_chunks(**inputs.cast(kw, dtype), backend=backend)[1]
    recall = (got.unsqueeze(-1) == exact.unsqueeze(-2)).any(-1).double().mean().item()
    assert recall > (0.95 if dtype == torch.bfloat16 else 0.99)
    rounded = rk.topk_chunks(**inputs.cast(inputs.cast(kw, dtype), torch.float64), backend="reference")[1]
    assert torch.equal(got, rounded)  # the search over the rounded embeddings is exact


def test_float16_scores_beyond_float16(backend):
    kw = inputs.topk(14, dtype=torch.float16)
    kw["query"], kw["key"] = kw["query"] * 200, kw["key"] * 200
    got = compare.check(OP, kw, backend)
    assert got["out0"].max() > 65504


def assert_close(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Indices to the bit, values to rounding."""
    if want.is_floating_point():
        compare.assert_passes(name, got, want.double(), None, want.dtype)
    else:
        compare.assert_equal(name, got, want)


EVEN, ODD = dict(D=16, docs=True, mask=True), dict(D=19)
LAID_OUT = {
    "guard bands, even, masks": (guard_bands.guarded, EVEN),
    "strided, even, masks": (guard_bands.sliced, EVEN),
    "guard bands, odd": (guard_bands.guarded, ODD),
    "strided, odd": (guard_bands.sliced, ODD),
}


@pytest.mark.parametrize(("name", "variant"), each_with_each(LAID_OUT, VARIANTS))
def test_layouts_give_the_same_bits(backend, name, variant):
    (view, case), (dtype, metric) = LAID_OUT[name], variant
    # The interpreter uses NumPy's products, whose order of summation depends on the layout. Compiled, strides
    # decide which lane loads what, and so in which order squares for l2 and gradients add up.
    # On a GPU as under the emulator: another stride is another kernel.
    compiled = backend in ("triton", "cuda")
    same = assert_close if INTERPRETER or (compiled and view is guard_bands.sliced) else compare.assert_equal
    compare.check_layout(OP, inputs.topk(17, S=50, metric=metric, dtype=dtype, **case), backend, view, same)


@pytest.mark.parametrize(
    "dtype, scores", [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)]
)
def test_what_a_compiler_is_told_of_the_scores_is_so(dtype, scores):
    query, key = torch.randn(1, 2, 8).to(dtype), torch.randn(1, 5, 8).to(dtype)
    for device in ("cpu", "meta"):
        got = rk.topk_chunks(query.to(device), key.to(device), k=2)
        assert (got[0].dtype, got[1].dtype) == (scores, torch.int64)
