"""Deduplication against the similarity of every pair, computed with sets."""

import numpy as np
import pytest

from retro_model.data import building, dedup
from retro_model.data.building import build_sharded_store
from retro_model.data.dedup import find_leaked, kept_documents
from retro_model.data.store import build_store
from tests.model.data import Given, store_of
from tests.model.test_text import ngrams


def edited(document, rng, changes):
    """Return a copy with that many tokens replaced."""
    document = document.copy()
    document[rng.choice(len(document), changes, replace=False)] = rng.integers(2, 200, changes)
    return document


def similarity(a, b):
    a, b = (ngrams(document.tolist(), 13) for document in (a, b))
    return len(a & b) / len(a | b)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Training documents at similarities from 0 to 1 with the held-out ones, some shorter than 13 tokens."""
    rng = np.random.default_rng(0)
    held = [rng.integers(2, 200, n) for n in (900, 400, 700, 5, 17)]
    held.append(edited(held[0], rng, 4))  # a second match, sometimes the better one
    training = [edited(held[i % 3], rng, changes) for i, changes in enumerate([0, 1, 2, 3, 4, 5, 6, 8, 12, 30] * 3)]
    training += [held[5], held[4][:16]]  # the latter has 4 of 5 13-grams: 0.8 exactly
    training += [held[3], held[3][:4], rng.integers(2, 200, 300), np.concatenate([held[0][:880], held[1]])]
    folder = tmp_path_factory.mktemp("stores")
    return store_of(folder / "t", training), [store_of(folder / "v", held[:2]), store_of(folder / "e", held[2:])]


def test_exactly_the_similar_ones_are_removed(stores, tmp_path):
    training, held = stores
    others = [store.document_tokens(d) for store in held for d in range(len(store.documents))]
    best = [
        max(similarity(training.document_tokens(d), other) for other in others) for d in range(len(training.documents))
    ]
    report = find_leaked(training, held)
    assert [r.document for r in report.removed] == [d for d, value in enumerate(best) if value >= 0.8]
    assert 3 < len(report.removed) < len(best) - 3
    assert [r.jaccard for r in report.removed] == [best[r.document] for r in report.removed]
    kept = build_store(tmp_path / "kept", kept_documents(training, report), Given(), chunk_len=8)
    assert [e.name for e in kept.documents] == [str(d) for d, value in enumerate(best) if value < 0.8]
    assert report.removed[0] == (0, "0", "g", "0", "g", 1.0) and "g/0: 1.000 with g/0" in str(report)


def test_blocks_change_nothing(stores, monkeypatch):
    training, held = stores
    whole = find_leaked(training, held)
    monkeypatch.setattr(dedup, "TOKENS_AT_ONCE", 1000)
    assert len(list(dedup._blocks(training))) > 5
    assert find_leaked(training, held) == whole


def test_shards_and_processes_change_nothing(stores, tmp_path):
    """Training and held-out documents in several shards, with copies in different shards."""
    training, held = stores
    validation = [*held[0].stream(), *held[1].stream()]
    sharded_held = build_sharded_store(tmp_path / "held", [validation[:2], validation[2:], validation[:1]], Given())
    documents = list(training.stream())
    parts = [documents[:7], documents[7:8], documents[8:]]
    sharded = build_sharded_store(tmp_path / "training", parts, Given(), chunk_len=8)
    want = find_leaked(training, held)
    assert find_leaked(sharded, [sharded_held]) == want
    with building.pool(1) as pool:
        assert find_leaked(sharded, [sharded_held], executor=pool) == want
    removed = {r.document for r in want.removed}
    kept = [document.name for document in kept_documents(sharded, want)]
    assert kept == [d.name for i, d in enumerate(documents) if i not in removed]


def test_copies_are_compared_once(tmp_path):
    """300 copies on either side, and a near copy: two pairs, not 90,000; every copy is removed, in order."""
    rng = np.random.default_rng(0)
    text, other = rng.integers(2, 200, 300), rng.integers(2, 200, 300)
    near = edited(text, rng, 1)
    training = store_of(tmp_path / "t", [other, *[text] * 300, near, other])
    report = find_leaked(
        training, [store_of(tmp_path / "v", [*[text] * 299, other[:20]]), store_of(tmp_path / "e", [text])]
    )
    assert [(r.document, r.held_out_name) for r in report.removed] == [(d, "0") for d in range(1, 302)]
    assert report.candidates == 2 and report.documents == 303
    assert [r.jaccard for r in report.removed] == [1.0] * 300 + [similarity(near, text)]


def test_bands_miss_next_to_nothing():
    assert (1 - dedup.THRESHOLD**dedup.BAND) ** (dedup.COLUMNS // dedup.BAND) < 1e-6


def test_stores_of_another_tokenizer_are_refused(stores, tmp_path):
    with pytest.raises(ValueError, match="held_out: expected tokenizer 'given-200'"):
        find_leaked(stores[0], [store_of(tmp_path, [np.arange(9)], vocab_size=90)])
    assert find_leaked(stores[0], []).removed == []
