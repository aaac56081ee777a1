"""Costs of a decode step on host and device: torch's operations, launches of our kernels, host time.

Models of the papers' depth and little width, within a chunk, with launches that go nowhere (`retro_kernels.testing`).
Operations are those that do something on a GPU: no views, no empty memory. A captured step is the same step as a
function of the device's memory; replayed, it is one launch of a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from . import host

PROMPT, CAPACITY, CHUNK = 65, 256, 64
_NO_WORK = (torch.ops.aten._unsafe_view, torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty)
STEPS = 8  # of those that are timed; the least counts


def measure() -> dict[str, dict[str, float]]:
    """{model: {"operations", "launches", "seconds" of a step, "captured operations", "captured launches"}}."""
    from retro_kernels.testing import stub

    launches: list = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with stub.device(90, launches.append), torch.no_grad():
            return {name: _measured(model, inputs, launches) for name, model, inputs in _models()}
    finally:
        torch.set_num_threads(threads)


def _measured(model: nn.Module, inputs: dict[str, Any], launches: list) -> dict[str, float]:
    cache = model.make_cache(1, CAPACITY)
    token = torch.ones(1, 1, dtype=torch.int64)
    model.last_logits(token.expand(1, PROMPT).contiguous(), cache=cache, **inputs)

    def plain() -> None:
        model(token, cache=cache)

    operations, made = _counted(plain, launches)
    least = min(host.once(plain) for _ in range(STEPS))
    step = model.decode_step(cache)
    way = step.begin()
    step.run(way)
    captured, captured_made = _counted(lambda: step.run(way), launches)
    return {
        "operations": operations,
        "launches": made,
        "seconds": least,
        "captured operations": captured,
        "captured launches": captured_made,
    }


class _Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        views = any(
            argument.alias_info is not None and not argument.alias_info.is_write
            for argument in operation._schema.returns
        )
        if operation.namespace != "retro_kernels" and not views and operation.overloadpacket not in _NO_WORK:
            self.count += 1
        return operation(*args, **(kwargs or {}))


def _counted(step: Callable[[], Any], launches: list) -> tuple[int, int]:
    step()
    launches.clear()
    with _Counting() as counting:
        step()
    return counting.count, len(launches)


def _models() -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
    from retro_model import RPT, MemoryMosaics, MosaicsConfig, Retro, RetroConfig, RPTConfig

    width = {"vocab_size": 64, "d_model": 64, "num_heads": 4}
    retro = RetroConfig(
        **width,
        d_ff=64,
        head_dim=16,
        num_layers=12,
        cca_layers=(6, 9, 12),
        chunk_len=CHUNK,
        encoder_d_model=32,
        encoder_d_ff=32,
        encoder_heads=2,
        encoder_head_dim=16,
        max_len=CAPACITY,
    )
    neighbours = torch.ones(1, PROMPT // CHUNK, 2, 2 * CHUNK, dtype=torch.int64)
    made = (
        ("RETRO, 12 layers, 3 with cross-attention", Retro(retro), {"neighbours": neighbours}),
        ("RETRO off, 12 layers", Retro(retro.replace(cca_layers=())), {}),
        ("Memory Mosaics, 12 blocks", MemoryMosaics(MosaicsConfig(**width, num_layers=12, persistent_slots=64)), {}),
        ("RPT, 12 layers, 5 with cross-attention", RPT(RPTConfig(**width, d_ff=64, num_layers=12)), {}),
    )
    for name, model, inputs in made:
        yield name, model.to(torch.bfloat16).eval(), inputs
