"""Neighbours on disk: equal to the search, without the own document, continued, verified."""

from types import SimpleNamespace

import numpy as np
import pytest

from retro_model.data.database import ChunkDatabase
from retro_model.data.embed import HashedTfidf
from retro_model.data.neighbours import open_neighbours, precompute_neighbours
from retro_model.data.store import build_store
from tests.model.data import Given, random_documents, store_of


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    store = store_of(folder / "store", random_documents(20))
    return store, ChunkDatabase.build(folder / "database", store, HashedTfidf(32).fit(store))


def test_they_are_those_of_the_search(tmp_path, parts):
    store, database = parts
    ids = precompute_neighbours(tmp_path, store, database, 3, block=16)
    assert ids.dtype == np.int64 and ids.shape == (len(store), 3)
    assert np.array_equal(np.load(tmp_path / "neighbours.npy"), ids)
    want = database.search(store.chunks(np.arange(len(store))), 3, lengths=store.lengths, exclude_doc=store.chunk_doc)
    assert np.array_equal(ids, want) and not (store.chunk_doc[ids] == store.chunk_doc[:][:, None]).any()
    assert np.array_equal(open_neighbours(tmp_path, store, database), ids)


def test_a_document_is_its_own_by_name_in_another_store(tmp_path, parts):
    """A subset in another order: numbers differ, names agree."""
    store, database = parts
    ordinals = [7, 2, 11]
    named = [(str(d), "g", store.document_tokens(d)) for d in ordinals] + [("new", "g", store.document_tokens(4))]
    subset = build_store(tmp_path / "s", named, Given(), chunk_len=8)
    ids = precompute_neighbours(tmp_path, subset, database, 2)
    owner = np.array([*ordinals, -1])[subset.chunk_doc]
    assert not (store.chunk_doc[ids] == owner[:, None]).any()
    new = np.flatnonzero(subset.chunk_doc == 3)
    # "new" may retrieve the document that it copies
    assert np.array_equal(store.chunks(ids[new, 0]), subset.chunks(new))


@pytest.mark.parametrize("index", [None, "Flat"])
def test_the_stores_own_keys_are_the_queries(tmp_path, parts, index):
    """They were embedded for the database; another store's chunks are embedded by the search."""
    store, _ = parts
    embedder, embedded = HashedTfidf(32).fit(store), []

    class Counting:
        name, dim = embedder.name, embedder.dim

        def __call__(self, chunks, lengths):
            embedded.append(len(chunks))
            return embedder(chunks, lengths)

    database = ChunkDatabase.build(tmp_path / "keys", store, Counting(), index=index)
    assert sum(embedded) == len(store)
    ids = precompute_neighbours(tmp_path / "own", store, database, 3, block=16)
    assert sum(embedded) == len(store)
    want = database.search(store.chunks(np.arange(len(store))), 3, lengths=store.lengths, exclude_doc=store.chunk_doc)
    assert np.array_equal(ids, want)
    embedded.clear()
    other = store_of(tmp_path / "other", random_documents(5, seed=1))
    precompute_neighbours(tmp_path / "others", other, database, 3)
    assert sum(embedded) == len(other)


def test_it_continues_bitwise(tmp_path, parts, monkeypatch):
    store, database = parts
    precompute_neighbours(tmp_path / "whole", store, database, 2, block=16)
    calls, real = [], database.search_rows

    def failing(store, rows, *args, **options):
        calls.append(len(rows))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(store, rows, *args, **options)

    monkeypatch.setattr(database, "search_rows", failing)
    with pytest.raises(KeyboardInterrupt):
        precompute_neighbours(tmp_path / "cut", store, database, 2, block=16)
    with pytest.raises(ValueError, match=r"neighbours\.json: the neighbours is unfinished"):
        open_neighbours(tmp_path / "cut", store, database)
    precompute_neighbours(tmp_path / "cut", store, database, 2, block=16)
    assert sum(calls) == len(store) + 16  # only the failed call was repeated
    for name in ("neighbours.npy", "neighbours.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_what_does_not_fit_is_named(tmp_path, parts):
    store, database = parts
    precompute_neighbours(tmp_path, store, database, 2)
    with pytest.raises(ValueError, match=r"neighbours\.json: built with k=2; now k=3"):
        precompute_neighbours(tmp_path, store, database, 3)
    with pytest.raises(ValueError, match=r"neighbours\.json: built with database="):
        open_neighbours(tmp_path, store, ChunkDatabase(store, SimpleNamespace(name="by words")))
    other = store_of(tmp_path / "other", random_documents(3))
    with pytest.raises(ValueError, match=r"neighbours\.json: built with store="):
        open_neighbours(tmp_path, other, database)
    with pytest.raises(ValueError, match="k: expected from 1 to the database's"):
        precompute_neighbours(tmp_path, store, database, 10_000)
    long = store_of(tmp_path / "long", random_documents(3), chunk_len=4)
    with pytest.raises(ValueError, match="chunk_len: expected the database's 8; got 4"):
        precompute_neighbours(tmp_path, long, database, 2)
    twice = build_store(tmp_path / "twice", [("same", "g", np.arange(9))] * 2, Given(), chunk_len=8)
    with pytest.raises(ValueError, match="two documents 'same' in group 'g'"):
        precompute_neighbours(tmp_path / "n", other, ChunkDatabase(twice, SimpleNamespace(name="by words")), 1)
    path = tmp_path / "neighbours.npy"
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    with pytest.raises(ValueError, match=r"neighbours\.npy: truncated"):
        open_neighbours(tmp_path, store, database)
    path.write_bytes(good[:-1] + b"\x07")
    with pytest.raises(ValueError, match=r"neighbours\.npy: corrupt"):
        open_neighbours(tmp_path, store, database)
