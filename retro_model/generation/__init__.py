"""Sampling from any model here, with retrieval in the loop.

sampling.py          generate; the protocols of a model that decodes and of its cache
chunk_neighbours.py  neighbours of the chunks that complete, checked
"""

from .chunk_neighbours import ChunkNeighbours, Retrieve, check_retrieved
from .sampling import Cache, Decodes, generate, sample

__all__ = ["Cache", "ChunkNeighbours", "Decodes", "Retrieve", "check_retrieved", "generate", "sample"]
