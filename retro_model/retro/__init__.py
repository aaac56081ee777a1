"""RETRO (arXiv 2112.04426): a decoder in which each token attends the neighbours of the chunk before it.

config.py       RetroConfig; encoder.py NeighbourEncoder; model.py Retro; cache.py RetroCache
inputs.py       checks of tokens and neighbours
retrieval.py    neighbours within one call; step.py within one decode step; recurring.py those that recur, kept
retrofit.py     retrieval for a decoder that is trained already; frozen_decoder.py base of its two forms
retrofitted_decoder.py  "new": chunked cross-attentions and an encoder are added
own_attention.py        "own": the decoder reads and attends neighbours; own_pass.py its passes
adapters.py     swaps another package's CCA for ours; copying.py initial weights that copy, for small models
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
