"""topk_chunks on the CPU: every instruction set, every split of the work, any number of threads."""

import pytest
import torch

import retro_kernels as rk
from retro_kernels import extensions
from retro_kernels.testing import compare, inputs
from tests.ops.same import assert_threads_do_not_show

from .test_cpu_infrastructure import isas

OP = "topk_chunks"
pytestmark = pytest.mark.skipif(extensions.unavailable("_cpu") is not None, reason=str(extensions.unavailable("_cpu")))

CASES = {
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
}


@pytest.mark.parametrize("metric", ["dot", "l2"])
@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(kernels, name, dtype, isa, metric):
    kernels.set_isa(isa)
    compare.check(OP, inputs.topk(3, dtype=dtype, metric=metric, integers=True, **CASES[name]), "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("isa", isas())
def test_an_equal_key_is_nearest_if_every_product_is_subnormal(kernels, isa, dtype):
    """A product of pairs of bfloat16 rounds results below the smallest normal number to 0."""
    kernels.set_isa(isa)
    query = torch.full((1, 1, 4096), 1.08e-19, dtype=dtype)  # q.q is 4.8e-35
    key = torch.cat([torch.zeros_like(query), query], 1)
    scores, indices = rk.topk_chunks(query, key, 1, metric="l2", backend="cpu")
    assert indices.item() == 1 and scores.item() == 0


@pytest.mark.parametrize("k", [4, 40])
@pytest.mark.parametrize("isa", isas())
def test_every_place_of_the_causal_limit(kernels, isa, k):
    """Keys are read 6 at a time and query tiles end one by one: the limit falls at every place within a block."""
    kernels.set_isa(isa)
    for offset in range(6):
        kw = inputs.topk(9, B=1, Q=70, S=80, D=3, k=k, integers=True, causal_gap=0, query_offset=offset)
        want = rk.topk_chunks(**kw, backend="reference")
        got = rk.topk_chunks(**kw, backend="cpu")
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]), offset


@pytest.mark.parametrize("isa", isas())
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
@pytest.mark.parametrize("isa", isas())
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("metric", ["dot", "l2"])
@pytest.mark.parametrize(
    "case", [dict(B=1, Q=1, S=20011, D=9), dict(B=3, Q=70, S=60), dict(B=1, Q=40, S=9000, D=8, k=100)], ids=str
)
def test_bits_do_not_depend_on_threads(case, metric, dtype):
    assert_threads_do_not_show(OP, inputs.topk(5, metric=metric, dtype=dtype, **case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
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
