"""Share of an evaluation text that the training text holds; training windows that see ahead."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from retro_model.training import visible

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


class WindowLeaks(NamedTuple):
    """Shares of the windows in which a neighbour leaks.

    own: windows in which a chunk has a neighbour from one of the window's own documents. ahead: windows in which such a
    neighbour, or its continuation, is a chunk that the window still has to predict.
    """

    own: float
    ahead: float


def window_leaks(store, neighbours: np.ndarray, database, *, window: int, filtered: bool = True) -> WindowLeaks:
    """Share of training windows that would see their own future, for windows cut one after another from the store.

    store: the database's own. neighbours: int64 [num_chunks, K]. filtered: with the neighbours that `training.gather`
    shows; else with those that the search gave, which leaves out each chunk's own document alone.
    """
    per_window = window // store.chunk_len
    rows = np.arange(0, len(store.lengths) - per_window + 1, per_window)[:, None] + np.arange(per_window)
    ids = visible(store, rows, neighbours, database) if filtered else np.asarray(neighbours[rows])  # [W, L, K]
    documents, owners = np.asarray(store.chunk_doc[rows]), database.document_of(ids)
    own = (owners[..., None] == documents[:, None, None, :]).any(-1)
    last, here = rows[:, -1, None, None], rows[..., None]
    follows = np.minimum(ids + 1, len(store.lengths) - 1)
    ahead = (ids > here) & (ids <= last)
    ahead |= (follows > here) & (follows <= last) & (np.asarray(store.chunk_doc[follows]) == owners)
    return WindowLeaks(*(float((own & part & (ids >= 0)).any((1, 2)).mean()) for part in (np.True_, ahead)))
