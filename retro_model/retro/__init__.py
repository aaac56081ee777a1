"""RETRO (arXiv 2112.04426): a decoder in which each token attends the neighbours of the chunk before it.

config.py       RetroConfig; encoder.py NeighbourEncoder; model.py Retro; cache.py RetroCache
inputs.py       checks of tokens and neighbours
retrieval.py    neighbours within one call; reading_cache.py those that recur, cached
"""

from .cache import RetroCache
from .config import RetroConfig
from .encoder import NeighbourEncoder
from .model import Retro

__all__ = ["NeighbourEncoder", "Retro", "RetroCache", "RetroConfig"]
