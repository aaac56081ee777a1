"""Leaky average over time, as a scan: the triton backend of `retro_kernels.leaky_average`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .. import configs
from .._problem import KERNEL_DTYPES, LeakyAverage
from .._target import Target, current_target
from ..aot import Case
from . import unsupported
from ._launch import Launch, power_of_two, strides
from ._leaky_kernels import _leaky_ends_kernel, _leaky_scan_kernel

OP = "leaky_average"
_WAVES = 2  # programs per multiprocessor below which time is cut into chunks
_LEAST_CHUNK = 128  # steps: a shorter chunk would spend its time on the states of the others
_MAX_BATCH = 65535  # CUDA's limit on the third grid dimension


def reason(call: LeakyAverage) -> str | None:
    """Why this backend can't serve the call; None if it can."""
    if call.x.shape[0] > _MAX_BATCH:
        return f"B={call.x.shape[0]} exceeds {_MAX_BATCH}"
    # decay may stay float32 beside a narrower x
    return unsupported({"x": call.x, "initial": call.initial}) or unsupported({"decay": call.decay})


def forward(call: LeakyAverage) -> tuple[Tensor]:
    """y [B,N,H,D] in the type of x."""
    y, launches = plan_forward(call, current_target(call.x.device))
    for launch in launches:
        launch.run()
    return (y,)


def backward(call: LeakyAverage, outputs, grads, needs) -> list[Tensor | None]:
    """dx is the same scan run backwards over dy; d decay sums dx_t * y_{t-1} over the saved y, in two ordered stages."""
    inputs = (call.x, call.decay, call.initial)
    needs = [need and t is not None for need, t in zip(needs, inputs, strict=True)]
    if grads[0] is None or not any(needs):
        return [torch.zeros_like(t) if need else None for need, t in zip(needs, inputs, strict=True)]
    dx, partial, dinitial, launches = plan_backward(call, outputs[0], grads[0], needs, current_target(call.x.device))
    for launch in launches:
        launch.run()
    ddecay = None if partial is None else partial.sum((0, 1, 3)).to(call.decay.dtype)
    return [dx, ddecay, dinitial]


def plan_forward(call: LeakyAverage, target: Target) -> tuple[Tensor, list[Launch]]:
    """y (not filled yet) and the launches that fill it."""
    y = torch.empty(call.x.shape, dtype=call.x.dtype, device=call.x.device)
    arguments = {
        "initial_ptr": call.initial, **strides(call.initial, "i", "bh"), "y_ptr": y, "past_ptr": None, **strides(None, "p", "bnh"),
        "dinitial_ptr": None, "ddecay_ptr": None,
    }  # fmt: skip
    return y, _scan(call, call.x, "scan", arguments, target)[1]


def plan_backward(call: LeakyAverage, y: Tensor, dy: Tensor, needs, target: Target):
    """dx, partial sums of d decay [B, chunks, H, column blocks], dinitial (None where not needed) and the launches."""
    b, _, h, d = call.x.shape
    device, wide = call.x.device, torch.float32
    dx = torch.empty(call.x.shape, dtype=call.x.dtype, device=device) if needs[0] else None
    dinitial = torch.empty((b, h, d), dtype=call.x.dtype, device=device) if needs[2] else None
    tile = _tile(call, "scan_back", target)
    chunks, columns = _chunks(call, tile, target)[1], -(-d // tile.block_n)
    partial = torch.empty((b, chunks, h, columns), dtype=wide, device=device) if needs[1] else None
    initial = call.initial if needs[1] else None  # only d decay reads it
    arguments = {
        "initial_ptr": initial, **strides(initial, "i", "bh"), "y_ptr": dx, "past_ptr": y if needs[1] else None, **strides(y, "p", "bnh"),
        "dinitial_ptr": dinitial, "ddecay_ptr": partial,
    }  # fmt: skip
    return dx, partial, dinitial, _scan(call, dy, "scan_back", arguments, target)[1]


def _tile(call: LeakyAverage, kernel: str, target: Target) -> configs.Tile:
    _, n, _, d = call.x.shape
    return configs.choose(OP, configs.Problem(kernel, call.x.element_size(), power_of_two(d), n, d), target)


def _chunks(call: LeakyAverage, tile: configs.Tile, target: Target) -> tuple[int, int]:
    """(chunk length, chunks): one chunk unless the columns leave the machine idle. A length is a power of two."""
    b, n, h, d = call.x.shape
    programs = b * h * -(-d // tile.block_n)
    want = -(-_WAVES * target.multiprocessors // programs)
    length = max(power_of_two(-(-n // want)), _LEAST_CHUNK, tile.block_m)
    if length >= n:
        length = power_of_two(n, tile.block_m)
    return length, -(-n // length)


def _scan(call: LeakyAverage, x: Tensor, kernel: str, arguments: dict, target: Target) -> tuple[int, list[Launch]]:
    b, n, h, d = x.shape
    tile = _tile(call, kernel, target)
    length, chunks = _chunks(call, tile, target)
    columns = -(-d // tile.block_n)
    common = {
        "x_ptr": x, **strides(x, "x", "bnh"), "decay_ptr": call.decay, "stride_decay": call.decay.stride(0),
        "N": n, "H": h, "column_blocks": columns, "chunk_len": length, "chunks": chunks,
        "D": d, "BLOCK_T": tile.block_m, "BLOCK_C": tile.block_n, "REVERSE": kernel == "scan_back",
        "STAGES": tile.num_stages,
    }  # fmt: skip
    launches, ends = [], None
    if chunks > 1:
        ends = torch.empty((b, chunks, h, d), dtype=torch.float32, device=x.device)
        # nothing reads the end of the last chunk
        grid = (h * columns, chunks - 1, b)
        launches.append(Launch(_leaky_ends_kernel, grid, {**common, "ends_ptr": ends}, tile.num_warps, tile.num_stages))
    scan = {**common, **arguments, "ends_ptr": ends}
    launches.append(Launch(_leaky_scan_kernel, (h * columns, chunks, b), scan, tile.num_warps, tile.num_stages))
    return chunks, launches


def aot_cases(target: Target) -> Iterator[Case]:
    """Every kernel of this op: one sequence that fills the machine by columns, one that needs chunks of time."""
    for name, (b, n, h, d) in {"wide": (16, 2048, 16, 64), "long": (1, 16384, 8, 128)}.items():
        for dtype in KERNEL_DTYPES:
            x, initial = torch.empty((b, n, h, d), dtype=dtype, device="meta"), torch.empty((b, h, d), dtype=dtype, device="meta")
            call = LeakyAverage(x, torch.empty(h, dtype=torch.float32, device="meta"), initial)
            launches = plan_forward(call, target)[1] + plan_backward(call, x, x, (True, True, True), target)[-1]
            for launch in launches:
                yield Case(name, str(dtype).removeprefix("torch."), launch)
