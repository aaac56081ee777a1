"""RETRO (arXiv 2112.04426): a decoder that attends the neighbours of the chunks before each token.

config.py    RetroConfig, the presets of Table 2 and its parameter accounting
encoder.py   NeighbourEncoder
recurring.py what it computes once of neighbours that recur
model.py     Retro, the decoder with its encoder
cache.py     what it keeps while it decodes
inputs.py    what every model checks of its tokens and neighbours
retrofit.py  retrieval for a decoder that is trained already
frozen_decoder.py       its two forms' common ground: calls, padding, caches, losses
retrofitted_decoder.py  "new": chunked cross-attentions and an encoder are added
own_attention.py        "own": the decoder reads and attends neighbours by itself
own_pass.py             what its layers do in a pass
attention_hook.py       how they are called there
adapters.py  swaps another package's CCA for ours
copying.py   the weights that a small model starts with
"""

from .adapters import swap_retro_pytorch
from .cache import RetroCache
from .config import RetroConfig
from .encoder import NeighbourEncoder
from .model import Retro
from .own_attention import OwnAttention
from .retrofit import retrofit
from .retrofitted_decoder import RetrofittedDecoder

__all__ = [
    "NeighbourEncoder",
    "OwnAttention",
    "Retro",
    "RetroCache",
    "RetroConfig",
    "RetrofittedDecoder",
    "retrofit",
    "swap_retro_pytorch",
]
