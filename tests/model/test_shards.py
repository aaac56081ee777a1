"""Folders of shards: one process, a pool and a Dask cluster with a killed worker write the same, equal to one store."""

import functools
import os
import pickle
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from retro_model import training
from retro_model.base import disk
from retro_model.commands import neighbours as evaluate
from retro_model.commands.options import neighbours as parser
from retro_model.data import building, faiss_index
from retro_model.data.building import build_sharded_store
from retro_model.data.database import ChunkDatabase
from retro_model.data.embed import EncoderEmbedder, HashedTfidf
from retro_model.data.neighbours import open_neighbours, precompute_neighbours
from retro_model.data.shards import Joined, ShardedStore, open_store
from retro_model.data.store import TokenStore, build_store
from tests.model.data import Given, random_documents

SHARDS = 4


class Means(torch.nn.Module):
    """An encoder of token ids."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(200, 32)

    def forward(self, input_ids, attention_mask):
        return self.table(input_ids)


def named() -> list[tuple]:
    return [(str(i), "g", ids) for i, ids in enumerate(random_documents(24))]


def source(shard: int, dies: str | None = None):
    """Yield the documents of a shard; the first time the worker is killed on the way if `dies` names a mark file."""
    for i, document in enumerate(named()[shard * 6 : shard * 6 + 6]):
        if dies is not None and i == 4 and not Path(dies).exists():
            Path(dies).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        yield document


class Deadly(HashedTfidf):
    """An embedder that kills its process once."""

    mark: str | None = None

    def __call__(self, chunks, lengths):
        if not Path(self.mark).exists():
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(chunks, lengths)


def built(folder: Path, executor=None, mark: str | None = None):
    """Build store, keys and neighbours of the documents in four shards."""
    sources = [functools.partial(source, s, mark and f"{mark}-store" if s == 2 else None) for s in range(SHARDS)]
    store = build_sharded_store(folder / "store", sources, Given(), executor=executor, chunk_len=8, commit_every=2)
    embedder = HashedTfidf(32).fit(store, executor=executor)
    if mark:
        embedder.__class__, embedder.mark = Deadly, f"{mark}-keys"
    database = ChunkDatabase.build(folder / "keys", store, embedder, executor=executor, block=5)
    return store, database, precompute_neighbours(folder / "neighbours", store, database, 3, block=7, executor=executor)


def content(folder: Path) -> dict[str, bytes]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def cluster():
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as made:
        yield made


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("here")
    return folder, *built(folder)


def test_equals_one_store_of_all_documents(here, tmp_path):
    folder, store, database, neighbours = here
    whole = build_store(tmp_path / "store", named(), Given(), chunk_len=8)
    assert isinstance(open_store(folder / "store"), ShardedStore) and type(open_store(tmp_path / "store")) is TokenStore
    for name in ("tokens", "lengths", "chunk_doc", "chunk_bytes"):
        one, many = getattr(whole, name), getattr(store, name)
        assert np.array_equal(many, one) and many.dtype == one.dtype, name
    assert store.documents == whole.documents and len(store) == len(whole)
    assert np.array_equal(store.document_tokens(17), whole.document_tokens(17))
    embedder = HashedTfidf(32).fit(whole)
    assert embedder.name == HashedTfidf(32).fit(store).name
    alone = ChunkDatabase.build(tmp_path / "keys", whole, embedder)
    assert np.array_equal(database.searcher.keys, alone.searcher.keys)
    want = precompute_neighbours(tmp_path / "neighbours", whole, alone, 3)
    assert np.array_equal(neighbours, want)
    assert np.array_equal(open_neighbours(folder / "neighbours", store, database), want)
    a, b = (
        next(training.batches(s, window=16, batch_size=3, seed=1, neighbours=n, database=d, k=2))
        for s, n, d in ((store, neighbours, database), (whole, want, alone))
    )
    assert all(getattr(a, name).equal(getattr(b, name)) for name in ("tokens", "neighbours", "neighbour_mask"))


def test_a_pool_writes_the_same_bytes_and_is_continued_if_a_worker_dies(here, tmp_path):
    want = content(here[0])
    assert len(want) == SHARDS * (6 + 2 + 2) + 3
    with building.pool(2) as pool:
        built(tmp_path / "pool", pool)
        assert content(tmp_path / "pool") == want
        workers_embed_and_search(here[1], tmp_path, pool)
        with pytest.raises(RuntimeError, match="run the same call again: finished shards"):
            built(tmp_path / "data", pool, mark=str(tmp_path / "died"))
    with pytest.raises(ValueError, match=r"shards\.json: missing, the token store is unfinished"):
        open_store(tmp_path / "data" / "store")
    (tmp_path / "died-keys").touch()
    built(tmp_path / "data", mark=str(tmp_path / "died"))
    assert content(tmp_path / "data") == want


def test_a_cluster_whose_worker_is_killed_writes_the_same_bytes(here, cluster, tmp_path):
    (tmp_path / "died-store").touch()
    with cluster.get_client() as client:
        built(tmp_path / "cluster", client.get_executor(), mark=str(tmp_path / "died"))
    assert (tmp_path / "died-keys").exists() and content(tmp_path / "cluster") == content(here[0])


def workers_embed_and_search(store, folder, pool):
    """Test that workers with a frozen encoder make the keys and neighbours of this process."""
    found = []
    for name, executor in (("here", None), ("there", pool)):
        database = ChunkDatabase.build(folder / name / "keys", store, EncoderEmbedder(Means()), executor=executor)
        found.append(np.array(precompute_neighbours(folder / name / "found", store, database, 3, executor=executor)))
    assert np.array_equal(*found) and found[0].min() >= 0


def test_refusals(here, tmp_path):
    folder, _, database, _ = here
    busy = pytest.raises(disk.Busy, match="the token store is being built")
    with disk.Lock(folder / "store" / ".shards.json.lock", "test"), busy:
        build_sharded_store(folder / "store", [[]], Given())
    other = build_sharded_store(tmp_path / "other", [named()[:5], named()[5:]], Given(), chunk_len=8)
    with pytest.raises(ValueError, match="expected the 2 shards of the store; got 4"):
        ChunkDatabase.open(folder / "keys", other, database.searcher.embedder)
    (tmp_path / "other" / "00001" / "store.json").write_text("{}")
    with pytest.raises(ValueError, match=r"00001/store\.json: missing, or of another shard than shards\.json names"):
        open_store(tmp_path / "other")
    (tmp_path / "other" / "00001" / "store.json").unlink()
    with pytest.raises(ValueError, match=r"00001/store\.json: missing, or of another shard"):
        open_store(tmp_path / "other")
    (tmp_path / "other" / "shards.json").write_text('{"kind": "token store"')
    with pytest.raises(ValueError, match=r"shards\.json: corrupt"):
        open_store(tmp_path / "other")
    with pytest.raises(ValueError, match="sources: expected one per shard"):
        build_sharded_store(tmp_path / "none", [], Given())


def test_joined_arrays_are_indexed_as_one():
    parts = [np.arange(12).reshape(6, 2), np.zeros((0, 2), int), 12 + np.arange(8).reshape(4, 2)]
    joined, whole = Joined(parts, [0, 5, 100]), np.concatenate([parts[0], parts[2] + 100])
    keys = [3, -1, slice(None), slice(2, 8), slice(8, 2), slice(0, 10, 3), [9, 0, 9], np.array([[1, 7], [6, 5]])]
    for key in (*keys, np.arange(10) % 2 == 0, (slice(2, 7), 1)):
        assert np.array_equal(joined[key], whole[key]), key
    assert np.array_equal(list(joined), whole) and joined.shape == whole.shape
    with pytest.raises(IndexError):
        joined[10]


def task(number):
    if number == 3:
        raise KeyError("a fault of the task")
    time.sleep(0.01)
    return number * 10


def test_results_come_in_order_and_a_fault_of_a_task_is_raised():
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as threads:
        assert building.each(task, [(n,) for n in range(3)], threads) == [0, 10, 20]
        with pytest.raises(KeyError, match="a fault of the task"):
            building.each(task, [(n,) for n in range(4)], threads)


def test_the_command_builds_on_the_cluster_it_is_given(cluster, tmp_path, capsys):
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"words of document {number} " * 40)
    common = ["--documents", str(tmp_path / "*.txt"), "--tokenizer", "train:300", "-k", "2", "--chunk-len", "8"]
    common += ["--shards", "2"]
    here = evaluate.run(parser().parse_args([str(tmp_path / "here"), *common]))
    address = ["--cluster", cluster.scheduler_address]
    there = evaluate.run(parser().parse_args([str(tmp_path / "there"), *common, *address]))
    assert np.array_equal(here, there)
    with pytest.raises(SystemExit):
        parser().parse_args([str(tmp_path), *common, "--workers", "1", "--cluster", "tcp://127.0.0.1:1"])
    assert "not allowed with argument" in capsys.readouterr().err


FACTORY = "OPQ8,IVF8,PQ8x4"


def with_copies() -> list[tuple]:
    copies = [np.arange(10, 50)] * 3
    return [(str(i), "g", ids) for i, ids in enumerate([*random_documents(90, seed=2), *copies])]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return build_sharded_store(
        tmp_path_factory.mktemp("s"), [with_copies()[s::3] for s in range(3)], Given(), chunk_len=8
    )


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
    parts = sorted((tmp_path / "d").glob("*.parts/0*"))
    assert [p.name for p in parts] == ["00000", "00001", "00002"]
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
