"""Memory Mosaics (arXiv 2405.06394): networks of associative memories in place of attention and feed-forward.

config.py   MosaicsConfig and the paper's presets
memory.py   ContextualMemory, PersistentMemory: stand-alone modules
model.py    MemoryMosaics, the language model
cache.py    its state while it decodes
"""

from .cache import MosaicsCache
from .config import MosaicsConfig
from .memory import ContextualMemory, PersistentMemory
from .model import MemoryMosaics

__all__ = ["ContextualMemory", "MemoryMosaics", "MosaicsCache", "MosaicsConfig", "PersistentMemory"]
