"""Find training documents that nearly repeat a validation or test document.

MinHash signatures find candidate pairs: documents whose signatures agree in a band of columns. The exact 13-gram
Jaccard similarity of each candidate pair decides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple

import numpy as np

from .building import each
from .documents import normal_form
from .shards import shards_of
from .store import Document, TokenStore
from .text import minhash_signatures, ngram_jaccard

THRESHOLD = 0.8  # least similarity of a document that is removed
#: A signature has 128 numbers in bands of 4. A pair at the threshold agrees in no band with probability 5e-8.
COLUMNS, BAND = 128, 4
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

    documents: int
    candidates: int
    removed: list[Removal]

    def __str__(self) -> str:
        similar = f"a 13-gram Jaccard similarity of at least {THRESHOLD}"
        head = f"{len(self.removed)} of {self.documents} training documents have {similar}"
        pairs = ((f"{r.group}/{r.name}", f"{r.held_out_group}/{r.held_out_name}", r.jaccard) for r in self.removed)
        return "\n".join([head, *(f"  {own}: {jaccard:.3f} with {theirs}" for own, theirs, jaccard in pairs)])


def find_leaked(
    training: TokenStore, held_out: Sequence[TokenStore], *, tokenizer: Any = None, executor: Executor | None = None
) -> Report:
    """Find training documents whose 13-gram Jaccard similarity with any held-out document is at least 0.8.

    No document is reported in error. A document at or above the threshold is missed with a probability below 1e-6. One
    task signs each held-out shard, then one task searches each training shard. The shards do not change the result.

    Args:
        training: documents to search, in blocks of bounded memory. A document of fewer than 13 tokens is one n-gram.
        held_out: validation and test stores of the same tokenizer.
        tokenizer: the stores' tokenizer, with `encode_batch` and `decode`. Documents are then compared in their normal
            form, so that a copy with other line ends, other spaces at the ends of lines or another form of Unicode
            characters is found. None: token by token.
        executor: runs the shards, see `building`; None: this process.

    Raises: ValueError naming the argument.
    Source: Borgeaud et al., arXiv 2112.04426, section 2.1; Broder, 1997 (MinHash).
    """
    for store in held_out:
        if store.tokenizer_name != training.tokenizer_name:
            want = f"tokenizer {training.tokenizer_name!r} as in training"
            raise ValueError(f"held_out: expected {want}; got {store.tokenizer_name!r}")
    held = [shard for store in held_out for shard in shards_of(store)]
    # of equal held-out documents the first one is kept
    places, bands, seen = [], [np.zeros((0, COLUMNS // BAND), np.uint64)], set()
    for shard, (numbers, digests, found) in zip(held, each(_signed, [(shard, tokenizer) for shard in held], executor)):
        new = [i for i, digest in enumerate(digests) if digest not in seen]
        seen.update(digests)
        places += [(shard, numbers[i]) for i in new]
        bands.append(found[new])
    removed, candidates, first, shards = [], 0, 0, shards_of(training)
    calls = [(shard, places, np.concatenate(bands), tokenizer) for shard in shards]
    for shard, (leaked, pairs) in zip(shards, each(_leaked, calls, executor)):
        candidates += pairs
        for number, place, jaccard in leaked:
            theirs_in, theirs_at = places[place]
            own, theirs = shard.documents[number], theirs_in.documents[theirs_at]
            removed.append(Removal(first + number, own.name, own.group, theirs.name, theirs.group, jaccard))
        first += len(shard.documents)
    return Report(len(training.documents), candidates, removed)


def kept_documents(training: TokenStore, report: Report) -> Iterator[Document]:
    """Yield the training documents that the report does not remove, as input of `build_store`."""
    removed = {removal.document for removal in report.removed}
    for number, document in enumerate(training.stream()):
        if number not in removed:
            yield document


def _compared(store: TokenStore, numbers: Iterable[int], tokenizer: Any) -> list[np.ndarray]:
    """Return the tokens by which documents of a store are compared, see `find_leaked`."""
    documents = [store.document_tokens(number) for number in numbers]
    if tokenizer is None or not documents:
        return documents
    encoded = map(np.asarray, tokenizer.encode_batch([normal_form(tokenizer.decode(ids)) for ids in documents]))
    return [ids if len(ids) else own for ids, own in zip(encoded, documents)]


def _bands(documents: list[np.ndarray]) -> np.ndarray:
    """Hash each band of the documents' signatures: uint64 [documents, bands]."""
    signatures = minhash_signatures(*_joined(documents), COLUMNS).astype(np.uint64)
    keys = np.zeros((len(documents), COLUMNS // BAND), np.uint64)
    for i in range(BAND):
        keys = (keys ^ signatures[:, i::BAND]) * np.uint64(0x9E3779B97F4A7C15)
        keys ^= keys >> np.uint64(32)
    return keys


def _signed(store: TokenStore, tokenizer: Any) -> tuple[list[int], list[bytes], np.ndarray]:
    """Return the numbers, digests and bands of the distinct documents of a held-out store."""
    documents, first, _ = _distinct(_compared(store, range(len(store.documents)), tokenizer))
    return first, [_digest(document) for document in documents], _bands(documents)


def _leaked(
    training: TokenStore, places: list[tuple[TokenStore, int]], bands: np.ndarray, tokenizer: Any
) -> tuple[list, int]:
    """Return (document, place, similarity) of each document to remove, and the number of pairs compared.

    places, bands: store and number of each distinct held-out document, and its bands.
    """
    leaked, candidates = [], 0
    for block in _blocks(training):
        documents, _, copy_of = _distinct(_compared(training, block, tokenizer))
        pairs = _sharing_a_band(_bands(documents), bands)
        candidates += len(pairs)
        theirs, compact = np.unique(pairs[:, 1], return_inverse=True)  # read only these held-out documents
        against = [tokens for place in theirs for tokens in _compared(places[place][0], [places[place][1]], tokenizer)]
        both = np.stack([pairs[:, 0], len(documents) + compact], 1)
        similar = ngram_jaccard(*_joined([*documents, *against]), both)
        best = {}  # distinct document -> most similar held-out document, similarity
        for local in np.unique(pairs[similar >= THRESHOLD, 0]):
            mine = np.flatnonzero(pairs[:, 0] == local)
            pair = mine[similar[mine].argmax()]
            best[local] = int(pairs[pair, 1]), float(similar[pair])
        leaked += [(int(number), *best[local]) for number, local in zip(block, copy_of) if local in best]
    return leaked, candidates


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
