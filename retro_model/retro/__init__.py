"""RETRO (arXiv 2112.04426): a decoder that attends the neighbours of the chunks before each token.

config.py    RetroConfig, the presets of Table 2 and its parameter accounting
encoder.py   NeighbourEncoder
recurring.py what it computes once of neighbours that recur
model.py     Retro, the decoder with its encoder
cache.py     what it keeps while it decodes
inputs.py    what every model checks of its tokens and neighbours
retrofit.py  adds CCA and an encoder to a frozen decoder
adapters.py  swaps another package's CCA for ours
copying.py   the weights that a small model starts with
"""

from .adapters import swap_retro_pytorch
from .cache import RetroCache
from .config import RetroConfig
from .encoder import NeighbourEncoder
from .model import Retro
from .retrofit import retrofit
from .retrofitted_decoder import RetrofittedDecoder

__all__ = [
    "NeighbourEncoder",
    "Retro",
    "RetroCache",
    "RetroConfig",
    "RetrofittedDecoder",
    "retrofit",
    "swap_retro_pytorch",
]
