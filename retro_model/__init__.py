"""Retrieval models on `retro_kernels`: layers, models, generation, data, training and evaluation.

`retro_kernels` computes attention, scores and scans. Tokenisers, indexes, optimisers and the format of checkpoints come
from widely used libraries. Importing this package loads neither torch nor `retro_kernels`; the first use of a name
does.

    base/          argument checks, files and locks, progress
    layers/        modules that the models share: attention, chunked cross-attention, feed-forward, positions
    data/          documents -> tokens -> chunks -> database -> neighbours; deduplication
    retro/         RETRO: configuration, model, cache, encoder
    memory_mosaics/  Memory Mosaics: associative memories instead of attention and feed-forward layers
    rpt/           RPT: a decoder that retrieves from its own past
    retrofit/      retrieval for a decoder that is trained already
    generation/    sampling, with retrieval in the loop
    training/      batches, optimiser, schedule, step, checkpoints
    evaluation/    bits per byte, leakage, control scores, tasks
    parallel/      sequences, documents or heads divided among processes
    folders/       model folders and readings of texts with them
    integrations/  Hugging Face's libraries, the evaluation harness
    commands/      the commands of `retro-model`
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .generation import generate
    from .integrations.retro_pytorch import swap_retro_pytorch
    from .layers import ChunkedCrossAttention, FeedForward, RelativeAttention, RelativePositions
    from .memory_mosaics import ContextualMemory, MemoryMosaics, MosaicsCache, MosaicsConfig, PersistentMemory
    from .retro import NeighbourEncoder, Retro, RetroCache, RetroConfig
    from .retrofit import OwnAttention, RetrofittedDecoder, retrofit, retrofit_rpt
    from .rpt import RPT, NeighbourGate, RPTCache, RPTConfig, SelfIndex, SelfRetriever, lambda_rank
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
    "retro": "NeighbourEncoder Retro RetroCache RetroConfig",
    "retrofit": "OwnAttention RetrofittedDecoder retrofit retrofit_rpt",
    "rpt": "RPT NeighbourGate RPTCache RPTConfig SelfIndex SelfRetriever lambda_rank",
    "training": "checkpoint",
    "integrations.retro_pytorch": "swap_retro_pytorch",
}
_PACKAGES = ("base", "data", "evaluation", "parallel", *(home for home in _HOMES if "." not in home))


def __getattr__(name: str):
    """Import a name's subpackage when the name is first used: a command's help needs none of them."""
    for home, names in _HOMES.items():
        if name in names.split():
            found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{home}"), name)
            return found
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Names(types.ModuleType):
    """Module whose attribute `retrofit` is the function, although importing a subpackage sets an attribute of its name.

    `from retro_model.retrofit import ...` reaches the subpackage.
    """

    def __setattr__(self, name: str, value) -> None:
        is_package = name == "retrofit" and isinstance(value, types.ModuleType)
        super().__setattr__(name, value.retrofit if is_package else value)


sys.modules[__name__].__class__ = _Names


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
