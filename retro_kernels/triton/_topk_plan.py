"""Which tile and how many splits a call of topk_chunks gets: pure functions of sizes, type and target.

The tiles are data, retro_kernels/configs/topk_chunks.json: for each architecture the largest tiles that compile without
spills (a test compiles them all). Chosen by the bytes of an element, the queries a tile holds, and the width of a list.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from importlib import resources

import torch
import triton
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_K = 128
#: streaming multiprocessors (SXM4 A100, SXM5 H100 and H200, B200 data sheets): what the splits are cut for
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}
#: a split scans at least so many tiles, or its own list costs more than it saves
TILES_PER_SPLIT = 4
#: bytes to which rows must be aligned for the wide asynchronous copies
ALIGNMENT = 16


@dataclasses.dataclass(frozen=True)
class Scan:
    """One launch of the scan. `resident`: programs of this tile that fit a multiprocessor."""

    block_q: int
    block_s: int
    block_d: int
    num_warps: int
    num_stages: int
    resident: int
    slots: int
    splits: int = 1
    split_len: int = 0

    def launch(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclasses.dataclass(frozen=True)
class Rows:
    """A tile of the merge ([block_q, block_n] candidates) or of a gradient ([block_n, block_d] gathered rows)."""

    block_q: int
    block_n: int
    block_d: int
    num_warps: int = 4

    def launch(self) -> dict[str, int]:
        return {"num_warps": self.num_warps}


@functools.cache
def table() -> dict[str, list[dict]]:
    return json.loads(resources.files("retro_kernels.configs").joinpath("topk_chunks.json").read_text())


def slots(k: int) -> int:
    """Slots of a list in registers: k rounded up to a power of two."""
    return max(4, triton.next_power_of_2(k))


def tiles(arch: int, element_bytes: int, aligned: bool, k: int) -> list[Scan]:
    """The tiles that may serve such a call, the most queries first."""
    wide = slots(k)
    known = table()[str(max((a for a in map(int, table()) if a <= arch), default=80))]
    found: dict[int, Scan] = {}
    for row in known:
        if row["bytes"] == element_bytes and row["aligned"] == aligned and row["slots"] >= wide and row["block_q"] not in found:
            sizes = {name: row[name] for name in ("block_q", "block_s", "block_d", "num_warps", "num_stages", "resident")}
            found[row["block_q"]] = Scan(**sizes, slots=wide)
    return sorted(found.values(), key=lambda tile: -tile.block_q)


def scan(call, arch: int) -> Scan:
    """The most queries a tile that still fill the device, with the keys split where queries alone don't."""
    query, key = call.query, call.key
    b, q, _ = query.shape
    multiprocessors = MULTIPROCESSORS[max((a for a in MULTIPROCESSORS if a <= arch), default=80)]
    choices = tiles(arch, query.element_size(), rows_aligned(query) and rows_aligned(key), call.k)
    for tile in choices:
        wasteful = tile.block_q >= 2 * max(q, 1) and tile is not choices[-1]
        blocks = b * triton.cdiv(q, tile.block_q)
        most = max(1, triton.cdiv(key.shape[1], tile.block_s) // TILES_PER_SPLIT)
        # three quarters of the multiprocessors busy with big tiles beat all of them busy with small ones
        if tile is choices[-1] or (not wasteful and blocks * most >= 0.75 * multiprocessors):
            return split(tile, blocks, key.shape[1], multiprocessors * tile.resident)
    raise AssertionError("the table has no tile for this call")


def split(tile: Scan, blocks: int, keys: int, places: int) -> Scan:
    """`tile` with the fewest splits that leave the fewest of `places` idle in the last round.

    >>> split(tile, blocks=1, keys=10**6, places=264).splits
    264
    """
    count = triton.cdiv(keys, tile.block_s)
    most = max(1, min(count // TILES_PER_SPLIT, 4 * places // blocks))

    def busy(splits: int) -> float:
        programs = blocks * splits
        return round(programs / (triton.cdiv(programs, places) * places), 2)

    splits = max(range(1, most + 1), key=lambda n: (busy(n), -n))
    split_len = triton.cdiv(count, splits) * tile.block_s
    return dataclasses.replace(tile, splits=triton.cdiv(keys, split_len), split_len=split_len)


def merge(k: int, count: int) -> Rows:
    """Rows and candidates a step of the merge, for `count` candidates a row."""
    block_n = min(1024, max(16, triton.next_power_of_2(count)))
    return Rows(block_q=max(1, min(16, 2048 // max(block_n, slots(k)))), block_n=block_n, block_d=0)


def gather(d: int) -> Rows:
    return Rows(block_q=0, block_n=16, block_d=min(256, max(16, triton.next_power_of_2(d))))


def precision(dtype: torch.dtype) -> str:
    """Three TF32 products carry float32's 24 bits; halves multiply exactly in any mode."""
    return "tf32x3" if dtype == torch.float32 else "ieee"


def rows_aligned(tensor: Tensor) -> bool:
    """Whether every row starts at a multiple of ALIGNMENT bytes, and Triton's own test (16 elements) can see it."""
    return tensor.shape[-1] % 16 == 0 and all(stride % 16 == 0 for stride in tensor.stride()[:-1]) and tensor.data_ptr() % ALIGNMENT == 0


def arch_of(tensor: Tensor) -> int:
    """Compute capability of the tensor's device, as 10*major + minor; the interpreter stands for Hopper."""
    if not tensor.is_cuda:
        return 90
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return 10 * major + minor


def device_of(tensor: Tensor):
    """Context in which a kernel is launched on the tensor's device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
