"""Host side of leaky_average: the launches of a call, as values. Nothing here runs or waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from ....compile import configs
from ....compile.target import Target
from ....triton_lib.launch import Launch, of_tile, power_of_two, strided
from ....triton_lib.plan import Plan
from ..call import LeakyAverage
from .kernels import _leaky_ends_kernel, _leaky_scan_kernel

OP = "leaky_average"
_WAVES = 2  # programs per multiprocessor below which time is cut into chunks
_LEAST_CHUNK = 128  # steps; a shorter chunk would spend its time on the states of earlier chunks


def forward(call: LeakyAverage, target: Target) -> Plan:
    """Plan y."""
    (y,) = call.empty_outputs()
    arguments = strided("initial", call.initial, "i", "bh") | strided("past", None, "p", "bnh")
    arguments |= {"y_ptr": y, "dinitial_ptr": None, "ddecay_ptr": None}
    return Plan(_scan(call, call.x, "scan", arguments, target), (y,))


def backward(call: LeakyAverage, outputs, grads, needs, target: Target) -> Plan:
    """Plan dx, dinitial, and partial sums of d decay [B, chunks, H, column blocks]."""
    (y,), (dy,) = outputs, grads
    b, _, h, d = call.x.shape
    device = call.x.device
    dx = torch.empty(call.x.shape, dtype=call.x.dtype, device=device) if needs[0] else None
    dinitial = torch.empty((b, h, d), dtype=call.x.dtype, device=device) if needs[2] else None
    tile = _tile(call, "scan_back", target)
    chunks, columns = _chunks(call, tile, target)[1], -(-d // tile.block_n)
    partial = torch.empty((b, chunks, h, columns), dtype=torch.float32, device=device) if needs[1] else None
    # only d decay reads initial and y
    arguments = strided("initial", call.initial if needs[1] else None, "i", "bh") | strided("past", y, "p", "bnh")
    arguments |= {"past_ptr": y if needs[1] else None, "y_ptr": dx, "dinitial_ptr": dinitial, "ddecay_ptr": partial}

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
    common = strided("x", x, "x", "bnh") | strided("segment", call.segment, "s", "bn")
    common |= {"decay_ptr": call.decay, "stride_decay": call.decay.stride(0), "unbroken_ptr": None}
    common |= {"N": n, "H": h, "D": d, "column_blocks": columns, "chunk_len": length, "chunks": chunks}
    common |= {"BLOCK_T": tile.block_m, "BLOCK_C": tile.block_n, "STAGES": tile.num_stages}
    common["REVERSE"] = kernel == "scan_back"
    launches, ends = [], None
    if chunks > 1:
        ends = torch.empty((b, chunks, h, d), dtype=torch.float32, device=x.device)
        if call.segment is not None:
            common["unbroken_ptr"] = torch.empty((b, chunks, h * columns), dtype=torch.int32, device=x.device)
        # nothing reads the end of the last chunk
        launches = [of_tile(_leaky_ends_kernel, (h * columns, chunks - 1, b), common | {"ends_ptr": ends}, tile)]
    scan = common | arguments | {"ends_ptr": ends}
    return [*launches, of_tile(_leaky_scan_kernel, (h * columns, chunks, b), scan, tile)]
