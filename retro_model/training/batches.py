"""Batches of chunk rows with their neighbours, and an endless stream of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from retro_model.base import transfer
from retro_model.base.checks import RETRIEVED


@dataclass(frozen=True)
class Batch:
    """Windows of consecutive chunk rows and the neighbours of each chunk.

    tokens: int64 [B, N]. real: bool [B, N], False on padding and on other tokens without a loss.
    neighbours: int64 [B, L, K, R] or None. neighbour_mask: bool [B, L, K, R] or None.
    segment: int64 [B, N] or None, the document of each token in a packed row, for models that take it.
    """

    tokens: Tensor
    real: Tensor
    neighbours: Tensor | None = None
    neighbour_mask: Tensor | None = None
    segment: Tensor | None = None

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Arguments of a model call: `tokens` and the others that are not None."""
        given = {name: getattr(self, name) for name in ("tokens", "segment", *RETRIEVED)}
        return {name: tensor for name, tensor in given.items() if tensor is not None}

    @property
    def counted(self) -> Tensor:
        """Mask of the tokens that a loss counts, bool [B,N-1]: real ones, without the first of a window."""
        return self.real[:, 1:]

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on `device`."""
        sent = {name: transfer.send(t, device) for name, t in vars(self).items() if isinstance(t, Tensor)}
        return dataclasses.replace(self, **sent)


def check_neighbours(store, neighbours: np.ndarray | None, database, k: int | None = None) -> None:
    """Raise ValueError unless both neighbours and database are given, one row for each chunk of the store, or none.

    k: neighbours that are read of each row; None: all.
    """
    if (neighbours is None) != (database is None):
        raise ValueError("neighbours, database: expected both or neither; got one of them")
    if neighbours is not None and (np.ndim(neighbours) != 2 or len(neighbours) != len(store.lengths)):
        want = f"[{len(store.lengths)}, K], one row for each chunk"
        raise ValueError(f"neighbours: expected {want}; got {list(np.shape(neighbours))}")
    if k is not None and (neighbours is None or not 1 <= k <= neighbours.shape[1]):
        most = 0 if neighbours is None else neighbours.shape[1]
        raise ValueError(f"k: expected from 1 to the neighbours' K={most}; got {k}")


def gather(
    store,
    rows: np.ndarray,
    neighbours: np.ndarray | None = None,
    database=None,
    *,
    k: int | None = None,
) -> Batch:
    """Return the batch of chunk rows `rows` of `store`: int64 [B, L], -1 for a row of padding.

    neighbours: int64 [num_chunks, K], ids in `database`, a `ChunkDatabase`, of the neighbours of each chunk of the
    store; -1: none. None: retrieval is off.
    k: keep the k nearest of the neighbours that the window may see (`visible`); None: all.
    Returns: a Batch with N = L * store.chunk_len.
    """
    rows = np.asarray(rows)
    there, safe = rows >= 0, np.maximum(rows, 0)
    lengths = np.where(there, store.lengths[safe], 0)
    real = np.arange(store.chunk_len) < lengths[..., None]  # [B, L, M]
    tokens = np.where(real, np.asarray(store.tokens[safe]), 0).astype(np.int64)
    flat = [torch.from_numpy(a.reshape(len(rows), -1)) for a in (tokens, real)]
    if neighbours is None:
        return Batch(*flat)
    ids = visible(store, rows, neighbours, database)
    if k is not None:
        ids = np.take_along_axis(ids, np.argsort(ids < 0, axis=-1, kind="stable")[..., :k], -1)
    return Batch(*flat, *(torch.as_tensor(array) for array in database.values(ids)))


def visible(store, rows: np.ndarray, neighbours: np.ndarray, database) -> np.ndarray:
    """Return the neighbours of windows of chunk rows, without neighbours from a document in the window.

    The search has left out each chunk's own document. But a window may hold several documents: a neighbour from the
    next one would show text that the window still has to predict.

    rows: int64 [B, L]; -1 is padding. neighbours: int64 [num_chunks, K]. database: a `ChunkDatabase`; its
    `documents_of` says which of its documents are the store's.
    Returns: int64 [B, L, K], -1 where there is none or it must not be seen.
    Source: section 2.3 of arXiv 2112.04426 (the document of the training sequence is filtered out).
    """
    there, safe = rows >= 0, np.maximum(rows, 0)
    ids = np.where(there[..., None], np.asarray(neighbours[safe]), -1)
    inside = np.where(there, database.documents_of(store)[store.chunk_doc[safe]], -1)  # [B, L]
    shown = (database.document_of(ids)[..., None] == inside[:, None, None, :]).any(-1)
    return np.where(shown, -1, ids)


def batches(
    store,
    *,
    window: int,
    batch_size: int,
    seed: int,
    neighbours: np.ndarray | None = None,
    database=None,
    k: int | None = None,
    starts: np.ndarray | None = None,
    start: int = 0,
    every: int = 1,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[Batch]:
    """Iterate over batches forever. A batch is a pure function of (store, window, batch_size, seed) and its position.

    An epoch cuts the store into windows of `window` tokens from a random first row, and visits them in random order.
    Process `rank` of `world_size` takes its share of each batch; the whole batch does not depend on their number.

    window: tokens, a multiple of the chunk length. batch_size: windows of a batch, over all processes.
    starts: first rows of the windows to draw from; None: all. start: position to begin at, the batches already taken.
    every: take only each `every`-th batch. neighbours, database, k: see `gather`.
    Raises: ValueError if the store is smaller than a batch, or sizes do not divide.
    """
    per_window, left = divmod(window, store.chunk_len)
    if window < 1 or left:
        raise ValueError(f"window: expected a positive multiple of the chunk length ({store.chunk_len}); got {window}")
    if batch_size < 1 or batch_size % world_size:
        raise ValueError(f"batch_size: expected a positive multiple of world_size ({world_size}); got {batch_size}")
    if start < 0 or every < 1:
        raise ValueError(f"start and every: expected at least 0 and 1; got {start} and {every}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank: expected 0 to world_size - 1 = {world_size - 1}; got {rank}")
    check_neighbours(store, neighbours, database, k)
    rows = len(store.lengths)
    if starts is None:
        # one window less than fits: an epoch may then start at any row of the first window and has the same length
        firsts, shift = np.arange(max(0, rows // per_window - 1)) * per_window, per_window
    else:
        firsts, shift = np.asarray(starts), 1
        if firsts.ndim != 1 or (len(firsts) and (firsts.min() < 0 or firsts.max() > rows - per_window)):
            raise ValueError(f"starts: expected rows from 0 to {rows - per_window}; got shape {list(firsts.shape)}")
    if len(firsts) < batch_size:
        want = f"at least {batch_size} windows of {per_window} chunks, and one more"
        raise ValueError(f"store: expected {want}; got {rows} chunks")

    def stream() -> Iterator[Batch]:
        epoch, per_epoch = -1, len(firsts) // batch_size
        for position in itertools.count(start, every):
            if position // per_epoch != epoch:
                epoch = position // per_epoch
                random = np.random.default_rng([seed, epoch])
                first_row = int(random.integers(shift))
                order = random.permutation(len(firsts))
            at = position % per_epoch * batch_size
            mine = firsts[order[at : at + batch_size][rank::world_size]]
            rows = first_row + mine[:, None] + np.arange(per_window)
            yield gather(store, rows, neighbours, database, k=k)

    return stream()  # a generator of its own: the checks above run at the call
