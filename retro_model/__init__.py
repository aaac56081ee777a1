"""RETRO on `retro_kernels`: configuration, layers, the model, retrofit, generation, retrieval, training and evaluation.

Attention, scoring and scans go through `retro_kernels`; tokenisers, indexes, optimisers and checkpoints are the
libraries people already use. Importing this package loads torch and `retro_kernels` and nothing else.

    config.py       RetroConfig, the presets of Table 2 and its parameter accounting
    layers.py       RelativePositions, RelativeAttention, ChunkedCrossAttention, FeedForward: stand-alone modules
    encoder.py      NeighbourEncoder
    inputs.py       what every model checks of its tokens and neighbours
    retro.py        Retro, the decoder with its encoder; cache.py what it keeps while decoding; generation.py sampling
    retrofit.py     adds CCA and an encoder to a frozen decoder; adapters.py swaps another package's CCA for ours
    training.py     optimiser, schedule, training step; checkpoint.py saves and resumes exactly
    data/           documents -> tokens -> chunks -> database -> neighbours; deduplication
    evaluation.py   bits-per-byte, leakage, bits-per-byte by leakage; colouring.py samples coloured by longest common prefix
    demo.py         all of it on the sources of Python's standard library; demo_plan.py its sizes, demo_corpus.py its data
    copying.py      the weights that a small model starts with
"""

from .adapters import swap_retro_pytorch
from .cache import RetroCache
from .config import RetroConfig
from .encoder import NeighbourEncoder
from .generation import generate
from .layers import ChunkedCrossAttention, FeedForward, RelativeAttention, RelativePositions
from .retro import Retro
from .retrofit import RetrofittedDecoder, retrofit

__all__ = [
    "ChunkedCrossAttention",
    "FeedForward",
    "NeighbourEncoder",
    "RelativeAttention",
    "RelativePositions",
    "Retro",
    "RetroCache",
    "RetroConfig",
    "RetrofittedDecoder",
    "generate",
    "retrofit",
    "swap_retro_pytorch",
]
