"""Negative log-likelihood of whole documents in overlapping windows, and the bits-per-byte it makes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from retro_model.data.tokens import BOS
from retro_model.retro import NeighbourEncoder
from retro_model.training import AUTOCAST, batch_loss, check_neighbours, gather


@dataclass(frozen=True)
class Scores:
    """What a model pays for each chunk: nats float64, scored tokens int64, bytes int64; all [num_chunks], zero where
    not scored.
    """

    nats: np.ndarray
    tokens: np.ndarray
    bytes: np.ndarray


def windows(chunks: int, window: int, stride: int) -> list[tuple[int, int, int]]:
    """Windows over a document of `chunks` chunks (all in chunks): (first, end, first_scored) with each chunk scored
    once.

    Windows start every `stride` chunks; a chunk is scored in the first window that holds it, the one with the most
    context.

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


def document_rows(store) -> list[tuple[int, int]]:
    """First and end row of each document, in order."""
    owner = np.asarray(store.chunk_doc)
    cuts = np.flatnonzero(np.diff(owner)) + 1
    return list(zip([0, *cuts.tolist()], [*cuts.tolist(), len(owner)])) if len(owner) else []


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
    """Negative log-likelihood of every token of the store's documents, each scored once, with the most context a window
    gives.

    A window never leaves its document. The first token of a document has no context: BOS is free, any other costs
    log(vocab_size), as a uniform code would, for every model alike. Padding is not scored.

    window, stride: tokens, multiples of the chunk length, stride < window (the paper: 2048 and 1024). neighbours: int64
    [num_chunks, K], ids of `database` (-1: none); None evaluates with retrieval off. documents: ordinals (in the
    store's order) to score, all by default. report: called with (chunks done, chunks in all).
    Returns: Scores.
    Raises: ValueError naming the argument.
    Source: section 4.1 of arXiv 2112.04426.
    """
    m = store.chunk_len
    for name, value in (("window", window), ("stride", stride)):
        if value < 1 or value % m:
            raise ValueError(f"{name}: expected a positive multiple of the chunk length ({m}); got {value}")
    if stride >= window:
        raise ValueError(
            f"stride: expected less than window ({window}), so that every scored token has context; got {stride}"
        )
    if batch_size < 1:
        raise ValueError(f"batch_size: expected at least 1; got {batch_size}")
    check_neighbours(store, neighbours, database)
    if autocast not in AUTOCAST:
        raise ValueError(f"autocast: expected one of {AUTOCAST}; got {autocast!r}")
    spans = document_rows(store)
    if documents is not None:
        if wrong := [d for d in documents if not 0 <= d < len(spans)]:
            raise ValueError(f"documents: expected ordinals from 0 to {len(spans) - 1}; got {wrong}")
        spans = [spans[d] for d in documents]
    jobs = [
        (a + first, a + end, a + scored, a)
        for a, b in spans
        for first, end, scored in windows(b - a, window // m, stride // m)
    ]
    jobs.sort(key=lambda job: job[1] - job[0])  # windows of like length share a batch, so that little is padding
    nats, tokens = np.zeros(len(store.lengths)), np.zeros(len(store.lengths), np.int64)
    device, training, done = next(model.parameters()).device, model.training, 0
    model.eval()
    with contextlib.ExitStack() as stack:
        stack.callback(model.train, training)
        for module in model.modules():
            if isinstance(module, NeighbourEncoder):  # windows overlap, and retrieve the same neighbours again
                stack.enter_context(module.keeping())
        for at in range(0, len(jobs), batch_size):
            part = jobs[at : at + batch_size]
            _score_windows(model, store, neighbours, database, part, device, autocast, nats, tokens)
            done += sum(end - scored for _, end, scored, _ in part)
            if report is not None:
                report(done, sum(b - a for a, b in spans))
    counted = np.where(tokens > 0, np.asarray(store.chunk_bytes), 0).astype(np.int64)
    return Scores(nats, tokens, counted)


def _score_windows(model, store, neighbours, database, jobs, device, autocast, nats, tokens) -> None:
    """Scores the windows `jobs` = (first, end, first_scored,
    document's first row) in one batch, into `nats` and `tokens`.
    """
    m, longest = store.chunk_len, max(end - first for first, end, _, _ in jobs)
    rows = np.full((len(jobs), longest), -1)
    for i, (first, end, _, _) in enumerate(jobs):
        rows[i, : end - first] = np.arange(first, end)
    batch = gather(store, rows, neighbours, database).to(device)
    with torch.autocast(device.type, dtype=getattr(torch, autocast or "bfloat16"), enabled=autocast is not None):
        (_, losses), vocab_size = batch_loss(model, batch)
    # The window's first token has no logits; it is a document's first
    # (a uniform code) or was scored by an earlier window.
    losses = torch.nn.functional.pad(losses.double(), (1, 0)).view(len(jobs), longest, m)
    bos_id = getattr(store, "bos_id", BOS)
    begins = batch.tokens[:, 0] == (-1 if bos_id is None else bos_id)
    losses[:, 0, 0] = torch.where(begins, 0.0, math.log(vocab_size))
    per_chunk = losses.sum(-1).cpu().numpy()
    count = batch.real.view(len(jobs), longest, m).sum(-1)
    count[:, 0] -= begins.long()  # stands for no text
    count = count.cpu().numpy()
    for i, (first, end, scored, _) in enumerate(jobs):
        nats[scored:end] = per_chunk[i, scored - first : end - first]
        tokens[scored:end] = count[i, scored - first : end - first]


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
