"""RETRO (arXiv 2112.04426): a decoder in which each token attends the neighbours of the chunk before it.

config.py    RetroConfig, the presets of Table 2 and its parameter accounting
encoder.py   NeighbourEncoder
recurring.py cache of encodings of neighbours that recur
model.py     Retro, the decoder with its encoder
retrieval.py neighbours within one call; step.py within one decode step
cache.py     RetroCache
inputs.py    checks of tokens and neighbours
retrofit.py  retrieval for a decoder that is trained already
frozen_decoder.py       base of its two forms: calls, padding, caches, losses
retrofitted_decoder.py  "new": chunked cross-attentions and an encoder are added
own_attention.py        "own": the decoder reads and attends neighbours by itself
own_pass.py             a pass through its layers
attention_hook.py       calls into the attention of those layers
adapters.py  swaps another package's CCA for ours
copying.py   initial weights that copy, for small models
"""

from .adapters import swap_retro_pytorch
from .cache import RetroCache
from .config import RetroConfig
from .encoder import NeighbourEncoder
from .model import Retro
from .own_attention import OwnAttention
from .retrofit import retrofit
from .retrofitted_decoder import RetrofittedDecoder

__all__ = ["NeighbourEncoder", "OwnAttention", "Retro", "RetroCache", "RetroConfig", "RetrofittedDecoder", "retrofit"]
__all__ += ["swap_retro_pytorch"]
