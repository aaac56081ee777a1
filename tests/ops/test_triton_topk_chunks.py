"""Tiles, splits and packed lists of Triton's topk_chunks, in the interpreter or on a GPU.

`test_topk_chunks.py` checks the contract on every backend.
"""

import itertools

import pytest
import torch

import retro_kernels as rk
from retro_kernels.compile.target import KNOWN
from retro_kernels.ops.topk_chunks import cases
from retro_kernels.testing import guard_bands, inputs
from tests.conftest import COMPILED, INTERPRETER, noted_launches
from tests.ops.calls import resolved

launch = pytest.importorskip("retro_kernels.ops.topk_chunks.triton.launch")
pytestmark = pytest.mark.skipif(
    not rk.backends()["topk_chunks"]["triton"], reason=str(rk.backends()["topk_chunks"]["triton"].reason)
)

OP = "topk_chunks"
DEVICE = "cpu" if INTERPRETER or COMPILED else "cuda"


def on_device(kw: dict) -> dict:
    return {name: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for name, v in kw.items()}


@pytest.mark.parametrize("metric", ["dot", "l2"])
def test_tiles_and_splits_change_nothing(metric):
    """Every tile of the table, by one launch or a scan and a merge: the same bits, equal to the reference."""
    kw = inputs.topk(
        4, B=1, Q=21, S=200, D=16, k=10, integers=True, metric=metric, docs=True, causal_gap=0, query_offset=185
    )
    kw = on_device(kw)
    call = resolved(OP, kw)
    want = rk.topk_chunks(**kw, backend="reference")
    for tile in {launch.tile_of(row) for target in KNOWN.values() for row in launch.rows(call, target)}:
        for count in (1, 3):
            length = -(-200 // count // tile.block_s) * tile.block_s
            parts = launch.Split(-(-200 // length), length)
            with guard_bands.poisoned(), noted_launches() as made:
                scores, indices = launch.forward(call, KNOWN[90], tile, parts)
            assert len(made) == (1 if parts.count == 1 else 2)
            assert torch.equal(scores, want[0]) and torch.equal(indices, want[1]), (tile, parts)


def test_packing():
    """The layout that retro_kernels/ops/topk_chunks/triton/selection.py and csrc/cuda/topk_select.cuh draw."""
    key = torch.zeros(1, 10, 8)
    key[0, 7, 0], key[0, 3, 0] = 1.5, -1.5
    mask = torch.zeros(1, 10, dtype=torch.bool)
    mask[0, [3, 7]] = True
    query = torch.zeros(1, 1, 8)
    query[..., 0] = 1.0
    call = resolved(OP, on_device({"query": query, "key": key, "k": 2, "key_mask": mask}))
    tile = launch.choose_tile(call, KNOWN[90])
    with noted_launches() as launches:
        launch.forward(call, KNOWN[90], tile, launch.Split(2, 2**20))  # the second part is empty
    packed = sorted(launches[0].arguments["partial_ptr"][0, 0, 0].tolist(), reverse=True)
    assert [hex(value & (2**64 - 1)) for value in packed] == ["0x3fc000007ffffff8", "0xc03fffff7ffffffc"]


def test_the_plan_fills_the_device_and_bounds_its_scratch():
    """Splits cover the keys, and their lists stay below a bound that does not depend on S."""
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
