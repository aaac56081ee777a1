"""The CPU kernels: every instruction set, edges of blocks and tasks, threads, exact properties of few rows."""

import pytest
import torch

import retro_kernels as rk
from retro_kernels import extensions
from retro_kernels.testing import assert_passes, compare, inputs
from tests.fresh import python
from tests.ops.calls import BUILDERS, floats

from .test_cpu_infrastructure import isas

pytestmark = pytest.mark.skipif(extensions.unavailable("_cpu") is not None, reason=str(extensions.unavailable("_cpu")))
every_isa = pytest.mark.parametrize("isa", isas())
TYPES = [torch.float32, torch.bfloat16, torch.float16]

BOUNDED = dict(causal=True, rel="bounded", rel_start=0, T=90)
CASES = {
    # sizes around the kernel's units: 64 queries a unit, 132 keys a block, 12 rows a slice, 16 lanes
    "chunked_cross_attention": {
        "everything": dict(mask="token", gate=True, G=2, E=5, N=23, M=5, R=7),
        "several key blocks": dict(B=1, H=2, K=3, R=67, M=9, N=20, gate=True),
        "several units": dict(B=1, H=2, M=70, N=150, R=33, K=2),
        "units, blocks and groups": dict(B=1, H=4, G=1, M=67, N=70, R=135, K=1, mask="token", E=3),
        "units of a group in one task": dict(B=2, H=4, G=1, M=130, N=131, R=9, K=1),
        "odd rows and keys": dict(M=17, N=40, R=15, K=3, D=40, mask="token"),
        "bounded, cut by a unit": dict(B=1, H=2, M=80, N=100, R=20, rel="bounded", rel_start=10, T=60, E=1),
        "decoding a group": dict(query_start=9, N=1, H=8, G=1, gate=True),
        "decoding two rows, two ranges": dict(query_start=7, N=2, K=3, R=100, D=24, E=5, gate=True, mask="token"),
        "decoding before the first chunk": dict(query_start=1, N=2, rel="bounded", rel_start=-3, T=4, mask="neighbour"),
    },
    "relative_attention": {
        "masked and causal": dict(B=1, N=70, S=140, H=2, key_mask=True, causal=True, D=24, E=5),
        "grouped heads, dropout": dict(B=1, N=9, S=70, H=4, G=2, window=20, dropout_p=0.2),
        "one key": dict(B=1, N=200, S=1, H=2),
        "narrow positions": dict(B=1, N=130, S=140, H=2, E=3, causal=True),
        "two queries": dict(B=1, N=2, S=300, H=4, G=2, D=24, E=5, causal=True, key_mask=True),
        "blocks of a window": dict(B=1, N=130, S=140, H=2, E=3, causal=True, window_block=33),
        "positions of each entry": dict(N=70, S=140, H=2, D=24, **BOUNDED, query_offset=torch.tensor([3, 70])),
        "a position of each entry": dict(N=1, S=140, H=2, D=24, **BOUNDED, query_offset=torch.tensor([3, 130])),
    },
    "relative_logits": {f"{width} wide": dict(B=1, N=70, H=2, key_len=90, E=width) for width in (3, 5, 16)},
    "merge_attention": {
        "three": dict(),
        "two, wide": dict(P=2, D=80),
        "dead parts": dict(dead=True),
        "one token": dict(P=9, N=1),
    },
    "topk_chunks": {
        "a tile and a rest": dict(Q=17, S=29),
        "two tiles at a time, and one": dict(B=1, Q=45, S=61, D=33, k=7),
        "four tiles at a time, and three": dict(B=1, Q=112, S=61, D=9, k=16),
        "beyond the lists of lanes": dict(B=1, Q=45, S=61, D=33, k=17),
        "all masks": dict(Q=40, S=70, docs=True, mask=True, causal_gap=2, query_offset=31, shared=True),
        "keys are cut": dict(B=1, Q=3, S=9000, D=5, k=11),
        "keys are cut, causal": dict(B=1, Q=5, S=9000, D=4, causal_gap=1, query_offset=5000),
        "rows that alias in L1": dict(B=1, Q=18, S=50, D=2048),
        "sums that fold": dict(B=1, Q=3, S=30, D=1031),
        "the widest": dict(B=1, Q=2, S=26, D=4096),
    },
    "leaky_average": {
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
    },
}
CASES["rms_norm"] = {  # eps matters
    str(shape): dict(zip("BND", shape), eps=0.1) for shape in ((1, 300, 384), (5, 65, 67), (17, 3, 1001), (1, 1, 1))
}
#: what narrow types change in a running sum: how a vector and its tail are loaded and stored
NARROW = ("small", "lanes of two strips")


@every_isa
@pytest.mark.parametrize(
    "op, name, dtype",
    [
        (op, name, dtype)
        for op, cases in CASES.items()
        for name in cases
        for dtype in (TYPES if op not in ("leaky_average", "rms_norm") or name in NARROW else TYPES[:1])
    ],
    ids=str,
)
def test_values_and_gradients(kernels, op, name, dtype, isa):
    kernels.set_isa(isa)
    for more in [dict(metric="dot", integers=True), dict(metric="l2", integers=True)] if op == "topk_chunks" else [{}]:
        compare.check(op, BUILDERS[op](3, dtype=dtype, **CASES[op][name], **more), "cpu")


#: calls that take several threads
THREADED = [
    ("chunked_cross_attention", dict(N=60, M=8, R=20, heads="shared", gate=True, dropout_p=0.2)),
    ("relative_attention", dict(B=1, N=300, H=2, causal=True)),
    ("relative_attention", dict(B=1, N=1, S=900, H=2)),
    ("relative_attention", dict(B=9, N=20, H=8, heads="shared", E=3)),
    ("relative_logits", dict(N=300, key_len=70)),
    ("merge_attention", dict(N=160, H=4, D=129)),
    *(("topk_chunks", dict(B=1, Q=1, S=20011, D=9, metric=metric)) for metric in ("dot", "l2")),
    *(("topk_chunks", dict(B=3, Q=70, S=60, metric=metric)) for metric in ("dot", "l2")),
    *(("topk_chunks", dict(B=1, Q=40, S=9000, D=8, k=100, metric=metric)) for metric in ("dot", "l2")),
    ("leaky_average", dict(N=2500, B=1)),
    ("leaky_average", dict(B=3, H=40, D=64, segments=7)),
    ("leaky_average", dict(B=1, N=20, H=7, D=24)),
    ("rms_norm", dict(N=350, D=384)),
]


@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
@pytest.mark.parametrize("op, case", THREADED, ids=str)
def test_bits_do_not_depend_on_threads(op, case, dtype):
    if op == "rms_norm" and dtype == torch.bfloat16:
        pytest.skip("the kernel serves float32")
    kw, threads, results = BUILDERS[op](4, dtype=dtype, **case), torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            torch.manual_seed(1)
            results.append(compare.run(op, kw, "cpu"))
    finally:
        torch.set_num_threads(threads)
    for name, value in results[0].items():
        assert all(torch.equal(other[name], value) for other in results[1:]), name


def few(op: str, seed: int, **case) -> dict:
    """Return a call whose few rows the forward pass computes in another order than the backward pass."""
    return BUILDERS[op](seed, B=2, H=2, **case) | {"scale": 1.0}


@pytest.mark.parametrize(
    "op, case",
    [
        *(("chunked_cross_attention", dict(N=1, M=1, R=tokens)) for tokens in (40, 150)),
        *(("relative_attention", dict(N=rows, S=150)) for rows in (1, 2)),
    ],
    ids=str,
)
def test_probabilities_of_a_few_rows_add_up_to_one(op, case):
    """The forward pass of few rows adds scores in another order, so `lse` would not match large scores of the backward
    pass.
    """
    kw = few(op, 1, D=200, **case)
    kw["value"].requires_grad_()
    out = getattr(rk, op)(**kw, backend="cpu")
    upstream = torch.randn(out.shape, generator=inputs.generator(2))
    (grad,) = torch.autograd.grad(out, kw["value"], upstream)
    torch.testing.assert_close(grad.double().flatten(1, -3).sum(1), upstream.double().sum(1), atol=2e-6, rtol=0)


@pytest.mark.parametrize("op", ["chunked_cross_attention", "relative_attention"])
@pytest.mark.parametrize("rows", [1, 2])
def test_score_gradients_of_a_few_rows_add_up_to_zero(op, rows):
    """Their mean uses the backward pass' own probabilities, not the output of the forward pass."""
    sizes = dict(M=rows, R=150) if op == "chunked_cross_attention" else dict(S=300)
    for seed in range(6):
        kw = few(op, seed, N=rows, D=64, E=1, biases=False, **sizes)
        kw["rel_key"] = torch.ones_like(kw["rel_key"])  # so that a relative query's gradient is that sum
        kw["rel_query"].requires_grad_()
        out = getattr(rk, op)(**kw, backend="cpu")
        (grad,) = torch.autograd.grad(out, kw["rel_query"], torch.randn(out.shape, generator=inputs.generator(2)))
        torch.testing.assert_close(grad, torch.zeros_like(grad), atol=4e-6, rtol=0)


# ---------------------------------------------------------------- cross-attention


@every_isa
def test_a_key_of_minus_infinity_stays_hidden_from_an_odd_number_of_queries(kernels, isa):
    """Three queries leave half of a pair of bfloat16 without a query."""
    kernels.set_isa(isa)
    query, key, value = (
        torch.ones(s, dtype=torch.bfloat16) for s in ((1, 6, 1, 16), (1, 1, 1, 8, 1, 16), (1, 1, 1, 8, 1, 16))
    )
    key[0, 0, 0, 0] = -torch.inf
    key.requires_grad_(), value.requires_grad_()
    rk.chunked_cross_attention(query, key, value, chunk_len=4, backend="cpu").sum().backward()
    assert key.grad.isfinite().all() and value.grad.isfinite().all()


@every_isa
@pytest.mark.parametrize("N", [1, 30])
def test_positions_of_each_entry(kernels, N, isa):
    kernels.set_isa(isa)
    kw = inputs.cross_attention(3, B=3, N=N, M=5, R=7, G=2, E=5, mask="token", gate=True, extra_chunks=9 - N // 5)
    compare.check("chunked_cross_attention", kw | {"query_start": torch.tensor([0, 13, 42])}, "cpu")


@pytest.mark.parametrize("seed", [22, 29])
def test_gradients_of_one_query_use_the_scores_of_its_forward_pass(seed):
    """Its probabilities are off by a percent if the two passes round at different places."""
    kw = inputs.cross_attention(seed, dtype=torch.bfloat16, N=1, query_start=10, B=1, H=2, M=4, K=1, R=3)
    compare.check("chunked_cross_attention", kw, "cpu")


def test_each_gradient_alone_is_the_same():
    """A gradient's bits do not depend on the other requested gradients."""
    kw = inputs.cross_attention(5, gate=True, E=8, mask="token")
    leaves, names = inputs.differentiable(kw), floats(kw)
    grad = inputs.randn(inputs.generator(1), *kw["query"].shape, dtype=torch.float32)
    together = torch.autograd.grad(
        rk.chunked_cross_attention(**leaves, backend="cpu"), [leaves[n] for n in names], grad
    )
    for name, want in zip(names, together, strict=True):
        alone = {n: v.detach().requires_grad_(n == name) if n in names else v for n, v in leaves.items()}
        got = torch.autograd.grad(rk.chunked_cross_attention(**alone, backend="cpu"), alone[name], grad)[0]
        assert torch.equal(got, want), name


def test_large_scores_fit_their_log_sum_exp():
    """A log-sum-exp of 50 is rounded once: an error of 4e-6 in its last place is one of 4e-6 in every probability."""
    kw = inputs.cross_attention(3046, B=1, N=132, M=60, R=63, G=2, D=256, rel=None, gate=True, mask="neighbour")
    kw |= {"scale": 1.0, "query_start": torch.tensor([5])}
    upstream = inputs.randn(inputs.generator(132), 1, 4, 132, dtype=torch.float32)

    def grad_gate(backend, dtype):
        call = inputs.differentiable(inputs.cast(kw, dtype))
        lse = rk.chunked_cross_attention(**call, return_lse=True, backend=backend)[1]
        return torch.autograd.grad(lse, call["neighbour_gate"], torch.where(lse.isfinite(), upstream, 0).to(dtype))[0]

    want, eager = grad_gate("reference", torch.float64), grad_gate("reference", torch.float32)
    assert_passes("grad_neighbour_gate", grad_gate("cpu", torch.float32), want, eager, torch.float32)


# ---------------------------------------------------------------- relative attention

# blocks are 64 queries by 128 keys, tasks 256 queries
BLOCKS = {
    "63": dict(N=63, S=63, causal=True),
    "64": dict(N=64, S=64, causal=True),
    "65": dict(N=65, S=65, causal=True, causal_gap=1),
    "127 by 128": dict(N=127, S=128, segments=True),
    "129 by 191": dict(N=129, S=191, key_mask=True),
    "256 by 257": dict(N=256, S=257, causal=True, E=3),
    "300, windowed": dict(N=300, S=300, causal=True, window=67),
    "300, window of a block": dict(N=300, S=300, causal=True, window=64, E=8),
    "300, window of one": dict(N=300, S=300, window=1, query_offset=0, E=1),
    "300, blocks": dict(N=300, S=300, causal=True, window_block=64, E=8),
    "300, blocks off the grid": dict(N=300, S=300, causal=True, window_block=37, query_offset=11),
    "300, blocks, both directions": dict(N=300, S=300, window_block=100, query_offset=-77, key_mask=True),
    "two queries, blocks": dict(N=2, S=700, causal=True, window_block=130, D=24, E=5),
    "300, bounded": dict(N=300, S=300, causal=True, rel="bounded", rel_start=0, T=70, E=16),
    "300, bounded off the chunks": dict(N=200, S=300, rel="bounded", rel_start=-77, T=65, E=16),
    "one query": dict(N=1, S=300, causal=True),
    "one query, a short table": dict(N=1, S=300, causal=True, rel="bounded", rel_start=0, T=90),
    "two queries, a short table": dict(N=2, S=300, H=4, G=2, D=24, E=5, rel="bounded", rel_start=-1, T=40),
    "one query, many ranges": dict(N=1, S=900, causal=True, H=4, G=2),
    "two queries, window": dict(N=2, S=700, causal=True, window=530, D=24, E=5),
    "two queries that see nothing": dict(N=2, S=300, causal=True, query_offset=-2),
    "two queries of documents": dict(N=2, S=600, B=3, segments=True, key_mask=True, heads="shared"),
    "two queries, bounded": dict(N=2, S=300, causal=True, rel="bounded", rel_start=20, T=70, E=16),
    "five queries, window": dict(N=5, S=300, causal=True, window=130),
    "one key": dict(N=200, S=1),
    "one key, wide head": dict(N=40, S=1, D=200),
    "two keys, wide head": dict(N=90, S=90, D=256, causal=True, window=2),
    "grouped heads": dict(N=70, S=140, H=4, G=2, heads="shared", E=5, causal=True),
    "more queries than keys": dict(N=260, S=70, causal=True),
    "many batch entries": dict(B=9, N=5, S=7, H=8),
    "many batch entries of grouped heads": dict(B=9, N=5, S=7, H=4, G=2, E=5),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_block_edges(name):
    compare.check("relative_attention", inputs.self_attention(3, **{"B": 1, "H": 2, **BLOCKS[name]}), "cpu")


def test_documents_hide_whole_tiles():
    """Five documents in one row of 300: hidden tiles are skipped, and the band restarts after each gap."""
    kw = inputs.self_attention(5, B=1, N=300, H=2)
    ids = torch.tensor([0] * 70 + [1] * 60 + [2] * 3 + [3] * 130 + [0] * 37).view(1, -1)  # the first one returns
    compare.check("relative_attention", kw | {"query_segment": ids, "key_segment": ids}, "cpu")


@pytest.mark.parametrize("N", [1, 70])
def test_masked_keys_are_not_read(N):
    """For a single query half of the keys are masked, for others a block between visible ones."""
    kw = inputs.self_attention(6, B=2, N=N, S=330, H=2)
    mask = torch.rand(2, 330, generator=inputs.generator(11)) < 0.5 if N == 1 else torch.ones(2, 330).bool()
    if N > 1:
        mask[0, 60:200], mask[1, 128:256] = False, False
    for name in ("key", "value"):
        kw[name] = kw[name].masked_fill(~mask[..., None, None], torch.nan)
    compare.check("relative_attention", kw | {"key_mask": mask}, "cpu")


@pytest.mark.parametrize("key_len", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("N", [1, 63, 64, 65, 130])
def test_logits_at_block_edges(N, key_len):
    compare.check("relative_logits", inputs.relative_logits(7, B=1, N=N, H=2, E=5, key_len=key_len), "cpu")


MEMORY = """
import resource, torch, retro_kernels as rk
from retro_kernels.testing import inputs
kw = inputs.self_attention(9, B=1, N=16384, H=1, D=16, rel="bounded", rel_start=0, T=64, causal=True, window=100)
kw = inputs.differentiable(kw)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rk.relative_attention(**kw, backend="cpu").sum().backward()
rk.relative_logits(kw["query"][:, :64], kw["rel_key"], key_len=16384, rel_start=0, backend="cpu")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_is_linear():
    """One matrix [N,N] of 16384 tokens takes 1 GiB; forward and backward use less than an eighth of it."""
    assert int(python("-c", MEMORY)) < 128 * 1024  # KiB


# ---------------------------------------------------------------- top-k


@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
@every_isa
def test_an_equal_key_is_nearest_if_every_product_is_subnormal(kernels, isa, dtype):
    """A product of pairs of bfloat16 rounds results below the smallest normal number to 0."""
    kernels.set_isa(isa)
    query = torch.full((1, 1, 4096), 1.08e-19, dtype=dtype)  # q.q is 4.8e-35
    key = torch.cat([torch.zeros_like(query), query], 1)
    scores, indices = rk.topk_chunks(query, key, 1, metric="l2", backend="cpu")
    assert indices.item() == 1 and scores.item() == 0


@pytest.mark.parametrize("k", [4, 40])
@every_isa
def test_every_place_of_the_causal_limit(kernels, isa, k):
    """Keys are read 6 at a time and query tiles end one by one: the limit falls at every place within a block."""
    kernels.set_isa(isa)
    for offset in range(6):
        kw = inputs.topk(9, B=1, Q=70, S=80, D=3, k=k, integers=True, causal_gap=0, query_offset=offset)
        want = rk.topk_chunks(**kw, backend="reference")
        got = rk.topk_chunks(**kw, backend="cpu")
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]), offset


@every_isa
def test_nan_and_infinity_on_every_isa(kernels, isa):
    """The vector maximum must hide no score behind a NaN or a masked key's infinity."""
    kernels.set_isa(isa)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for metric in ("dot", "l2"):
            kw = inputs.topk(4, Q=20, S=100, D=7, dtype=dtype, metric=metric, integers=True, mask=True)
            kw["key"][:, ::3, 6] = torch.nan
            kw["key"][:, 1::5, 0] = torch.inf
            want = rk.topk_chunks(**kw, backend="reference")
            got = rk.topk_chunks(**kw, backend="cpu")
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("metric", ["dot", "l2"])
@every_isa
def test_bits_do_not_depend_on_where_queries_lie(kernels, isa, metric):
    """Queries are transposed in place, but copied if pairs of their elements are not aligned to words."""
    kernels.set_isa(isa)
    for dtype in (torch.float32, torch.bfloat16):
        kw = inputs.topk(6, B=2, Q=37, S=50, D=24, dtype=dtype, metric=metric)
        want = rk.topk_chunks(**kw, backend="cpu")
        for width, start in ((24, 1), (25, 0), (25, 1), (26, 2), (26, 1)):  # elements of a row, and before the first
            room = torch.full((start + 2 * 37 * width,), torch.nan, dtype=dtype)
            query = room[start:].view(2, 37, width)[..., :24].copy_(kw["query"])
            got = rk.topk_chunks(**kw | {"query": query}, backend="cpu")
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]), (width, start)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_bits_do_not_depend_on_the_place_in_a_tile(dtype):
    """A key's scores and a query's scores do not depend on their place."""
    kw = inputs.topk(6, B=1, Q=33, S=53, D=37, k=53, dtype=dtype)
    scores, indices = rk.topk_chunks(**kw, backend="cpu")
    dense = torch.empty(1, 33, 53).scatter_(-1, indices, scores)
    for shift in (1, 13, 30):
        moved = {**kw, "key": kw["key"].roll(shift, 1).contiguous(), "query": kw["query"].roll(shift, 1).contiguous()}
        scores, indices = rk.topk_chunks(**moved, backend="cpu")
        again = torch.empty(1, 33, 53).scatter_(-1, indices, scores)
        assert torch.equal(again, dense.roll((shift, shift), (1, 2)))


def test_huge_offsets():
    kw = inputs.topk(8, integers=True, causal_gap=0)
    everything = rk.topk_chunks(**{**kw, "query_offset": 2**61}, backend="cpu")
    assert torch.equal(everything[1], rk.topk_chunks(**{**kw, "causal_gap": None}, backend="cpu")[1])
    assert (rk.topk_chunks(**{**kw, "query_offset": -(2**61)}, backend="cpu")[1] == -1).all()


# ---------------------------------------------------------------- leaky average


@pytest.mark.parametrize("begin", [1023, 1024, 1025, 2047, 2048, 2099])
def test_a_document_that_begins_beside_a_cut(begin):
    """Time is cut at 1024 and 2048; the state carried over a cut stops at a document's start, values and gradients."""
    kw = inputs.leaky(8, B=1, N=2100, H=2, D=8, decay=[0.999, 0.9])
    kw["segment"] = (torch.arange(2100) >= begin).long().unsqueeze(0)
    compare.check("leaky_average", kw, "cpu")
    kw["x"][:, begin - 1] = torch.inf
    assert rk.leaky_average(**kw, backend="cpu")[:, begin:].isfinite().all()


@pytest.mark.parametrize("N", [40, 2100])
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.99])
def test_gradient_of_each_decay(decay, N):
    """One head at a time: in a common norm a slow decay's large gradient would hide an error of a decay of 0."""
    got = compare.check("leaky_average", inputs.leaky(7, B=1, N=N, H=1, D=16, decay=[decay]), "cpu")
    assert got["grad_decay"].abs().item() > 0
