"""Several sources in given proportions: a stream to train on, and what a database is built of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from .documents import Document
from .store import TokenStore

Item = TypeVar("Item")

#: Sampling weights of MassiveText's subsets, as printed (they add up to 1.0005). Source: Table 8 of arXiv 2112.04426.
TABLE_8 = {
    "web en": 0.314,
    "web ru": 0.033,
    "web es": 0.033,
    "web zh": 0.033,
    "web fr": 0.033,
    "web de": 0.033,
    "web pt": 0.033,
    "web it": 0.033,
    "web sw": 0.0044,
    "web ur": 0.0011,
    "books en": 0.25,
    "news en": 0.1,
    "wikipedia en": 0.0285,
    "wikipedia de": 0.003,
    "wikipedia fr": 0.003,
    "wikipedia ru": 0.003,
    "wikipedia es": 0.003,
    "wikipedia it": 0.003,
    "wikipedia zh": 0.003,
    "wikipedia pt": 0.003,
    "wikipedia ur": 0.0001,
    "wikipedia sw": 0.0004,
    "github": 0.05,
}


def checked_weights(weights: Mapping[str, float], names: Iterable[str]) -> dict[str, float]:
    """Each name's share, adding up to 1. Raises: ValueError for other names, for a share that is not positive."""
    names = list(names)
    if not names or set(weights) != set(names):
        raise ValueError(
            f"weights: expected one for each of {', '.join(names) or 'at least one source'}; got "
            f"{', '.join(weights) or 'none'}"
        )
    if not all(0 < weight < np.inf for weight in weights.values()):
        raise ValueError(f"weights: expected positive numbers; got {dict(weights)}")
    total = sum(weights.values())
    return {name: weights[name] / total for name in names}


def mixed(streams: Mapping[str, Any], weights: Mapping[str, float], *, seed: int, start: int = 0) -> Iterator:
    """Items of endless streams, each position's source drawn by weight: a pure function of seed and position.

        options = dict(window=2048, batch_size=16, seed=0)
        sources = {name: lambda start, s=s: training.batches(s, start=start, **options) for name, s in stores.items()}
        stream = mixed(sources, {"web": 0.55, "books": 0.25, "news": 0.2}, seed=0, start=position)

    Args:
        streams: name -> a function of `start` (items already taken of that source) that gives an iterator.
        weights: name -> share; what they add up to does not matter. `TABLE_8` has the paper's.
        start: position to go on from; a resumed stream goes on with the items that the whole one would give.

    Raises:
        ValueError: naming the argument.
    """
    shares = checked_weights(weights, streams)
    names = list(shares)
    random = np.random.default_rng(seed)
    cumulative = np.cumsum(list(shares.values()))
    taken = np.bincount(
        np.searchsorted(cumulative, random.random(start), side="right").clip(max=len(names) - 1), minlength=len(names)
    )
    iterators = {name: streams[name](int(count)) for name, count in zip(names, taken)}
    return _drawn(iterators, names, cumulative, random)


def _drawn(iterators, names, cumulative, random) -> Iterator:
    while True:
        at = min(int(np.searchsorted(cumulative, random.random(), side="right")), len(names) - 1)
        yield next(iterators[names[at]])


def proportioned(
    stores: Mapping[str, TokenStore], weights: Mapping[str, float], *, tokens: int | None = None
) -> Iterator[Document]:
    """Documents of several stores whose tokens stand in given proportions: what a database is built of.

        database_store = build_store(folder, proportioned(stores, {"web": 3, "books": 1}), tokenizer)

    Of each store its first documents, until its share is full; so what one store lacks is the limit for all. They keep
    their names, by which a training sequence knows its own document in the database.

    Args:
        stores: name -> store, of one tokenizer.
        weights: name -> share.
        tokens: in all, at most; None: as many as the scarcest store allows.

    Raises:
        ValueError: naming the argument.
    """
    shares = checked_weights(weights, stores)
    if len({store.tokenizer_name for store in stores.values()}) > 1:
        raise ValueError(
            "stores: expected stores of one tokenizer; got "
            f"{', '.join(sorted({s.tokenizer_name for s in stores.values()}))}"
        )
    most = min(store.num_tokens / shares[name] for name, store in stores.items())
    if tokens is not None and tokens > most:
        scarce = min(stores, key=lambda name: stores[name].num_tokens / shares[name])
        raise ValueError(f"tokens: expected at most {int(most)}, for which {scarce!r} has its share; got {tokens}")
    return _first_documents(stores, shares, int(most) if tokens is None else tokens)


def _first_documents(stores, shares, tokens: int) -> Iterator[Document]:
    for name, store in stores.items():
        left = round(tokens * shares[name])
        for number, entry in enumerate(store.documents):
            if entry.num_tokens > left:  # one that does not fit is left out; smaller ones may follow
                continue
            left -= entry.num_tokens
            yield Document(entry.name, entry.group, store.document_tokens(number))
