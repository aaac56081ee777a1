"""Frozen embedders of chunks: hashed TF-IDF, and any `transformers` encoder averaged over the tokens.

Both follow the protocol `Embedder`. A row of the result depends on its chunk alone, never on the rest of the batch.
"""

from __future__ import annotations

import hashlib
import io
import zlib
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from retro_model.base import checks, disk

from .arrays import integers, row_lengths
from .building import each

FEATURES_AT_ONCE = 1 << 22  # n-grams hashed together
ORDERS = (1, 2)  # of n-grams, weighted equally
BUCKETS = 1 << 20  # buckets of n-grams; the n-grams of one bucket share a document frequency


class Embedder(Protocol):
    """Protocol of embedders. name: identifies the embedder and its weights; a database refuses another. dim: width."""

    @property
    def name(self) -> str: ...

    @property
    def dim(self) -> int: ...

    def __call__(self, chunks: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """chunks: token ids [n,M]; lengths: real tokens of each [n]. Returns float32 [n, dim]."""
        ...


class HashedTfidf:
    """Embedder by TF-IDF over tokens and pairs of tokens, projected to `dim` by feature hashing, of unit length.

    The inner product of two embeddings estimates the cosine of the two TF-IDF vectors without bias, with a standard
    deviation of about dim**-0.5. Weights are idf * tf/(tf + 1). `fit` learns the idf of hash buckets in one pass.

        embedder = HashedTfidf(dim=512).fit(store)

    Source: Weinberger et al., arXiv 0902.2206 (feature hashing).
    """

    def __init__(self, dim: int = 512) -> None:
        checks.integer("dim", dim, low=1)
        self.dim, self.num_chunks, self.frequency = dim, 0, np.zeros(BUCKETS, np.int64)

    @property
    def name(self) -> str:
        state = hashlib.sha256(self.frequency.tobytes()).hexdigest()[:16]
        return f"hashed-tfidf-{self.dim}-{'+'.join(map(str, ORDERS))}-0-{self.num_chunks}-{state}"

    def fit(self, store, *, block: int = 8192, executor: Executor | None = None) -> HashedTfidf:
        """Count the chunks of a store in which each bucket occurs. Returns self.

        executor: counts the shards, see `building`; None: this process.
        """
        counts = each(_count, [(part, block) for part in getattr(store, "shards", [store])], executor)
        self.num_chunks, self.frequency = len(store), sum(counts)
        return self

    def __getstate__(self) -> dict:
        """Compress the counts: an executor pickles them with every task."""
        return self.__dict__ | {"frequency": zlib.compress(self.frequency.tobytes(), 1)}

    def __setstate__(self, state: dict) -> None:
        self.__dict__ = state | {"frequency": np.frombuffer(zlib.decompress(state["frequency"]), np.int64)}

    def save(self, path: str | Path) -> None:
        """Write one .npz file, atomically."""
        content = io.BytesIO()
        np.savez_compressed(content, settings=[self.dim, 0, self.num_chunks, *ORDERS], frequency=self.frequency)
        disk.write_plain(Path(path), content.getvalue())

    @classmethod
    def load(cls, path: str | Path) -> HashedTfidf:
        """Load the file that `save` wrote. Raises: FileNotFoundError, ValueError naming the file."""
        content = disk.read_plain(Path(path))
        try:
            with np.load(io.BytesIO(content)) as saved:
                (dim, seed, num_chunks, *orders), frequency = saved["settings"].tolist(), saved["frequency"]
            if (seed, *orders) != (0, *ORDERS):
                raise ValueError(f"n-grams {orders}, seed {seed}")
            made = cls(dim)
            made.num_chunks, made.frequency = num_chunks, frequency.astype(np.int64).reshape(BUCKETS)
        except Exception as error:  # of zipfile, zlib or NumPy, wherever the damage is
            raise ValueError(f"{path}: truncated, corrupt or no hashed TF-IDF ({error})") from error
        return made

    def __call__(self, chunks: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        chunks, lengths = _chunks(chunks, lengths)
        out = np.empty((len(chunks), self.dim), np.float32)
        block = max(1, FEATURES_AT_ONCE // max(1, chunks.shape[1] * len(ORDERS)))
        for start in range(0, len(chunks), block):
            rows = slice(start, start + block)
            out[rows] = self._embed(chunks[rows], lengths[rows])
        return out

    def _embed(self, chunks: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        row, features, count = _ngrams(chunks, lengths)
        frequency = self.frequency[features % np.uint64(BUCKETS)]
        idf = np.log1p((self.num_chunks - np.minimum(frequency, self.num_chunks) + 0.5) / (frequency + 0.5))
        mixed = _mix(features)  # bits independent of the bucket's
        column, sign = (mixed >> np.uint64(1)) % np.uint64(self.dim), 1 - 2 * (mixed & np.uint64(1)).astype(np.int64)
        at = row * self.dim + column.astype(np.int64)
        out = np.bincount(at, sign * idf * count / (count + 1), minlength=len(chunks) * self.dim)
        out = out.reshape(len(chunks), self.dim)
        norm = np.linalg.norm(out, axis=1, keepdims=True)
        return (out / np.where(norm > 0, norm, 1)).astype(np.float32)


def _count(store, block: int) -> np.ndarray:
    """Count the chunks of a shard in which each bucket occurs."""
    frequency = np.zeros(BUCKETS, np.int64)
    for start in range(0, len(store), block):
        rows = slice(start, start + block)
        _, features, _ = _ngrams(np.asarray(store.tokens[rows]), np.asarray(store.lengths[rows]))
        frequency += np.bincount(features % np.uint64(BUCKETS), minlength=BUCKETS)
    return frequency


def _ngrams(chunks: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the row, hash (uint64) and count of the distinct n-grams of every chunk."""
    rows, hashes = [], []
    tokens = _mix(chunks.astype(np.uint64))
    for order in ORDERS:
        width = chunks.shape[1] - order + 1
        if width < 1:
            continue
        hashed = np.full((len(chunks), width), np.uint64(order))
        for i in range(order):
            hashed = _mix(hashed + tokens[:, i : i + width])
        row, column = np.nonzero(np.arange(width) < (np.asarray(lengths)[:, None] - order + 1))
        rows.append(row)
        hashes.append(hashed[row, column])
    row = np.concatenate([np.zeros(0, np.int64), *rows])
    hashed = np.concatenate([np.zeros(0, np.uint64), *hashes])
    order = np.lexsort((hashed, row))
    row, hashed = row[order], hashed[order]
    first = np.flatnonzero(np.r_[True, (np.diff(row) != 0) | (hashed[1:] != hashed[:-1])][: len(row)])
    return row[first], hashed[first], np.diff(np.r_[first, len(row)])


class EncoderEmbedder:
    """Embedder by a frozen encoder: its hidden states, averaged over the real tokens. RETRO's keys are BERT's.

        EncoderEmbedder(BertModel(...))  # chunks are in the encoder's own vocabulary
        EncoderEmbedder(bert, prepare=retokenized(tokenizer.decode, bert_tokenizer), device="cuda")

    Args:
        encoder: module called with input_ids and attention_mask, both int64 [n,T]. Returns the hidden states [n,T,dim]
            or an object with them as `last_hidden_state`. It is put in evaluation mode.
        prepare: (chunks [n,M], lengths [n]) -> (input_ids, attention_mask); None: the chunks themselves.
        batch: chunks encoded together.
        device: device that the encoder moves to at the first call, which may be in an executor's worker; None: stay.

    Source: Borgeaud et al., arXiv 2112.04426, section 2.3.
    """

    def __init__(
        self,
        encoder: torch.nn.Module,
        *,
        prepare: Callable | None = None,
        batch: int = 64,
        device: torch.device | str | None = None,
    ) -> None:
        self.encoder, self.prepare, self.batch = encoder.eval(), prepare or _unchanged, batch
        self.device = next(encoder.parameters()).device
        one = torch.ones(1, 1, dtype=torch.int64)
        self.dim = self._mean(one - 1, one).shape[1]
        digest = hashlib.sha256()
        for key, value in encoder.state_dict().items():
            digest.update(key.encode() + value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        self.name = f"{type(encoder).__name__}-mean-{digest.hexdigest()[:16]}"
        self.device = self.device if device is None else torch.device(device)

    def __call__(self, chunks: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        chunks, lengths = _chunks(chunks, lengths)
        out = np.zeros((len(chunks), self.dim), np.float32)
        self.encoder.to(self.device)
        for start in range(0, len(chunks), self.batch):
            rows = slice(start, start + self.batch)
            ids, mask = map(torch.as_tensor, self.prepare(chunks[rows], lengths[rows]))
            out[rows] = self._mean(ids, mask).cpu().numpy()
        return out

    @torch.inference_mode()
    def _mean(self, ids: Tensor, mask: Tensor) -> Tensor:
        ids, mask = ids.to(self.device), mask.to(self.device)
        hidden = self.encoder(input_ids=ids, attention_mask=mask)
        hidden = getattr(hidden, "last_hidden_state", hidden)
        weight = mask.to(hidden.dtype).unsqueeze(-1)
        return ((hidden * weight).sum(1) / weight.sum(1).clamp(min=1)).float()


def retokenized(decode: Callable, tokenizer, max_length: int = 512) -> Callable:
    """Return a `prepare` for `EncoderEmbedder`: chunk -> text -> the encoder's ids, by a `transformers` tokenizer."""

    def prepare(chunks: np.ndarray, lengths: np.ndarray) -> tuple[Tensor, Tensor]:
        texts = [decode(row[:length]) for row, length in zip(chunks, lengths)]
        ready = tokenizer(texts, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
        return ready["input_ids"], ready["attention_mask"]

    return prepare


def _unchanged(chunks: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mask = np.arange(chunks.shape[1]) < lengths[:, None]
    return np.where(mask, chunks, 0), mask.astype(np.int64)


def _chunks(chunks, lengths) -> tuple[np.ndarray, np.ndarray]:
    chunks = integers("chunks", chunks, 2).astype(np.int64)
    return chunks, row_lengths("lengths", lengths, *chunks.shape)


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser on uint64, which wraps."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
