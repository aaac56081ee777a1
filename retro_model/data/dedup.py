"""Find training documents that nearly repeat a validation or test document.

MinHash signatures find candidate pairs: documents whose signatures agree in a band of columns. The exact 13-gram
Jaccard similarity of each candidate pair decides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from retro_model.base import disk

from .building import each
from .documents import normal_form
from .shards import shards_of
from .store import Document, TokenStore
from .text import minhash_signatures, ngram_jaccard

MISSED = 1e-6  # upper bound on the probability that a pair at the threshold is not a candidate
TOKENS_AT_ONCE = 1 << 24  # training tokens in memory


class Removal(NamedTuple):
    """Training document to remove, the held-out document most similar to it, and their similarity."""

    document: int
    name: str
    group: str
    held_out_name: str
    held_out_group: str
    jaccard: float


class Report(NamedTuple):
    """Result of `find_leaked`. candidates: number of pairs of distinct documents whose similarity was computed."""

    threshold: float
    ngram: int
    documents: int
    candidates: int
    removed: list[Removal]

    def save(self, path: str | Path) -> None:
        """Write the report as JSON."""
        disk.write_json(Path(path), self._asdict() | {"removed": [removal._asdict() for removal in self.removed]})

    def __str__(self) -> str:
        similar = f"a {self.ngram}-gram Jaccard similarity of at least {self.threshold}"
        head = f"{len(self.removed)} of {self.documents} training documents have {similar}"
        pairs = ((f"{r.group}/{r.name}", f"{r.held_out_group}/{r.held_out_name}", r.jaccard) for r in self.removed)
        return "\n".join([head, *(f"  {own}: {jaccard:.3f} with {theirs}" for own, theirs, jaccard in pairs)])


def find_leaked(
    training: TokenStore,
    held_out: Sequence[TokenStore],
    *,
    threshold: float = 0.8,
    ngram: int = 13,
    num_permutations: int = 128,
    seed: int = 0,
    tokenizer: Any = None,
    executor: Executor | None = None,
) -> Report:
    """Find training documents whose n-gram Jaccard similarity with any held-out document is at least `threshold`.

    No document is reported in error. A document at or above the threshold is missed with a probability below 1e-6. One
    task signs each held-out shard, then one task searches each training shard. The shards do not change the result.

    Args:
        training: documents to search, in blocks of bounded memory.
        held_out: validation and test stores of the same tokenizer.
        threshold: in (0, 1].
        ngram: tokens of an n-gram; a shorter document is a single n-gram.
        num_permutations: columns of a signature.
        seed: seed of the hash functions.
        tokenizer: the stores' tokenizer, with `encode_batch` and `decode`. Documents are then compared in their normal
            form, so that a copy with other line ends, other spaces at the ends of lines or another form of Unicode
            characters is found. None: token by token.
        executor: runs the shards, see `building`; None: this process.

    Raises: ValueError naming the argument, also a threshold too low for the number of permutations.
    Source: Borgeaud et al., arXiv 2112.04426, section 2.1; Broder, 1997 (MinHash).
    """
    for store in held_out:
        if store.tokenizer_name != training.tokenizer_name:
            want = f"tokenizer {training.tokenizer_name!r} as in training"
            raise ValueError(f"held_out: expected {want}; got {store.tokenizer_name!r}")
    signing = _Signing(threshold, ngram, num_permutations, rows_of_a_band(threshold, num_permutations), seed, tokenizer)
    held = _HeldOut.of([shard for store in held_out for shard in shards_of(store)], signing, executor)
    shards = shards_of(training)
    removed, candidates, first = [], 0, 0
    for shard, found in zip(shards, each(_leaked, [(shard, held, signing) for shard in shards], executor)):
        candidates += found[1]
        for number, other, jaccard in found[0]:
            held_shard, of_shard = held.places[other]
            own, theirs = shard.documents[number], held.stores[held_shard].documents[of_shard]
            removed.append(Removal(first + number, own.name, own.group, theirs.name, theirs.group, jaccard))
        first += len(shard.documents)
    return Report(threshold, ngram, len(training.documents), candidates, removed)


def kept_documents(training: TokenStore, report: Report) -> Iterator[Document]:
    """Yield the training documents that the report does not remove, as input of `build_store`."""
    removed = {removal.document for removal in report.removed}
    for number, document in enumerate(training.stream()):
        if number not in removed:
            yield document


class _Signing(NamedTuple):
    """Settings of signatures. rows: columns of a band. tokenizer: see `find_leaked`."""

    threshold: float
    ngram: int
    num_permutations: int
    rows: int
    seed: int
    tokenizer: Any = None

    def documents(self, store: TokenStore, numbers: Iterable[int]) -> list[np.ndarray]:
        """Return the tokens by which documents of a store are compared."""
        documents = [store.document_tokens(number) for number in numbers]
        if self.tokenizer is None or not documents:
            return documents
        texts = [normal_form(self.tokenizer.decode(ids)) for ids in documents]
        encoded = map(np.asarray, self.tokenizer.encode_batch(texts))
        return [ids if len(ids) else own for ids, own in zip(encoded, documents)]

    def bands(self, documents: list[np.ndarray]) -> np.ndarray:
        """Hash each band of the documents' signatures: uint64 [documents, bands]."""
        options, bands = {"ngram": self.ngram, "seed": self.seed}, self.num_permutations // self.rows
        signatures = minhash_signatures(*_joined(documents), self.num_permutations, **options).astype(np.uint64)
        keys = np.zeros((len(documents), bands), np.uint64)
        for i in range(self.rows):
            keys = (keys ^ signatures[:, i : bands * self.rows : self.rows]) * np.uint64(0x9E3779B97F4A7C15)
            keys ^= keys >> np.uint64(32)
        return keys


class _HeldOut(NamedTuple):
    """Distinct held-out documents. places: (store, document) of each. bands: uint64 [documents, bands]."""

    stores: list[TokenStore]
    places: list[tuple[int, int]]
    bands: np.ndarray

    @classmethod
    def of(cls, stores: list[TokenStore], signing: _Signing, executor: Executor | None) -> _HeldOut:
        """Sign the stores, one task each. Of equal documents the first one is kept."""
        seen: set[bytes] = set()
        places, bands = [], [np.zeros((0, signing.num_permutations // signing.rows), np.uint64)]
        for number, (documents, digests, found) in enumerate(each(_signed, [(s, signing) for s in stores], executor)):
            new = [i for i, digest in enumerate(digests) if digest not in seen]
            seen.update(digests)
            places += [(number, documents[i]) for i in new]
            bands.append(found[new])
        return cls(stores, places, np.concatenate(bands))


def _signed(store: TokenStore, signing: _Signing) -> tuple[list[int], list[bytes], np.ndarray]:
    """Return the numbers, digests and bands of the distinct documents of a held-out store."""
    documents, first, _ = _distinct(signing.documents(store, range(len(store.documents))))
    return first, [_digest(document) for document in documents], signing.bands(documents)


def _leaked(training: TokenStore, held: _HeldOut, signing: _Signing) -> tuple[list, int]:
    """Return (document, held-out document, similarity) of each document to remove, and the number of pairs compared."""
    leaked, candidates = [], 0
    for block in _blocks(training):
        documents, _, copy_of = _distinct(signing.documents(training, block))
        pairs = _sharing_a_band(signing.bands(documents), held.bands)
        candidates += len(pairs)
        theirs, compact = np.unique(pairs[:, 1], return_inverse=True)  # read only these held-out documents
        places = [held.places[number] for number in theirs]
        against = [tokens for shard, d in places for tokens in signing.documents(held.stores[shard], [d])]
        both = np.stack([pairs[:, 0], len(documents) + compact], 1)
        similar = ngram_jaccard(*_joined([*documents, *against]), both, ngram=signing.ngram)
        best = {}  # distinct document -> most similar held-out document, similarity
        for local in np.unique(pairs[similar >= signing.threshold, 0]):
            mine = np.flatnonzero(pairs[:, 0] == local)
            pair = mine[similar[mine].argmax()]
            best[local] = int(pairs[pair, 1]), float(similar[pair])
        leaked += [(int(number), *best[local]) for number, local in zip(block, copy_of) if local in best]
    return leaked, candidates


def rows_of_a_band(threshold: float, num_permutations: int) -> int:
    """Return the largest number of columns a band at which at most MISSED of the pairs at the threshold are missed."""
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold: expected within (0, 1]; got {threshold}")
    fitting = [r for r in range(1, num_permutations + 1) if (1 - threshold**r) ** (num_permutations // r) <= MISSED]
    if not fitting:
        raise ValueError(f"num_permutations: expected more for a threshold of {threshold}; got {num_permutations}")
    return max(fitting)


def _sharing_a_band(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the distinct pairs (i, j), int64 [p,2], whose keys agree in a band."""
    pairs = [np.zeros((0, 2), np.int64)]
    for band in range(left.shape[1]):
        order = np.argsort(right[:, band], kind="stable")
        keys = right[order, band]
        first, last = (np.searchsorted(keys, left[:, band], side) for side in ("left", "right"))
        count = last - first
        i = np.repeat(np.arange(len(left)), count)
        j = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
        pairs.append(np.stack([i, order[j]], 1))
    return np.unique(np.concatenate(pairs), axis=0)


def _blocks(store: TokenStore) -> Iterator[np.ndarray]:
    """Yield the document numbers in runs of about TOKENS_AT_ONCE tokens."""
    ends = np.cumsum([entry.num_tokens for entry in store.documents])
    numbers = np.arange(len(store.documents))
    for block in np.unique(ends // TOKENS_AT_ONCE):
        yield numbers[ends // TOKENS_AT_ONCE == block]


def _distinct(documents: list[np.ndarray]) -> tuple[list[np.ndarray], list[int], list[int]]:
    """Return the distinct documents, the index where each occurs first, and the distinct number of each document.

    Without it, a thousand copies on both sides would make a million pairs.
    """
    numbers: dict[bytes, int] = {}
    copy_of = [numbers.setdefault(_digest(document), len(numbers)) for document in documents]
    first = np.unique(copy_of, return_index=True)[1].tolist()
    return [documents[i] for i in first], first, copy_of


def _digest(document: np.ndarray) -> bytes:
    return hashlib.sha256(document.tobytes()).digest()


def _joined(documents: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.concatenate(documents) if documents else np.zeros(0, np.int64)
    return tokens, np.cumsum([0, *map(len, documents)])
