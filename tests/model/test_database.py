"""The database: values, exact and FAISS search, always k neighbours outside a document, continued builds."""

import os
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from retro_model.data import building, faiss_index
from retro_model.data import database as databases
from retro_model.data.database import ChunkDatabase
from retro_model.data.embed import HashedTfidf
from retro_model.data.neighbours import open_neighbours, precompute_neighbours
from retro_model.data.search import DenseSearcher
from retro_model.data.store import build_store
from tests.model.data import Given, random_documents, store_of

FAISS = ["Flat", "IVF4,Flat", "HNSW8"]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Document 3 is 1000 copies of one chunk; that chunk also starts documents 0, 5 and 6."""
    documents = random_documents(30)
    copied = np.arange(20, 28)
    documents[3] = np.tile(copied, 1000)
    for other in (0, 5, 6):
        documents[other] = np.concatenate([copied, documents[other]])
    return store_of(tmp_path_factory.mktemp("store"), documents)


@pytest.fixture(scope="module")
def dense(tmp_path_factory, store):
    return tmp_path_factory.mktemp("dense"), HashedTfidf(32).fit(store)


def opened(kind, dense, store):
    folder, embedder = dense
    return ChunkDatabase.build(folder, store, embedder, index=None if kind == "exact" else kind, nprobe=1)


def own_chunks(store):
    """Return rows and documents of some chunks of every document."""
    rows = np.unique([e.first_chunk + i for e in store.documents for i in range(min(2, e.num_chunks))])
    return rows, np.asarray(store.chunk_doc[rows])


@pytest.mark.parametrize("kind", ["exact", *FAISS])
def test_k_neighbours_outside_the_document(kind, dense, store):
    """For any number of nearer copies; distinct; equal chunks of other documents first."""
    database = opened(kind, dense, store)
    rows, documents = own_chunks(store)
    k = 12
    hits = database.search(store.chunks(rows), k, lengths=store.lengths[rows], exclude_doc=documents)
    assert hits.shape == (len(rows), k) and (hits >= 0).all()
    assert all(len(set(row)) == k for row in hits.tolist())
    assert not (store.chunk_doc[hits] == documents[:, None]).any()
    copies = np.flatnonzero(rows == store.documents[3].first_chunk)[0]
    assert {0, 5, 6} <= set(store.chunk_doc[hits[copies]].tolist())


@pytest.mark.parametrize("kind", ["exact", "Flat"])
def test_dense_search_against_all_distances(kind, dense, store):
    database = opened(kind, dense, store)
    rows, documents = own_chunks(store)
    queries = dense[1](store.chunks(rows), store.lengths[rows]).astype(np.float64)
    keys = np.asarray(np.load(dense[0] / databases.KEYS), np.float64)
    distance = ((queries[:, None] - keys[None]) ** 2).sum(-1)
    distance[store.chunk_doc[:][None] == documents[:, None]] = np.inf
    want = np.sort(distance, axis=1)[:, :5]
    hits = database.search(store.chunks(rows), 5, lengths=store.lengths[rows], exclude_doc=documents)
    # duplicates tie, so distances are compared: both kinds compute in float32, |q|^2 + |k|^2 - 2qk of unit vectors
    np.testing.assert_allclose(np.take_along_axis(distance, hits, 1), want, rtol=0, atol=1e-6)
    plain = database.search(store.chunks(rows), 1, lengths=store.lengths[rows])[:, 0]
    # without a filter a chunk finds itself, or its equal
    assert np.array_equal(store.chunks(plain), store.chunks(rows))


@pytest.mark.parametrize("kind", ["exact", *FAISS])
def test_fewer_candidates_than_k(kind, tmp_path):
    store = store_of(tmp_path / "s", [np.arange(2, 30), np.arange(40, 48)] + [np.arange(50, 58)] * 4)
    database = opened(kind, (tmp_path / "d", HashedTfidf(16).fit(store)), store)
    hits = database.search(store.chunks([0, 4]), 6, exclude_doc=np.array([0, -1]))
    assert sorted(hits[0]) == [-1, 4, 5, 6, 7, 8] and (hits[0] == -1).argmax() == 5
    assert len(set(hits[1])) == 6 and hits[1].min() >= 0 and hits[1, 0] == 4
    assert database.search(store.chunks(np.arange(0)), 2).shape == (0, 2)


@given(ids=st.lists(st.integers(-1, 21), max_size=12), parts=st.integers(1, 4))
def test_values_are_the_chunk_and_its_continuation(ids, parts):
    database, store = VALUES, VALUES.store
    database.passage_chunks = parts
    tokens, mask = database.values(np.array(ids, np.int64).reshape(-1, 1))
    assert tokens.shape == mask.shape == (len(ids), 1, 8 * parts) and tokens.dtype == np.int64 and mask.dtype == bool
    for number, row, real in zip(ids, tokens[:, 0], mask[:, 0]):
        want = []
        if number >= 0:
            entry = store.documents[store.chunk_doc[number]]
            start = (number - entry.first_chunk) * 8
            want = store.document_tokens(store.chunk_doc[number])[start : start + 8 * parts].tolist()
        assert row[real].tolist() == want and not row[~real].any()
        assert real.sum() == len(want)


@pytest.fixture(autouse=True, scope="module")
def _values_store(tmp_path_factory):
    global VALUES
    folder = tmp_path_factory.mktemp("values")
    # -1 must not read chunk 0, which has a next chunk
    store = store_of(folder / "store", [np.arange(2, 2 + n) for n in (17, 1, 8, 9, 16, 60, 40)])
    VALUES = ChunkDatabase.build(folder / "keys", store, HashedTfidf(16).fit(store))
    assert len(VALUES) == 22 and VALUES.passage_chunks == 2
    VALUES.passage_chunks = 3
    assert pickle.loads(pickle.dumps(VALUES)).values([0])[0].shape == (1, 24)


def test_torch_in_torch_out(dense, store):
    database = opened("exact", dense, store)
    chunks = torch.from_numpy(store.chunks(np.arange(3)))
    ids = database.search(chunks, 2)
    tokens, mask = database.values(ids)
    assert ids.dtype == tokens.dtype == torch.int64 and mask.dtype == torch.bool and tokens.shape == (3, 2, 16)
    assert np.array_equal(ids.numpy(), database.search(chunks.numpy(), 2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_exact_search_on_a_gpu(dense, store):
    """Compares distances: equal chunks tie, and rounding orders their ids."""
    rows, documents = own_chunks(store)
    keys = np.load(dense[0] / databases.KEYS)
    queries, distances = dense[1](store.chunks(rows), store.lengths[rows]), []
    for device in ("cpu", "cuda"):
        database = ChunkDatabase.build(dense[0], store, dense[1], device=device)
        hits = database.search(store.chunks(rows), 5, lengths=store.lengths[rows], exclude_doc=documents)
        assert not (store.chunk_doc[hits] == documents[:, None]).any()
        distances.append(((queries[:, None] - keys[hits]) ** 2).sum(-1))
    np.testing.assert_allclose(distances[1], distances[0], rtol=0, atol=1e-5)


def test_a_stopped_build_continues_bitwise(tmp_path, store):
    """Stopped before the first block, then after two more."""
    embedder, calls = HashedTfidf(32).fit(store), iter(range(9))

    class Stopping(HashedTfidf):
        def __call__(self, chunks, lengths):
            if next(calls) in (0, 3):
                raise KeyboardInterrupt
            return super().__call__(chunks, lengths)

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            ChunkDatabase.build(tmp_path / "cut", store, Stopping(32).fit(store), block=128)
    with pytest.raises(ValueError, match=r"database\.json: the chunk database is unfinished"):
        ChunkDatabase.open(tmp_path / "cut", store, embedder)
    assert os.path.getsize(tmp_path / "cut" / "keys.npy") == 128 + 2 * 128 * 32 * 4
    for name in ("cut", "whole"):
        ChunkDatabase.build(tmp_path / name, store, embedder, block=128)
    for name in (databases.KEYS, databases.MANIFEST):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_damage_and_other_parts_are_named(tmp_path, store):
    embedder = HashedTfidf(32).fit(store)
    ChunkDatabase.build(tmp_path / "d", store, embedder)
    with pytest.raises(ValueError, match=r"database\.json: built with embedder='hashed-tfidf-32"):
        ChunkDatabase.open(tmp_path / "d", store, HashedTfidf(32))
    other = store_of(tmp_path / "o", random_documents(3))
    with pytest.raises(ValueError, match=r"database\.json: built with store="):
        ChunkDatabase.build(tmp_path / "d", other, embedder)
    path = tmp_path / "d" / databases.KEYS
    good = path.read_bytes()
    path.write_bytes(good[:-4])
    with pytest.raises(ValueError, match=r"keys\.npy: truncated"):
        ChunkDatabase.open(tmp_path / "d", store, embedder, verify=False)
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 64]))
    with pytest.raises(ValueError, match=r"keys\.npy: corrupt"):
        ChunkDatabase.open(tmp_path / "d", store, embedder)


def test_damage_to_a_kept_index_is_named(tmp_path, store):
    """A flipped bit of an index would change results; the leftovers of a killed run are built again."""
    embedder = HashedTfidf(32).fit(store)
    rows = np.arange(50)

    def search():
        return ChunkDatabase.open(tmp_path / "d", store, embedder, index="IVF4,Flat").search(store.chunks(rows), 3)

    ChunkDatabase.build(tmp_path / "d", store, embedder, index="IVF4,Flat")
    (path,) = (tmp_path / "d").glob("*.faiss")
    want, good = search(), path.read_bytes()
    flipped = good[:-600] + bytes([good[-600] ^ 255]) + good[-599:]
    for damaged, message in ((good[:-9], "truncated"), (b"", "truncated"), (flipped, "corrupt")):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"{path.name}: {message}"):
            search()
    path.with_name(path.name + ".json").unlink()  # killed between the two
    assert np.array_equal(search(), want) and path.read_bytes() == good


def test_the_recall_of_an_index(tmp_path, store, dense):
    """Against all distances, for the same sample; equal chunks are equally good, the own document is excluded."""

    def build(nprobe):
        return ChunkDatabase.build(tmp_path / "d", store, dense[1], index="IVF4,Flat", nprobe=nprobe)

    one, every = build(1).recall, build(4).recall
    assert every == {1: 1.0, 2: 1.0, 10: 1.0} and set(one) == {1, 2, 10} and min(one.values()) < 1
    keys = np.load(tmp_path / "d" / databases.KEYS).astype(np.float64)
    rows = np.sort(np.random.default_rng(0).permutation(len(keys))[: faiss_index.RECALL_SAMPLE])
    distance = ((keys[rows, None] - keys[None]) ** 2).sum(-1)
    distance[store.chunk_doc[:][None] == store.chunk_doc[rows][:, None]] = np.inf
    for k, got in one.items():
        hits = build(1).search(store.chunks(rows), k, lengths=store.lengths[rows], exclude_doc=store.chunk_doc[rows])
        farthest = np.sort(distance, axis=1)[:, k - 1 : k]
        assert got == pytest.approx((np.take_along_axis(distance, hits, 1) <= farthest + 1e-9).mean(), abs=2e-3)
    assert opened("exact", dense, store).recall is None


def test_an_index_is_trained_on_enough_keys():
    assert len(faiss_index._training_rows(10_000, 4)) == 10_000
    assert len(faiss_index._training_rows(1 << 20, 512)) == 1 << 17
    rows = faiss_index._training_rows(1 << 20, 4096)
    assert len(rows) == 4096 * 64 and (np.diff(rows) > 0).all() and rows.max() < 1 << 20


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(k=10_000), ValueError, "k: expected from 1 to the database's"),
        (dict(k=0), ValueError, "k: expected from 1"),
        (dict(chunks=np.zeros((2, 9), int)), ValueError, "chunks: expected .* M=8"),
        (dict(chunks=np.zeros((2, 8))), TypeError, "chunks: expected integers"),
        (dict(chunks=np.full((2, 8), 999)), ValueError, "chunks: expected token ids within 0 .. 199"),
        (dict(lengths=np.array([1])), ValueError, "lengths: expected"),
        (dict(exclude_doc=np.array([0, 99])), ValueError, r"exclude_doc: expected .* -1 .. 29; got .*, 0 .. 99"),
    ],
)
def test_errors_name_the_argument(dense, store, options, error, message):
    database = opened("exact", dense, store)
    with pytest.raises(error, match=message):
        database.search(**{"chunks": np.zeros((2, 8), int), "k": 2} | options)


def test_other_errors(dense, store, tmp_path):
    database = opened("exact", dense, store)
    with pytest.raises(ValueError, match="ids: expected within -1"):
        database.values(np.array([len(store)]))
    with pytest.raises(ValueError, match="index: expected a FAISS index factory string; got 'Nonsense'"):
        opened("Nonsense", dense, store)
    with pytest.raises(ValueError, match="device: expected one that torch can use here; got 'cuda:77'"):
        DenseSearcher(database.searcher.embedder, database.searcher.keys, store.chunk_doc, device="cuda:77")
    with pytest.raises(ValueError, match="index: 'IVF2000,Flat' cannot be trained on 1132 chunks"):
        opened("IVF2000,Flat", dense, store)

    class Broken:
        name, dim = "broken", 1

        def __call__(self, chunks, lengths):
            return np.full((len(chunks), 1), np.nan, np.float32)

    with pytest.raises(ValueError, match="broken: expected finite embeddings; got NaN or infinity"):
        ChunkDatabase.build(tmp_path / "broken", store, Broken())
    Broken.dim = 2
    with pytest.raises(ValueError, match=r"broken: expected float32 \[1132,2\]; got float32 \[1132, 1\]"):
        ChunkDatabase.build(tmp_path / "narrow", store, Broken())


def test_a_single_shard_keeps_its_index_as_many_do(tmp_path, store, monkeypatch):
    """Its lists are a file of their own, mapped; an index that cannot be merged is one file, and an IVF in one file, as
    before 0.2, is refused."""
    embedder, rows = HashedTfidf(32).fit(store), np.arange(60)

    def built(folder, index="IVF4,Flat", **options):
        options = {"index": index, "nprobe": 4} | options
        return ChunkDatabase.build(tmp_path / folder, store, embedder, **options).search(store.chunks(rows), 5)

    def kinds(folder):
        return {p.name.split(".", 1)[1] for p in (tmp_path / folder).glob("[!.]*.faiss*")}

    want = built("new")
    assert kinds("new") == {"faiss", "faiss.lists", "faiss.json"}
    with monkeypatch.context() as patch:
        patch.setattr(building, "mergeable", lambda index: False)
        assert np.array_equal(built("old"), want) and kinds("old") == {"faiss", "faiss.json"}
    with pytest.raises(ValueError, match=r"faiss\.json: expected the files .*\.lists; the manifest names .*\.faiss$"):
        built("old")
    for index in ("IVF4,PQ4x4fs", "IVF4,SQ8,RFlat"):
        assert (built(index[-5:], index) >= 0).all() and kinds(index[-5:]) == {"faiss", "faiss.json"}
    damaged = next((tmp_path / "new").glob("*.lists"))
    good = damaged.read_bytes()
    damaged.write_bytes(good[:600] + bytes([good[600] ^ 255]) + good[601:])
    with pytest.raises(ValueError, match=r"lists: corrupt"):
        ChunkDatabase.open(tmp_path / "new", store, embedder, index="IVF4,Flat", nprobe=4)


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
