"""Supervision of the retriever: BM25 candidates, and a reference language model's gain from each.

The candidates of chunk i with target i+1 are the `CANDIDATES` retrievable chunks j <= i - w of the highest BM25 score
for both. Their score is

    s_t(j) = mean over the target's tokens of
             log p(c_{i+1} | c_j, c_{j+1}, c_i) - log p(c_{i+1} | c_{i-2}, c_{i-1}, c_i)

s_t > 0: the far context helps more than the near one. `build_supervision` stores both for a whole data set.

Source: Rubin and Berant, arXiv 2306.13421, section 3.2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from retro_model.base import checks, transfer
from retro_model.data import files
from retro_model.data.text import bm25_scores

CANDIDATES = 20
MANIFEST, INDEX_FILE, SCORE_FILE = "supervision.json", "candidates.i32", "scores.f32"
FORM = files.Form("supervision", (INDEX_FILE, SCORE_FILE), counts=("sequences",))

#: any causal language model: tokens int64 [B,T] -> logits [B,T,V], or an object with `.logits`
ReferenceLM = Callable[[Tensor], Tensor]


class Supervision(NamedTuple):
    """Candidates int64 [...,L,C] (-1: none) and their target scores s_t float32 [...,L,C] (-inf: none)."""

    candidates: Tensor
    scores: Tensor

    def to(self, device) -> Supervision:
        """Return the supervision on `device`."""
        return Supervision(*(transfer.send(t, device) for t in self))

    def rows(self, which) -> Supervision:
        """Return the supervision of some sequences."""
        return Supervision(*(t[which] for t in self))

    def dense(self) -> Tensor:
        """Return s_t of every pair of chunks [...,L,L], -inf if unscored, as input of `lambda_rank`."""
        chunks = self.candidates.shape[-2]
        padded = self.scores.new_full((*self.candidates.shape[:-1], chunks + 1), -torch.inf)
        # missing candidates go to the last column, which is dropped
        return padded.scatter(-1, torch.where(self.candidates < 0, chunks, self.candidates), self.scores)[..., :chunks]

    def teacher(self, k: int) -> Tensor:
        """Return the candidates of the highest positive s_t, int64 [...,L,k], best first; -1 if there are fewer."""
        best, at = self.scores.topk(min(k, self.scores.shape[-1]), -1)
        index = self.candidates.gather(-1, at).masked_fill(~(best > 0), -1)
        return F.pad(index, (0, k - index.shape[-1]), value=-1)


def bm25_index(chunks, k: int, *, excluded_chunks: int, with_target: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the k retrievable chunks of the highest BM25 score for each chunk of a document, and the scores.

    Args:
        chunks: token ids [L,m].
        k: number of chunks to return.
        excluded_chunks: w, chunk i retrieves j <= i - w.
        with_target: the query is (c_i, c_{i+1}), as in training; else c_i alone, as at inference.

    Returns:
        index int64 [L,k] and scores float32 [L,k]; -1 and -inf if there are fewer. Of equal scores the lower index
        comes first.

    The statistics count all L chunks, at inference too: the idf depends on the number of later chunks with a
    token.
    """
    chunks = np.asarray(chunks)
    count, m = chunks.shape
    queries, sizes = chunks, None
    if with_target:
        queries, sizes = np.concatenate([chunks, np.roll(chunks, -1, 0)], 1), np.full(count, 2 * m)
        sizes[-1:] = m  # the last chunk has no target
    scores = bm25_scores(chunks, queries, query_lengths=sizes)
    number = np.arange(count)
    scores[number > number[:, None] - excluded_chunks] = -np.inf
    index = np.argsort(-scores, 1, kind="stable")[:, :k]
    best = np.take_along_axis(scores, index, 1)
    index = np.where(best > -np.inf, index, -1)
    missing = ((0, 0), (0, k - index.shape[1]))
    return np.pad(index, missing, constant_values=-1).astype(np.int64), np.pad(best, missing, constant_values=-np.inf)


@torch.no_grad()
def reference_scores(lm: ReferenceLM, chunks: Tensor, candidates: Tensor, *, batch_size: int = 64) -> Tensor:
    """Return s_t float32 [L,C] of candidates [L,C] (-1: none) of a document's chunks [L,m].

    A missing candidate's score is -inf, and so are the last chunk's, which has no target. The first two chunks have a
    shorter near context.
    """
    count = len(chunks)
    scores = torch.full(candidates.shape, -torch.inf)
    at = (candidates[: count - 1].cpu() >= 0).nonzero()  # (i, c)
    if not len(at):
        return scores
    asked = at[:, 0].unique()
    near = torch.full((count,), torch.nan)
    for length in range(1, 4):  # chunks of near context
        same = asked[asked.clamp(max=2) + 1 == length]
        rows = torch.stack([same + o for o in range(1 - length, 2)], 1)
        near[same] = _target_likelihood(lm, chunks, rows, batch_size)
    j = candidates.cpu()[at[:, 0], at[:, 1]]
    far = _target_likelihood(lm, chunks, torch.stack([j, j + 1, at[:, 0], at[:, 0] + 1], 1), batch_size)
    scores[at[:, 0], at[:, 1]] = far - near[at[:, 0]]
    return scores


def _target_likelihood(lm: ReferenceLM, chunks: Tensor, rows: Tensor, batch_size: int) -> Tensor:
    """Return the mean log-likelihood of the tokens of the last chunk of each of `rows` [n,c], given the others."""
    m, parts = chunks.shape[1], [torch.zeros(0)]
    for part in rows.split(batch_size) if len(rows) else ():  # a library's model may refuse an empty batch
        tokens = chunks[part.to(chunks.device)].flatten(1)
        out = lm(tokens)
        logits = getattr(out, "logits", out)[:, -m - 1 : -1].float()
        losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, -m:].flatten(), reduction="none")
        parts.append(-losses.view(-1, m).mean(1).cpu())
    return torch.cat(parts)


def supervise(
    tokens: Tensor,
    lm: ReferenceLM | None,
    *,
    chunk_len: int,
    excluded_chunks: int,
    candidates: int = CANDIDATES,
    batch_size: int = 64,
) -> Supervision:
    """Return candidates and target scores of one sequence of tokens [N].

    lm: None scores by BM25 (the paper's RPT-Lex). All candidates are then positive, and a chunk's best has score 1.
    excluded_chunks: w, chunk i retrieves j <= i - w. With w = 0 a chunk would retrieve itself.
    """
    checks.shape("tokens", tokens, "N", {})
    for name, value in (("chunk_len", chunk_len), ("excluded_chunks", excluded_chunks), ("candidates", candidates)):
        checks.integer(name, value, low=1)
    chunks = tokens[: len(tokens) // chunk_len * chunk_len].view(-1, chunk_len)
    index, lexical = bm25_index(chunks.cpu().numpy(), candidates, excluded_chunks=excluded_chunks, with_target=True)
    index = torch.from_numpy(index)
    if lm is not None:
        return Supervision(index, reference_scores(lm, chunks, index, batch_size=batch_size))
    scores = torch.from_numpy(lexical)
    # scaled, because gains are 2^s_t: unscaled, the best candidate would outweigh all others
    best = scores[:, :1].clamp(min=torch.finfo(torch.float32).tiny)
    scores = (scores / best).masked_fill(scores <= 0, -torch.inf)
    scores[-1:] = -torch.inf  # no target
    return Supervision(index, scores)


def build_supervision(
    folder: str | Path,
    sequences: Sequence,
    lm: ReferenceLM | None,
    *,
    name: str,
    chunk_len: int,
    excluded_chunks: int,
    candidates: int = CANDIDATES,
    batch_size: int = 64,
    device: str | torch.device = "cpu",
) -> list[Supervision]:
    """Store `supervise` of every sequence. A build that was killed continues at the sequence it had reached.

    Args:
        folder: output folder.
        sequences: token ids, each of any length.
        lm: on `device`; see `supervise`.
        name: identifies the language model; a folder built with another is refused.

    Returns:
        One Supervision a sequence.

    Raises:
        ValueError: the folder has another build, or a file that is truncated or corrupt.
    """
    options = {"chunk_len": chunk_len, "excluded_chunks": excluded_chunks, "candidates": candidates}
    if not isinstance(name, str):
        raise TypeError(f"name: expected a str that identifies the language model; got {type(name).__name__}")
    if not name:
        raise ValueError("name: expected a name that identifies the language model; got an empty one")
    settings = {"name": name, **options, "sequences": len(sequences), "tokens": _fingerprint(sequences)}
    with files.Build(Path(folder) / MANIFEST, FORM, settings) as build:
        if not build.complete:
            for i in range(build.facts.get("sequences", 0), len(sequences)):
                tokens = torch.as_tensor(np.asarray(sequences[i], np.int64), device=device)
                lessons = supervise(tokens, lm, **options, batch_size=batch_size)
                build.append(INDEX_FILE, lessons.candidates.numpy().astype(np.int32))
                build.append(SCORE_FILE, lessons.scores.numpy().astype(np.float32))
                build.commit(sequences=i + 1)
            build.finish(sequences=len(sequences))
    lengths = [len(s) // chunk_len for s in sequences]
    shape = sum(lengths), candidates
    index = torch.from_numpy(files.mapped(Path(folder) / INDEX_FILE, np.int32, shape).astype(np.int64))
    scores = torch.from_numpy(np.array(files.mapped(Path(folder) / SCORE_FILE, np.float32, shape)))
    return [Supervision(*parts) for parts in zip(index.split(lengths), scores.split(lengths))]


def _fingerprint(sequences: Sequence) -> str:
    digest = hashlib.sha256()
    for tokens in sequences:
        digest.update(np.int64(len(tokens)).tobytes() + np.asarray(tokens, np.int64).tobytes())
    return digest.hexdigest()[:16]


def stack(parts: Sequence[Supervision]) -> Supervision:
    """Return a batch [B,L,C] of sequences of one length."""
    if len(shapes := {tuple(part.candidates.shape) for part in parts}) != 1:
        raise ValueError(f"parts: expected supervisions of one shape [L,C]; got {sorted(shapes) or 'none'}")
    return Supervision(*map(torch.stack, zip(*parts)))
