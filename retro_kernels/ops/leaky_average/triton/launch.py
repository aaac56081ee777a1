"""Host side of leaky_average: the launches of a call, as values. Nothing here runs or waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from ....compile import configs
from ....compile.target import Target
from ....triton_lib.launch import Launch, of_tile, power_of_two, strides
from ....triton_lib.plan import Plan
from ..call import LeakyAverage
from .kernels import _leaky_ends_kernel, _leaky_scan_kernel

OP = "leaky_average"
_WAVES = 2  # programs per multiprocessor below which time is cut into chunks
_LEAST_CHUNK = 128  # steps; a shorter chunk would spend its time on the states of earlier chunks


def forward(call: LeakyAverage, target: Target) -> Plan:
    """Plan y."""
    y = torch.empty(call.x.shape, dtype=call.x.dtype, device=call.x.device)
    arguments = {
        "initial_ptr": call.initial,
        **strides(call.initial, "i", "bh"),
        "y_ptr": y,
        "past_ptr": None,
        **strides(None, "p", "bnh"),
        "dinitial_ptr": None,
        "ddecay_ptr": None,
    }
    return Plan(_scan(call, call.x, "scan", arguments, target), (y,))


def backward(call: LeakyAverage, outputs, grads, needs, target: Target) -> Plan:
    """Plan dx, dinitial, and partial sums of d decay [B, chunks, H, column blocks]."""
    (y,), (dy,) = outputs, grads
    b, _, h, d = call.x.shape
    device, acc_dtype = call.x.device, torch.float32
    dx = torch.empty(call.x.shape, dtype=call.x.dtype, device=device) if needs[0] else None
    dinitial = torch.empty((b, h, d), dtype=call.x.dtype, device=device) if needs[2] else None
    tile = _tile(call, "scan_back", target)
    chunks, columns = _chunks(call, tile, target)[1], -(-d // tile.block_n)
    partial = torch.empty((b, chunks, h, columns), dtype=acc_dtype, device=device) if needs[1] else None
    initial = call.initial if needs[1] else None  # only d decay reads it
    arguments = {
        "initial_ptr": initial,
        **strides(initial, "i", "bh"),
        "y_ptr": dx,
        "past_ptr": y if needs[1] else None,
        **strides(y, "p", "bnh"),
        "dinitial_ptr": dinitial,
        "ddecay_ptr": partial,
    }

    def gradients() -> list[Tensor | None]:
        return [dx, None if partial is None else partial.sum((0, 1, 3)).to(call.decay.dtype), dinitial]

    return Plan(_scan(call, dy, "scan_back", arguments, target), gradients=gradients)


def _tile(call: LeakyAverage, kernel: str, target: Target) -> configs.Tile:
    _, n, _, d = call.x.shape
    return configs.choose(OP, configs.Problem(kernel, call.x.element_size(), power_of_two(d), n, d), target)


def _chunks(call: LeakyAverage, tile: configs.Tile, target: Target) -> tuple[int, int]:
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


def _scan(call: LeakyAverage, x: Tensor, kernel: str, arguments: dict, target: Target) -> list[Launch]:
    b, n, h, d = x.shape
    tile = _tile(call, kernel, target)
    length, chunks = _chunks(call, tile, target)
    columns = -(-d // tile.block_n)
    common = {
        "x_ptr": x,
        **strides(x, "x", "bnh"),
        "decay_ptr": call.decay,
        "stride_decay": call.decay.stride(0),
        "segment_ptr": call.segment,
        **strides(call.segment, "s", "bn"),
        "unbroken_ptr": None,
        "N": n,
        "H": h,
        "column_blocks": columns,
        "chunk_len": length,
        "chunks": chunks,
        "D": d,
        "BLOCK_T": tile.block_m,
        "BLOCK_C": tile.block_n,
        "REVERSE": kernel == "scan_back",
        "STAGES": tile.num_stages,
    }
    launches, ends = [], None
    if chunks > 1:
        ends = torch.empty((b, chunks, h, d), dtype=torch.float32, device=x.device)
        if call.segment is not None:
            common["unbroken_ptr"] = torch.empty((b, chunks, h * columns), dtype=torch.int32, device=x.device)
        # nothing reads the end of the last chunk
        grid = (h * columns, chunks - 1, b)
        launches.append(of_tile(_leaky_ends_kernel, grid, {**common, "ends_ptr": ends}, tile))
    scan = {**common, **arguments, "ends_ptr": ends}
    return [*launches, of_tile(_leaky_scan_kernel, (h * columns, chunks, b), scan, tile)]
