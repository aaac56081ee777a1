"""How much of an evaluation text the training text holds, and bits-per-byte by that share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .scoring import Scores, bits_per_byte

#: Of each evaluation chunk, this many nearest training neighbours are searched for what it shares with them (section 2.6).
LEAKAGE_NEIGHBOURS = 10
#: Tokens of a neighbour that are looked at (section 2.6).
LEAKAGE_LENGTH = 128


def leakage(store, neighbours: np.ndarray, database, *, length: int = LEAKAGE_LENGTH, block: int = 4096) -> np.ndarray:
    """r(C) of every chunk: its longest token substring that one of its nearest training neighbours has too, over its own length.

    neighbours: int64 [num_chunks, >= 1], nearest first; the first LEAKAGE_NEIGHBOURS of them count (-1: none). length: tokens of
    a neighbour that are looked at. block: chunks at a time.
    Returns: float64 [num_chunks] between 0 (nothing seen) and 1 (all of it seen).
    Source: section 2.6 of arXiv 2112.04426.
    """
    from retro_model.data.text import longest_common_substrings

    neighbours, lengths = np.asarray(neighbours), np.asarray(store.lengths)
    if neighbours.ndim != 2 or len(neighbours) != len(lengths) or not neighbours.shape[1]:
        raise ValueError(f"neighbours must be [{len(lengths)}, K] with K >= 1, got {list(neighbours.shape)}")
    shared = np.zeros(len(lengths), np.int64)
    for at in range(0, len(lengths), block):
        rows = slice(at, at + block)
        values, mask = (np.asarray(a)[..., :length] for a in database.values(neighbours[rows, :LEAKAGE_NEIGHBOURS]))
        shared[rows] = longest_common_substrings(np.asarray(store.tokens[rows]), values, lengths=lengths[rows], source_mask=mask)
    return shared / np.maximum(lengths, 1)


def curve(scores: Scores, leakage: np.ndarray, alphas: Sequence[float] = tuple(i / 8 for i in range(9))) -> list[tuple[float, float]]:
    """(alpha, bpb(alpha)) for each alpha, as in Figure 6 of arXiv 2112.04426."""
    return [(float(a), bits_per_byte(scores, leakage, a)) for a in alphas]
