"""Retrieval models on `retro_kernels`: layers, models, generation, data, training and evaluation.

`retro_kernels` computes attention, scores and scans. Tokenisers, indexes, optimisers and the format of checkpoints come
from widely used libraries. Importing this package loads neither torch nor `retro_kernels`; the first use of a name
does.

    base/          argument checks, files and locks, progress
    layers/        modules that the models share: attention, chunked cross-attention, feed-forward, positions
    data/          documents -> tokens -> chunks -> database -> neighbours; deduplication
    retro/         RETRO: configuration, model, cache, encoder; retrofit adds retrieval to a frozen decoder
    memory_mosaics/  Memory Mosaics: contextual and persistent memories in place of attention and feed-forward
    rpt/           RPT: a decoder that retrieves from its own past
    generation/    sampling, with retrieval in the loop
    training/      batches, optimiser, schedule, step, checkpoints
    evaluation/    bits per byte, leakage, control scores, tasks
    parallel/      sequences, documents or heads divided among processes
    integrations/  Hugging Face's libraries, the evaluation harness
    apps/          the commands of `retro-model`: demonstration, page, comparisons
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .generation import generate
    from .layers import ChunkedCrossAttention, FeedForward, RelativeAttention, RelativePositions
    from .memory_mosaics import ContextualMemory, MemoryMosaics, MosaicsCache, MosaicsConfig, PersistentMemory
    from .retro import (
        NeighbourEncoder,
        OwnAttention,
        Retro,
        RetroCache,
        RetroConfig,
        RetrofittedDecoder,
        retrofit,
        swap_retro_pytorch,
    )
    from .rpt import RPT, NeighbourGate, RPTCache, RPTConfig, SelfIndex, SelfRetriever, lambda_rank, retrofit_rpt
    from .training import checkpoint

__all__ = [
    "RPT",
    "ChunkedCrossAttention",
    "ContextualMemory",
    "FeedForward",
    "MemoryMosaics",
    "MosaicsCache",
    "MosaicsConfig",
    "NeighbourEncoder",
    "NeighbourGate",
    "OwnAttention",
    "PersistentMemory",
    "RPTCache",
    "RPTConfig",
    "RelativeAttention",
    "RelativePositions",
    "Retro",
    "RetroCache",
    "RetroConfig",
    "RetrofittedDecoder",
    "SelfIndex",
    "SelfRetriever",
    "checkpoint",
    "generate",
    "lambda_rank",
    "retrofit",
    "retrofit_rpt",
    "swap_retro_pytorch",
]

#: subpackage -> the names above that come from it
_HOMES = {
    "generation": "generate",
    "layers": "ChunkedCrossAttention FeedForward RelativeAttention RelativePositions",
    "memory_mosaics": "ContextualMemory MemoryMosaics MosaicsCache MosaicsConfig PersistentMemory",
    "retro": "NeighbourEncoder OwnAttention Retro RetroCache RetroConfig RetrofittedDecoder "
    "retrofit swap_retro_pytorch",
    "rpt": "RPT NeighbourGate RPTCache RPTConfig SelfIndex SelfRetriever lambda_rank retrofit_rpt",
    "training": "checkpoint",
}
_PACKAGES = ("base", "data", "evaluation", "parallel", *_HOMES)


def __getattr__(name: str):
    """Import a name's subpackage when the name is first used: a command's help needs none of them."""
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    for home, names in _HOMES.items():
        if name in names.split():
            found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{home}"), name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
