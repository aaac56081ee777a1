"""Tiles, splits, lists and segment sums of Triton's topk_chunks, in the interpreter or on a GPU.

`test_topk_chunks.py` checks the contract on every backend.
"""

import itertools

import pytest
import torch

import retro_kernels as rk
from retro_kernels.core import dispatch
from retro_kernels.ops.topk_chunks.call import TopkChunks
from retro_kernels.testing import compare, guard_bands, inputs
from tests.conftest import COMPILED, INTERPRETER, noted_launches

pytestmark = pytest.mark.skipif(
    not rk.backends()["topk_chunks"]["triton"], reason=str(rk.backends()["topk_chunks"]["triton"].reason)
)

OP = "topk_chunks"
DEVICE = "cpu" if INTERPRETER or COMPILED else "cuda"


def on_device(kw: dict) -> dict:
    return {name: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for name, v in kw.items()}


def assert_exact(kw: dict, k: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Check that scores and indices equal the float64 reference's to the last bit, for inputs with exact scores."""
    kw = on_device(kw)
    scores, indices = rk.topk_chunks(**kw, backend="triton")
    want, want_indices = rk.topk_chunks(**inputs.cast(kw, torch.float64), backend="reference")
    assert torch.equal(indices, want_indices), f"{int((indices != want_indices).sum())} indices differ"
    assert torch.equal(scores.double(), want)
    return scores, indices


def problem(kw: dict) -> TopkChunks:
    defaults = dict(metric="dot", causal_gap=None, query_offset=0, query_doc=None, key_doc=None, key_mask=None)
    return TopkChunks(**{**defaults, **on_device(kw)})


@pytest.mark.parametrize("k", [1, 16, 17, 128])
def test_every_width_of_list(k):
    for size in (37, 200):  # more slots than keys, and fewer
        assert_exact(inputs.topk(2, B=1, Q=3, S=size, D=8, k=k, integers=True, causal_gap=0, query_offset=size))


@pytest.mark.parametrize("D", [1, 16, 24, 100, 130])
def test_every_width_of_embedding(D):
    assert_exact(inputs.topk(3, Q=5, S=50, D=D, k=3, integers=True, metric="l2"))


@pytest.mark.parametrize("metric", ["dot", "l2"])
def test_tiles_and_splits_change_nothing(metric):
    """Every tile of the table, by one launch or a scan and a merge: the same bits, equal to the reference."""
    launch = pytest.importorskip("retro_kernels.ops.topk_chunks.triton.launch")
    from retro_kernels.compile.target import KNOWN

    kw = inputs.topk(
        4, B=1, Q=21, S=200, D=16, k=10, integers=True, metric=metric, docs=True, causal_gap=0, query_offset=185
    )
    call = problem(kw)
    want = rk.topk_chunks(**on_device(kw), backend="reference")
    for tile in {launch.tile_of(row) for target in KNOWN.values() for row in launch.rows(call, target)}:
        for count in (1, 3):
            length = -(-200 // count // tile.block_s) * tile.block_s
            parts = launch.Split(-(-200 // length), length)
            with guard_bands.poisoned(), noted_launches() as made:
                scores, indices = launch.forward(call, KNOWN[90], tile, parts)
            assert len(made) == (1 if parts.count == 1 else 2)
            assert torch.equal(scores, want[0]) and torch.equal(indices, want[1]), (tile, parts)


def test_no_candidates():
    kw = on_device(inputs.topk(7, Q=5, S=40, k=3, causal_gap=60))
    scores, indices = rk.topk_chunks(**kw, backend="triton")
    assert (indices == -1).all() and (scores == -torch.inf).all()
    kw["query"].requires_grad_(), kw["key"].requires_grad_()
    scores, _ = rk.topk_chunks(**kw, backend="triton")
    # the upstream gradient of an empty slot is not finite and must not arrive
    grads = torch.autograd.grad(scores, (kw["query"], kw["key"]), torch.full_like(scores, torch.nan))
    assert all((grad == 0).all() for grad in grads)


def test_a_popular_key_gathers_every_query():
    """More than one step of the segment sum: all 2*40 queries choose key 3, most also key 9."""
    kw = inputs.topk(9, Q=40, S=12, D=16, k=2, shared=True)
    kw["query"] = kw["query"].abs()
    kw["key"][0, 3] = 50.0
    kw["key"][0, 9] = 20.0
    got = compare.check(OP, on_device(kw), "triton")
    assert (got["out1"][..., 0] == 3).all()


def test_packing():
    """The layout that retro_kernels/ops/topk_chunks/triton/selection.py and csrc/cuda/topk_select.cuh draw."""
    from retro_kernels.compile.target import KNOWN
    from retro_kernels.ops.topk_chunks.triton import launch

    key = torch.zeros(1, 10, 8)
    key[0, 7, 0], key[0, 3, 0] = 1.5, -1.5
    mask = torch.zeros(1, 10, dtype=torch.bool)
    mask[0, [3, 7]] = True
    query = torch.zeros(1, 1, 8)
    query[..., 0] = 1.0
    call = problem({"query": query, "key": key, "k": 2, "key_mask": mask})
    tile = launch.choose_tile(call, KNOWN[90])
    with noted_launches() as launches:
        launch.forward(call, KNOWN[90], tile, launch.Split(2, 2**20))  # the second part is empty
    packed = sorted(launches[0].arguments["partial_ptr"][0, 0, 0].tolist(), reverse=True)
    assert [hex(value & (2**64 - 1)) for value in packed] == ["0x3fc000007ffffff8", "0xc03fffff7ffffffc"]


def test_the_plan_fills_the_device_and_bounds_its_scratch():
    """Splits cover the keys, and their lists stay below a bound that does not depend on S."""
    launch = pytest.importorskip("retro_kernels.ops.topk_chunks.triton.launch")
    cases = pytest.importorskip("retro_kernels.ops.topk_chunks.cases")
    from retro_kernels.compile.target import KNOWN

    for target, queries, keys, k in itertools.product(
        KNOWN.values(), (1, 64, 4096, 20000), (1, 5000, 10**6, 2 * 10**9), (4, 128)
    ):
        call = cases.call(torch.bfloat16, Q=queries, S=keys, D=64, k=k)
        tile = launch.choose_tile(call, target)
        blocks = -(-queries // tile.block_q)
        places = target.multiprocessors * tile.resident
        parts = launch.split(keys, tile.block_s, blocks, places, launch.TILES_PER_SPLIT)
        assert (
            parts.length % tile.block_s == 0 and (parts.count - 1) * parts.length < keys <= parts.count * parts.length
        )
        assert parts.count == 1 or blocks * parts.count <= 4 * places
        if keys >= 10**6:
            assert blocks * parts.count >= 0.75 * places


def test_unsupported_calls_say_why():
    backend = dispatch.module(OP, "triton")
    assert "float64" in backend.unsupported(problem(inputs.topk(0, dtype=torch.float64)))
    assert backend.unsupported(problem(inputs.topk(0))) is None
