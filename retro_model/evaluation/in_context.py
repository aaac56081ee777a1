"""In-context retrieval: neighbours written in front of the text, for a decoder without retrieval; and
random neighbours, the control of everything that retrieves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from retro_model.training import Batch, batch_loss, check_neighbours, visible

from .decoders import as_ours
from .scoring import Job, Scores, batches_of_windows, check_sizes, counted_scores, document_rows, evaluating


def random_neighbours(neighbours: np.ndarray, database, seed: int = 0) -> np.ndarray:
    """Make the control of retrieval: as many neighbours for every chunk, drawn from the whole database.

    A model that scores the same with these has learnt the domain or gained a longer input; it looks nothing up.

    neighbours: ids, -1: none, which stays. Returns: int64 of the same shape.
    """
    neighbours = np.asarray(neighbours)
    drawn = np.random.default_rng(seed).integers(len(database), size=neighbours.shape)
    return np.where(neighbours < 0, -1, drawn)


def exchanged_neighbours(neighbours: np.ndarray, store, database, seed: int = 0) -> np.ndarray:
    """Make the control: exchange the neighbours of each document for the neighbours of other documents.

    The new neighbours are drawn at random from the other documents' neighbours, so a store of neighbour states holds
    them already. A neighbour that the document's own chunks have is never drawn.

    A document whose neighbours no other adds to has random chunks of the database. neighbours: ids, -1: none, which
    stays. Returns: int64 of the same shape.
    """
    neighbours, owner = np.asarray(neighbours), np.asarray(store.chunk_doc)
    drawn, random = np.full(neighbours.shape, -1, np.int64), np.random.default_rng(seed)
    for first, end in document_rows(store):
        mine = neighbours[first:end]
        others = np.setdiff1d(neighbours[owner != owner[first]], np.append(mine, -1))
        drawn[first:end] = random.choice(others if len(others) else len(database), size=mine.shape)
    return np.where(neighbours < 0, -1, drawn)


@torch.no_grad()
def score_in_context(
    decoder: nn.Module,
    store,
    neighbours: np.ndarray,
    database,
    *,
    window: int,
    stride: int,
    k: int = 2,
    batch_size: int = 8,
    documents: Sequence[int] | None = None,
    report: Callable[[int, int], None] | None = None,
) -> Scores:
    """Score like `score`, by a decoder that reads passages before its window. Every `stride` tokens it starts again:

        nearest neighbour, its continuation, second neighbour, ..., the last `window` tokens, of them `stride` new ones

    The passages are the neighbours of the chunk before the new tokens; a document's first tokens have none. Each call
    reads (window + passages) tokens for `stride` scored ones: retrieval after every chunk costs many times `score`.

    decoder: of the Hugging Face library, or ours; a retrofit runs with retrieval off. neighbours: int64 [num_chunks,
    K], ids of `database` (-1: none); the first k are read. Other arguments: see `score`.
    Raises: ValueError naming the argument.
    Source: Ram et al., arXiv 2302.00083 (one passage there; k here).
    """
    check_sizes(store, window, stride, batch_size)
    check_neighbours(store, neighbours, database, k)
    model, m = as_ours(decoder), store.chunk_len
    passages = k * database.values(np.full(1, -1))[0].shape[-1]
    longest = getattr(model.config, "max_position_embeddings", None) or getattr(model.config, "max_len", None)
    if longest is not None and window + passages > longest:
        room = f"{passages} of {k} neighbours fit before it in the decoder's {longest} positions"
        raise ValueError(f"window: expected at most {longest - passages} tokens, so that {room}; got {window}")
    nats, vocab_size = np.zeros(len(store.lengths)), 1
    spans = functools.partial(_spans, window=window // m, stride=stride // m)
    with evaluating(model) as device:
        for jobs in batches_of_windows(store, documents, batch_size, spans, report):
            passages = _passages(store, jobs, neighbours[:, :k], database)
            batch, begins = _batch(store, jobs, passages)
            (_, losses), vocab_size = batch_loss(model, batch.to(device))
            for job, begin, costs in zip(jobs, begins, torch.nn.functional.pad(losses.double(), (1, 0))):
                new = costs[begin : begin + (job.end - job.scored) * m].view(-1, m)
                nats[job.scored : job.end] = new.sum(-1).cpu().numpy()
    return counted_scores(store, nats, vocab_size, documents)


def _spans(chunks: int, window: int, stride: int) -> list[tuple[int, int, int]]:
    """Return (first, end, first_scored) of each `stride` chunks, with the `window` chunks that end with them."""
    ends = [(begin, min(begin + stride, chunks)) for begin in range(0, chunks, stride)]
    return [(max(0, end - window), end, begin) for begin, end in ends]


def _passages(store, jobs: Sequence[Job], neighbours: np.ndarray, database) -> list[np.ndarray]:
    """Return the tokens of the neighbours that each job reads, one after the other."""
    before = np.array([job.scored - 1 if job.scored > job.first else -1 for job in jobs])
    values, mask = database.values(visible(store, before[:, None], neighbours, database)[:, 0])
    return [np.asarray(value)[np.asarray(real)] for value, real in zip(values, mask)]


def _batch(store, jobs: Sequence[Job], passages: Sequence[np.ndarray]) -> tuple[Batch, list[int]]:
    """Return rows of passages and window, padded on the right, real at new tokens; and each row's first new column."""
    m = store.chunk_len
    begins = [len(passage) + (job.scored - job.first) * m for job, passage in zip(jobs, passages)]
    columns = max(begin + (job.end - job.scored) * m for job, begin in zip(jobs, begins))
    tokens, real = np.zeros((len(jobs), columns), np.int64), np.zeros((len(jobs), columns), bool)
    for row, (job, passage, begin) in enumerate(zip(jobs, passages, begins)):
        end = begin + int(store.lengths[job.scored : job.end].sum())
        text = np.asarray(store.tokens[job.first : job.end]).reshape(-1)
        tokens[row, :end] = np.concatenate([passage, text])[:end]
        real[row, begin:end] = True
    return Batch(torch.from_numpy(tokens), torch.from_numpy(real)), begins
