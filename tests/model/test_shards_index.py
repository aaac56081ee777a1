"""Search of sharded databases: an index filled in parallel and merged on disk."""

import pickle
import shutil

import numpy as np
import pytest

from retro_model.base import disk
from retro_model.data import building, faiss_index
from retro_model.data.building import build_sharded_store
from retro_model.data.database import ChunkDatabase
from retro_model.data.embed import HashedTfidf
from tests.model.data import Given, random_documents

FACTORY = "OPQ8,IVF8,PQ8x4"


def named() -> list[tuple]:
    copies = [np.arange(10, 50)] * 3
    return [(str(i), "g", ids) for i, ids in enumerate([*random_documents(90, seed=2), *copies])]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return build_sharded_store(tmp_path_factory.mktemp("s"), [named()[s::3] for s in range(3)], Given(), chunk_len=8)


@pytest.fixture(scope="module")
def embedder(store):
    return HashedTfidf(32).fit(store)


def queries(store, count=60):
    rows = np.linspace(0, len(store) - 1, count).astype(int)
    return {"chunks": store.chunks(rows), "k": 4, "lengths": store.lengths[rows], "exclude_doc": store.chunk_doc[rows]}


def table_of(index) -> int:
    """Return the size of the table that a search by PQ needs."""
    import faiss

    return faiss.downcast_index(faiss.extract_index_ivf(index)).precomputed_table.size()


@pytest.mark.filterwarnings("ignore")
def test_an_index_of_shards_is_merged_moved_sent_and_continued(tmp_path, store, embedder, monkeypatch):
    options = {"index": FACTORY, "nprobe": 8}
    with monkeypatch.context() as patch:  # killed before the merge: the parts are reused
        patch.setattr(building, "_merge", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            ChunkDatabase.build(tmp_path / "d", store, embedder, key_type="float16", **options)
    parts = sorted((tmp_path / "d").glob("[!.]*.part-*"))
    assert [p.name[-5:] for p in parts] == ["00000", "00001", "00002"]
    parts[1].unlink()
    times = [p.stat().st_mtime_ns for p in (parts[0], parts[2])]
    filled, merge = [], building._merge
    noted = lambda *a: (filled.extend(p.stat().st_mtime_ns for p in a[1]), merge(*a))  # noqa: E731
    monkeypatch.setattr(building, "_merge", noted)
    part = building._read(parts[0])
    assert part.ntotal and not table_of(part)  # parts have no tables for search
    built = ChunkDatabase.build(tmp_path / "d", store, embedder, key_type="float16", **options)
    assert table_of(built.searcher.index)
    assert [filled[0], filled[2]] == times  # only the missing one was filled again
    kept = {p.name.rsplit(".", 1)[-1] for p in (tmp_path / "d").iterdir() if p.name.startswith("OPQ")}
    assert kept == {"faiss", "json", "lists"} and built.recall[2] > 0.9
    assert (tmp_path / "d" / "00000" / "keys.npy").stat().st_size < len(store.shards[0]) * 64 + 200
    hits = built.search(**queries(store))
    assert (hits >= 0).all() and (store.chunk_doc[hits] != queries(store)["exclude_doc"][:, None]).all()
    keys, asked = built.searcher.keys, embedder(queries(store)["chunks"], queries(store)["lengths"])
    away = ((keys[hits].astype(np.float64) - asked[:, None]) ** 2).sum(-1)
    assert (np.diff(away, axis=1) >= 0).all()  # in the order of exact distances
    shutil.move(tmp_path / "d", tmp_path / "elsewhere")
    moved = ChunkDatabase.open(tmp_path / "elsewhere", store, embedder, **options)
    assert np.array_equal(moved.search(**queries(store)), hits) and moved.recall == built.recall
    assert np.array_equal(pickle.loads(pickle.dumps(moved)).search(**queries(store)), hits)
    manifest = next((tmp_path / "elsewhere").glob("*.faiss.json"))
    with disk.Lock(manifest.with_name(f".{manifest.name}.lock"), "test"):
        ChunkDatabase.open(tmp_path / "elsewhere", store, embedder, **options)  # a complete one needs no lock
    next((tmp_path / "elsewhere").glob("*.lists")).write_bytes(b"short")
    with pytest.raises(ValueError, match=r"lists: truncated or corrupt"):
        ChunkDatabase.open(tmp_path / "elsewhere", store, embedder, **options)


def test_an_index_goes_to_the_gpu_where_faiss_can(monkeypatch):
    """With a FAISS that claims to support GPUs: this one is for CPUs, so the index stays there."""
    import faiss

    index = faiss.IndexFlatL2(32)
    assert faiss_index._on_device(index, "cuda:1") is index
    monkeypatch.setattr(faiss, "StandardGpuResources", lambda: "resources", raising=False)
    monkeypatch.setattr(faiss, "index_cpu_to_gpu", lambda *given: given, raising=False)
    assert faiss_index._on_device(index, "cuda:1") == ("resources", 1, index)
    assert faiss_index._on_device(index, "cuda")[1] == 0 and faiss_index._on_device(index, "cpu") is index


@pytest.mark.parametrize("index", ["HNSW8", "IVF4,Flat"])
def test_an_index_is_written_before_it_goes_to_the_gpu(tmp_path, store, embedder, monkeypatch, index):
    """FAISS cannot write an index that is on a GPU."""

    def moved(index, device):
        assert [path for path in tmp_path.glob("*.faiss.json") if disk.read_json(path.read_bytes())["complete"]]
        return index

    monkeypatch.setattr(faiss_index, "_on_device", moved)
    assert ChunkDatabase.build(tmp_path, store, embedder, index=index).recall[1] > 0
