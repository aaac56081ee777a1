"""Negative log-likelihood of whole documents in overlapping windows, and the bits-per-byte it makes."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from retro_model.base import checks
from retro_model.data.tokens import BOS
from retro_model.retrofit import OwnAttention
from retro_model.training import AUTOCAST, batch_loss, check_neighbours, gather

from .decoders import as_ours, check_takes_neighbours


@dataclass(frozen=True)
class Scores:
    """Loss on each chunk: nats float64, scored tokens int64, bytes int64; all [num_chunks], zero where not scored."""

    nats: np.ndarray
    tokens: np.ndarray
    bytes: np.ndarray


def windows(chunks: int, window: int, stride: int) -> list[tuple[int, int, int]]:
    """Windows over a document, all in chunks: (first, end, first_scored), with each chunk scored once.

    Windows start every `stride` chunks. The first window that holds a chunk scores it: it has the most context.

        windows(5, 3, 1) == [(0, 3, 0), (1, 4, 3), (2, 5, 4)]
    """
    spans, scored = [], 0
    for first in range(0, chunks, stride):
        end = min(first + window, chunks)
        spans.append((first, end, scored))
        scored = end
        if end == chunks:
            break
    return spans


def document_rows(store, documents: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """First and end row of each document, in order. documents: ordinals, None: all; ValueError for others."""
    owner = np.asarray(store.chunk_doc)
    cuts = (np.flatnonzero(np.diff(owner)) + 1).tolist()
    rows = list(itertools.pairwise([0, *cuts, len(owner)])) if len(owner) else []
    if wrong := [d for d in (() if documents is None else documents) if not 0 <= d < len(rows)]:
        raise ValueError(f"documents: expected ordinals from 0 to {len(rows) - 1}; got {wrong}")
    return rows if documents is None else [rows[d] for d in documents]


class Job(NamedTuple):
    """Window in rows of the store: [first, end) is read, of it [scored, end) is scored."""

    first: int
    end: int
    scored: int


def check_sizes(owner, window: int, stride: int, batch_size: int) -> None:
    """Raise ValueError, naming the argument, for windows that can't be scored. owner: has chunk_len, as a store has."""
    m = owner.chunk_len
    for name, value in (("window", window), ("stride", stride)):
        if value < 1 or value % m:
            raise ValueError(f"{name}: expected a positive multiple of the chunk length ({m}); got {value}")
    if stride >= window:
        want = f"less than window ({window}), so that every scored token has context"
        raise ValueError(f"stride: expected {want}; got {stride}")
    checks.integer("batch_size", batch_size, low=1)


def batches_of_windows(
    store,
    documents: Sequence[int] | None,
    batch_size: int,
    spans: Callable[[int], list[tuple[int, int, int]]],
    report: Callable[[int, int], None] | None = None,
) -> Iterator[list[Job]]:
    """Yield the windows of some documents, windows of like length together, so that little is padding.

    documents: ordinals, None: all. spans: chunks of a document -> its `windows`. report: takes (chunks done, all).
    """
    rows = document_rows(store, documents)
    jobs = [Job(*(a + at for at in span)) for a, b in rows for span in spans(b - a)]
    jobs.sort(key=lambda job: job.end - job.first)
    done, whole = 0, sum(b - a for a, b in rows)
    for at in range(0, len(jobs), batch_size):
        part = jobs[at : at + batch_size]
        yield part
        done += sum(job.end - job.scored for job in part)
        if report is not None:
            report(done, whole)


def padded_rows(jobs: Sequence[Job]) -> np.ndarray:
    """Return the rows that jobs read, int64 [jobs, longest]; -1 is padding."""
    rows = np.full((len(jobs), max(job.end - job.first for job in jobs)), -1)
    for i, job in enumerate(jobs):
        rows[i, : job.end - job.first] = np.arange(job.first, job.end)
    return rows


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[torch.device]:
    """Set evaluation mode within the context. Keep encodings of neighbours, which overlapping windows retrieve again,
    unless the caller does. Yields the model's device."""
    with contextlib.ExitStack() as stack:
        stack.callback(model.train, model.training)
        model.eval()
        for module in model.modules():
            if isinstance(module, OwnAttention) and not module.keeps:
                stack.enter_context(module.keeping())
        yield next(model.parameters(), torch.empty(0)).device


@torch.no_grad()
def score(
    model: nn.Module,
    store,
    neighbours: np.ndarray | None = None,
    database=None,
    *,
    window: int,
    stride: int,
    batch_size: int = 8,
    documents: Sequence[int] | None = None,
    autocast: str | None = None,
    report: Callable[[int, int], None] | None = None,
) -> Scores:
    """Negative log-likelihood of every token of the store's documents, once, with the most context a window gives.

    model: ours, any other of `training.Predicts`, a causal decoder of the Hugging Face library, or a retrofit of one.
    A window never leaves its document. The first token of a document has no context: BOS is free, any other costs
    log(vocab_size), as a uniform code would, for every model alike. Padding is not scored.

    window, stride: tokens, multiples of the chunk length, stride < window (the paper: 2048 and 1024). neighbours: int64
    [num_chunks, K], ids of `database` (-1: none); None evaluates with retrieval off. documents: ordinals (in the
    store's order) to score, all by default. report: called with (chunks done, chunks in all).
    Returns: Scores.
    Raises: ValueError naming the argument.
    Source: section 4.1 of arXiv 2112.04426.
    """
    check_sizes(store, window, stride, batch_size)
    check_neighbours(store, neighbours, database)
    if autocast not in AUTOCAST:
        raise ValueError(f"autocast: expected one of {AUTOCAST}; got {autocast!r}")
    model, m = as_ours(model), store.chunk_len
    check_takes_neighbours(model, neighbours)
    nats, vocab_size = np.zeros(len(store.lengths)), 1
    spans = functools.partial(windows, window=window // m, stride=stride // m)
    with evaluating(model) as device:
        for jobs in batches_of_windows(store, documents, batch_size, spans, report):
            batch = gather(store, padded_rows(jobs), neighbours, database).to(device)
            dtype = getattr(torch, autocast or "bfloat16")
            with torch.autocast(device.type, dtype=dtype, enabled=autocast is not None):
                try:
                    (_, losses), vocab_size = batch_loss(model, batch)
                except IndexError as error:  # an embedding has no row for a token
                    most = max(int(t.max()) for t in (batch.tokens, batch.neighbours) if t is not None and t.numel())
                    raise ValueError(f"model: expected a vocabulary of at least {most + 1} tokens; {error}") from error
            # a window's first token has no loss: an earlier window scored it, or it is a document's first
            losses = torch.nn.functional.pad(losses.double(), (1, 0)).view(len(jobs), -1, m).sum(-1).cpu().numpy()
            for (first, end, scored), per_chunk in zip(jobs, losses):
                nats[scored:end] = per_chunk[scored - first : end - first]
    return counted_scores(store, nats, vocab_size, documents)


def counted_scores(store, nats: np.ndarray, vocab_size: int, documents: Sequence[int] | None) -> Scores:
    """Return the scores of documents, of which `nats` [num_chunks] has the tokens with context: see `score`."""
    tokens = np.zeros(len(store.lengths), np.int64)
    for first, end in {*document_rows(store, documents)}:
        tokens[first:end] = store.lengths[first:end]
        if int(store.tokens[first][0]) == getattr(store, "bos_id", BOS):
            tokens[first] -= 1  # stands for no text
        else:
            nats[first] += math.log(vocab_size)
    return Scores(nats, tokens, np.where(tokens > 0, np.asarray(store.chunk_bytes), 0).astype(np.int64))


def bits_per_byte(scores: Scores, leakage: np.ndarray | None = None, alpha: float = 1.0) -> float:
    """bpb(alpha): bits spent on the chunks with r(C) <= alpha, over their bytes; bpb(1) is the plain bits-per-byte.

    Returns: bits per byte; NaN where no chunk qualifies.
    Source: section 2.6 of arXiv 2112.04426.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha: expected 0 to 1; got {alpha}")
    if leakage is None and alpha < 1:
        raise ValueError(f"leakage: expected for alpha below 1; got None and alpha {alpha}")
    kept = np.ones(len(scores.nats), bool) if leakage is None else np.asarray(leakage) <= alpha
    if kept.shape != scores.nats.shape:
        raise ValueError(f"leakage: expected a value for each of the {len(scores.nats)} chunks; got {list(kept.shape)}")
    total = int(scores.bytes[kept].sum())
    return float(scores.nats[kept].sum()) / math.log(2) / total if total else math.nan
