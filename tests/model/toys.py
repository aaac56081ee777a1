"""Stand-ins for the store, the database and the model, with behaviour in closed form."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.conftest import INTERPRETER

needs_gloo = pytest.mark.skipif(INTERPRETER or not (dist.is_available() and dist.is_gloo_available()), reason="no gloo")


@dataclass
class Store:
    """The part of a TokenStore that training and evaluation use."""

    tokens: np.ndarray  # [num_chunks, M]
    lengths: np.ndarray
    chunk_doc: np.ndarray
    chunk_bytes: np.ndarray

    @property
    def chunk_len(self) -> int:
        return self.tokens.shape[1]


def store(documents: list[list[int]], chunk_len: int, bytes_per_token: int = 2) -> Store:
    """Cut documents into chunk rows; the last one is padded with 0."""
    rows, lengths, owner = [], [], []
    for d, document in enumerate(documents):
        for at in range(0, len(document), chunk_len):
            part = document[at : at + chunk_len]
            rows.append(part + [0] * (chunk_len - len(part)))
            lengths.append(len(part))
            owner.append(d)
    lengths = np.array(lengths)
    return Store(np.array(rows, np.uint16), lengths, np.array(owner), lengths * bytes_per_token)


def random_store(num_chunks: int = 40, chunk_len: int = 4, vocab: int = 17, seed: int = 0) -> Store:
    """One row a chunk; every third row ends its document and is half full."""
    random = np.random.default_rng(seed)
    documents = [random.integers(1, vocab, chunk_len * 3 - chunk_len // 2).tolist() for _ in range(num_chunks // 3 + 1)]
    whole = store(documents, chunk_len)
    return Store(*(part[:num_chunks] for part in vars(whole).values()))


class Database:
    """Values of a TokenStore's rows: the chunk and the next one of its document."""

    def __init__(self, rows: Store):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows.lengths)

    def documents_of(self, store: Store) -> np.ndarray:
        """Treat the documents of another store as different."""
        return np.arange(store.chunk_doc.max() + 1) if store is self.rows else np.full(store.chunk_doc.max() + 1, -1)

    def document_of(self, ids: np.ndarray) -> np.ndarray:
        return np.where(ids < 0, -1, self.rows.chunk_doc[np.maximum(ids, 0)])

    def values(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        m, ids = self.rows.chunk_len, np.asarray(ids)
        tokens, mask = np.zeros((*ids.shape, 2 * m), np.int64), np.zeros((*ids.shape, 2 * m), bool)
        for at in np.ndindex(ids.shape):
            for half, row in enumerate((ids[at], ids[at] + 1)):
                last = row >= len(self.rows.lengths)
                if ids[at] < 0 or last or self.rows.chunk_doc[row] != self.rows.chunk_doc[ids[at]]:
                    continue
                tokens[at][half * m : (half + 1) * m] = self.rows.tokens[row]
                mask[at][half * m : (half + 1) * m] = np.arange(m) < self.rows.lengths[row]
        return tokens, mask


def in_blocks(model, cache, tokens: Tensor, blocks: list[int], *, first: int = 0, given=None, **options) -> Tensor:
    """Return logits of `tokens` from `first` on, block by block.

    given: inputs [B,L,...] by name, one entry per chunk; each block gets the entries of the chunks that it completes.
    """
    outs, size = [], model.config.chunk_len
    for count in blocks:
        chunks = slice(first // size, (first + count) // size)
        assert cache.completes(count) == chunks.stop - chunks.start
        inputs = {} if chunks.stop == chunks.start else {name: t[:, chunks] for name, t in (given or {}).items()}
        outs.append(model(tokens[:, first : first + count], cache=cache, **inputs, **options))
        first += count
    return torch.cat(outs, 1)


def assert_same_steps(got: list[dict], want: list[dict], rel: float = 1e-5) -> None:
    """Check losses, gradients and counts of tokens of two trainings."""
    for a, b in zip(got, want, strict=True):
        assert a["tokens"] == b["tokens"]
        for name in ("loss", "gradient_norm"):
            assert a[name] == pytest.approx(b[name], rel=rel), name


def untimed(history: list[dict]) -> list[dict]:
    """Return results of `training.train` without times."""
    return [{name: value for name, value in h.items() if name not in ("seconds", "waiting")} for h in history]


class Bigram(nn.Module):
    """log p(token | previous) from a table, whose gradient is simple."""

    def __init__(self, vocab: int = 17, seed: int = 0):
        super().__init__()
        self.table = nn.Embedding(vocab, vocab)
        self.scale = nn.Linear(vocab, vocab, bias=False)
        with torch.no_grad():
            self.table.weight.copy_(torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed)))
            self.scale.weight.copy_(torch.eye(vocab))

    def forward(self, tokens: Tensor, neighbours=None, *, neighbour_mask=None) -> Tensor:
        return self.scale(self.table(tokens))


class ByOffset(nn.Module):
    """Give token 0 the logit `offset + 1` at each offset of its window, and 0 to the other one: cost(offset) in closed
    form.
    """

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(()))

    def forward(self, tokens: Tensor, neighbours=None, *, neighbour_mask=None) -> Tensor:
        logits = torch.zeros(*tokens.shape, 2, dtype=torch.float64)
        logits[..., 0] = torch.arange(1, tokens.shape[1] + 1)
        return logits

    @staticmethod
    def cost(offset: int) -> float:
        """Return the nats of a token 0 at `offset` > 0 of its window."""
        return float(np.log1p(np.exp(-float(offset))))
