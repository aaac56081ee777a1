"""Host side of leaky_average: allocates and launches. Nothing here waits for the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....compile import tiles
from ....compile.target import Target
from ....core import layouts
from ....triton_lib.launch import Scalars, launch, power_of_two, strides
from ..call import LeakyAverage
from .kernels import _leaky_ends_kernel, _leaky_scan_kernel

OP = "leaky_average"
_WAVES = 2  # programs per multiprocessor below which time is cut into chunks
_LEAST_CHUNK = 128  # steps; a shorter chunk would spend its time on the states of earlier chunks


def forward(call: LeakyAverage, target: Target) -> tuple[Tensor]:
    """Return y."""
    (y,) = call.empty_outputs()
    tensors = {"initial_ptr": call.initial, "past_ptr": None, "y_ptr": y, "dinitial_ptr": None, "ddecay_ptr": None}
    scan = _scan(call, call.x, call.initial, None, "scan", target)
    _launch(call, scan, tensors | {"x_ptr": call.x})
    return (y,)


def backward(call: LeakyAverage, outputs, grads, needs, target: Target) -> list[Tensor | None]:
    """Return dx, d decay and dinitial; None for those that are not needed."""
    (y,), (dy,) = outputs, grads
    b, _, h, d = call.x.shape
    device = call.x.device
    # only d decay reads initial and y
    initial = call.initial if needs[1] else None
    scan = _scan(call, dy, initial, y, "scan_back", target)
    dx = torch.empty(call.x.shape, dtype=call.x.dtype, device=device) if needs[0] else None
    dinitial = torch.empty((b, h, d), dtype=call.x.dtype, device=device) if needs[2] else None
    shape = (b, scan.chunks, h, scan.columns)
    partial = torch.empty(shape, dtype=torch.float32, device=device) if needs[1] else None
    tensors = {"x_ptr": dy, "initial_ptr": initial, "past_ptr": y if needs[1] else None}
    tensors |= {"y_ptr": dx, "dinitial_ptr": dinitial, "ddecay_ptr": partial}
    _launch(call, scan, tensors)
    return [dx, None if partial is None else partial.sum((0, 1, 3)).to(call.decay.dtype), dinitial]


def _tile(call: LeakyAverage, kernel: str, target: Target) -> tiles.Tile:
    _, n, _, d = call.x.shape
    return tiles.choose_tile(OP, tiles.TileQuery(kernel, call.x.element_size(), power_of_two(d), n, d), target)


def _chunks(call: LeakyAverage, tile: tiles.Tile, target: Target) -> tuple[int, int]:
    """Return (length of a chunk, number of chunks): one chunk if its columns fill the device. The length is a power of
    two.
    """
    b, n, h, d = call.x.shape
    programs = b * h * -(-d // tile.block_n)
    want = -(-_WAVES * target.multiprocessors // programs)
    length = max(power_of_two(-(-n // want)), _LEAST_CHUNK, tile.block_m)
    if length >= n:
        length = power_of_two(n, tile.block_m)
    return length, -(-n // length)


class _Scan(NamedTuple):
    """Chunks of time and blocks of columns of a scan, and the scalars of its two launches."""

    chunks: int
    columns: int
    ends: Scalars
    whole: Scalars


def _scan(
    call: LeakyAverage, x: Tensor, initial: Tensor | None, past: Tensor | None, kernel: str, target: Target
) -> _Scan:
    """Return the scan of x; initial and past are read for d decay."""
    return layouts.current().once("scan", lambda: _new_scan(call, x, initial, past, kernel, target))


def _new_scan(
    call: LeakyAverage, x: Tensor, initial: Tensor | None, past: Tensor | None, kernel: str, target: Target
) -> _Scan:
    b, n, h, d = x.shape
    tile = _tile(call, kernel, target)
    length, chunks = _chunks(call, tile, target)
    columns = -(-d // tile.block_n)
    arguments = strides(x, "x", "bnh") | strides(call.segment, "s", "bn")
    arguments |= strides(initial, "i", "bh") | strides(past, "p", "bnh")
    arguments |= {"stride_decay": call.decay.stride(0), "N": n, "H": h, "D": d, "column_blocks": columns}
    arguments |= {"chunk_len": length, "chunks": chunks, "REVERSE": kernel == "scan_back"}
    arguments |= {"BLOCK_T": tile.block_m, "BLOCK_C": tile.block_n, "STAGES": tile.num_stages}
    # nothing reads the end of the last chunk
    ends = Scalars.of_tile((h * columns, chunks - 1, b), arguments, tile)
    return _Scan(chunks, columns, ends, Scalars.of_tile((h * columns, chunks, b), arguments, tile))


def _launch(call: LeakyAverage, scan: _Scan, tensors: dict[str, Tensor | None]) -> None:
    """Launch a scan; in several chunks, after the kernel that computes each chunk's last state."""
    tensors |= {"segment_ptr": call.segment, "decay_ptr": call.decay, "unbroken_ptr": None, "ends_ptr": None}
    if scan.chunks > 1:
        (b, _, h, d), device = call.x.shape, call.x.device
        tensors["ends_ptr"] = torch.empty((b, scan.chunks, h, d), dtype=torch.float32, device=device)
        if call.segment is not None:
            shape = (b, scan.chunks, h * scan.columns)
            tensors["unbroken_ptr"] = torch.empty(shape, dtype=torch.int32, device=device)
        launch(_leaky_ends_kernel, tensors, scan.ends)
    launch(_leaky_scan_kernel, tensors, scan.whole)
