"""Share of an evaluation text that the training text holds."""

from __future__ import annotations

import numpy as np

#: Nearest training neighbours of an evaluation chunk that are searched for shared tokens (section 2.6).
LEAKAGE_NEIGHBOURS = 10
#: Tokens of a neighbour that are looked at (section 2.6).
LEAKAGE_LENGTH = 128


def leakage(store, neighbours: np.ndarray, database, *, length: int = LEAKAGE_LENGTH, block: int = 4096) -> np.ndarray:
    """r(C) of every chunk: its longest token substring that a nearest training neighbour has too, over its own length.

    neighbours: int64 [num_chunks, >= 1], nearest first; the first LEAKAGE_NEIGHBOURS of them count (-1: none). length:
    tokens of a neighbour that are looked at. block: chunks at a time.
    Returns: float64 [num_chunks] between 0 (nothing seen) and 1 (all of it seen).
    Source: section 2.6 of arXiv 2112.04426.
    """
    from retro_model.data.text import longest_common_substrings

    neighbours, lengths = np.asarray(neighbours), np.asarray(store.lengths)
    if neighbours.ndim != 2 or len(neighbours) != len(lengths) or not neighbours.shape[1]:
        raise ValueError(f"neighbours: expected [{len(lengths)}, K] with K >= 1; got {list(neighbours.shape)}")
    shared = np.zeros(len(lengths), np.int64)
    for at in range(0, len(lengths), block):
        rows = slice(at, at + block)
        values, mask = (np.asarray(a)[..., :length] for a in database.values(neighbours[rows, :LEAKAGE_NEIGHBOURS]))
        chunks, options = np.asarray(store.tokens[rows]), {"lengths": lengths[rows], "source_mask": mask}
        shared[rows] = longest_common_substrings(chunks, values, **options)
    return shared / np.maximum(lengths, 1)
