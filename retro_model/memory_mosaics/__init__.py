"""Memory Mosaics (arXiv 2405.06394): networks of associative memories instead of attention and feed-forward.

config.py             MosaicsConfig and the paper's presets
contextual_memory.py  ContextualMemory, PersistentMemory: stand-alone modules
model.py              MemoryMosaics, the language model
cache.py              MosaicsCache
inspection.py         predictions, attention and decay of each contextual memory
"""

from .cache import MosaicsCache
from .config import MosaicsConfig
from .contextual_memory import ContextualMemory, PersistentMemory
from .model import MemoryMosaics

__all__ = ["ContextualMemory", "MemoryMosaics", "MosaicsCache", "MosaicsConfig", "PersistentMemory"]
