"""Folders from elsewhere: nothing outside them is touched, contradictions are refused by name."""

import json
import os
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest

from retro_model.data import shards, store
from retro_model.data.database import ChunkDatabase
from retro_model.data.embed import HashedTfidf
from retro_model.data.neighbours import open_neighbours, precompute_neighbours
from retro_model.data.store import TokenStore
from retro_model.data.tokens import Tokenizer
from tests.model.data import build_small as build

DEEP, LONG = "[" * 100_000, '{"version": %s}' % ("9" * 5000)


def forge(manifest: Path, change, **contents):
    """Write a manifest with right checksums and content that no build writes; contents: new bytes of files."""
    for name, data in contents.items():
        (manifest.parent / name.replace("__", ".")).write_bytes(data)
    listing = json.loads(manifest.read_text())
    for name in contents:
        data = contents[name]
        listing["files"][name.replace("__", ".")] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    change(listing)
    manifest.write_text(json.dumps(listing))


def at(*path, to):
    """Return a change of a manifest: the entry at `path`."""

    def change(manifest):
        for key in path[:-1]:
            manifest = manifest[key]
        manifest[path[-1]] = to

    return change


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "victim.txt"
    path.write_text("precious")
    yield path
    assert path.read_text() == "precious"


@pytest.mark.parametrize("complete", [True, False])
def test_a_manifest_that_names_a_file_elsewhere(tmp_path, victim, complete):
    build(tmp_path / "s")
    forge(tmp_path / "s/store.json", at("files", to={"../victim.txt": {"bytes": 0, "crc32": 0}}))
    forge(tmp_path / "s/store.json", at("complete", to=complete))
    for act in (build, TokenStore):
        with pytest.raises(ValueError, match=r"store\.json: expected the files tokens\.bin.*names \.\./victim\.txt"):
            act(tmp_path / "s")


@pytest.mark.parametrize("name", [*store.NAMES, "store.json", ".store.json.lock"])
def test_no_link_is_followed(tmp_path, victim, name):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / name).symlink_to(victim)
    with pytest.raises(ValueError, match=r"expected a regular file; got a link"):
        build(tmp_path / "s")


def test_a_planted_temporary_name_is_replaced(tmp_path, victim):
    (tmp_path / "s").mkdir()
    (tmp_path / "s/store.json.new").symlink_to(victim)
    os.mkfifo(tmp_path / "s/tokens.bin")
    with pytest.raises(ValueError, match=r"tokens\.bin: expected a regular file.*a pipe"):
        build(tmp_path / "s")
    (tmp_path / "s/tokens.bin").unlink()
    build(tmp_path / "s")
    (tmp_path / "s/lengths.bin").unlink()
    (tmp_path / "s/lengths.bin").symlink_to(victim)
    for verify in (True, False):
        with pytest.raises(ValueError, match=r"lengths\.bin: expected a regular file; got a link"):
            TokenStore(tmp_path / "s", verify=verify)


@pytest.mark.parametrize(
    "change, message",
    [
        (at("files", to={}), "the manifest names $"),
        (at("files", to=[]), "manifest is corrupt"),
        (at("settings", to=5), "its settings are not an object"),
        (at("facts", to=None), "manifest is corrupt"),
        (at("complete", to=1), "its settings are not an object, or it does not say whether it is complete"),
        (at("kind", to=["x"]), "expected a token store"),
        (at("settings", "chunk_len", to=0), "its settings are .*'chunk_len': 0"),
        (at("settings", "chunk_len", to=True), "its settings are"),
        (at("settings", "chunk_len", to=16), r"tokens\.bin: expected \d+ bytes for uint16 \[\d+, 16\]"),
        (at("settings", "vocab_size", to="all"), "its settings are"),
        (at("facts", "chunks", to=3), r"tokens\.bin: expected \d+ bytes for uint16 \[3, 8\]"),
        (at("facts", "chunks", to=-1), "its counts are"),
        (at("facts", "documents", to=5), "expected 5 documents as in store.json; got 6"),
        (at("facts", "tokens", to=1), "expected 1 tokens"),
        (at("facts", "bytes", to=0), "expected 0 bytes"),
        (at("facts", to={}), "manifest is corrupt"),
        (at("files", "tokens.bin", "bytes", to=True), "its counts are"),
        (at("files", "tokens.bin", to="all"), "manifest is corrupt"),
        (at("files", "documents.jsonl", "bytes", to=10**30), "documents.jsonl: truncated"),
    ],
)
def test_a_manifest_that_contradicts_its_files(tmp_path, change, message):
    build(tmp_path / "s")
    forge(tmp_path / "s/store.json", change)
    with pytest.raises(ValueError, match=message) as caught:
        TokenStore(tmp_path / "s")
    assert str(caught.value).startswith(str(tmp_path / "s" / ""))


@pytest.mark.parametrize(
    "line", [DEEP, LONG, "5", '["a", "g", 0, 1, 1, "x"]', '["a", "g", true, 1, 1, "x"]', "\xff\xfe"]
)
def test_lines_that_are_no_documents(tmp_path, line):
    build(tmp_path / "s")
    forge(tmp_path / "s/store.json", lambda listing: None, documents__jsonl=line.encode("latin1") + b"\n")
    with pytest.raises(ValueError, match=r"documents\.jsonl: corrupt"):
        TokenStore(tmp_path / "s")


def test_an_unfinished_build_that_contradicts_itself_is_never_read(tmp_path):
    build(tmp_path / "s")
    forge(tmp_path / "s/store.json", lambda made: (made.update(complete=False), made["facts"].update(chunks=1)))
    before = (tmp_path / "s/tokens.bin").read_bytes()
    with pytest.raises(ValueError, match=r"tokens\.bin: expected \d+ bytes"):
        build(tmp_path / "s")
    assert (tmp_path / "s/tokens.bin").read_bytes() == before


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A store, a database with an index, neighbours."""
    folder = tmp_path_factory.mktemp("made")
    rows = build(folder / "s")
    embedder = HashedTfidf(16).fit(rows)
    database = ChunkDatabase.build(folder / "d", rows, embedder, index="IVF2,Flat")
    precompute_neighbours(folder / "n", rows, database, 2)
    return folder, rows, embedder


def opened(folder, rows, embedder):
    database = ChunkDatabase.open(folder / "d", rows, embedder, index="IVF2,Flat")
    return open_neighbours(folder / "n", rows, database)


@pytest.mark.parametrize(
    "text, message",
    [(DEEP, "nested too deeply"), (LONG, "5000 digits"), ("null", "NoneType"), ("", "Expecting")],
)
def test_json_that_hurts_is_a_clear_error(tmp_path, made, text, message):
    folder, _, embedder = made
    shutil.copytree(folder, tmp_path / "m")
    manifests = [*(tmp_path / "m").glob("d/*.faiss.json")]
    manifests += [tmp_path / "m" / name for name in ("d/database.json", "n/neighbours.json", "s/store.json")]
    assert len(manifests) == 4
    for path in manifests:
        good = path.read_bytes()
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"{path.name}: the manifest is corrupt \(.*{message}"):
            opened(tmp_path / "m", TokenStore(tmp_path / "m/s"), embedder)
        path.write_bytes(good)
    opened(tmp_path / "m", TokenStore(tmp_path / "m/s"), embedder)


def test_neighbours_and_keys_that_do_not_fit(tmp_path, made):
    """Arrays of another type, of Python objects and of another shape."""
    folder, rows, embedder = made
    shutil.copytree(folder, tmp_path / "m")
    good, manifest = (tmp_path / "m/n/neighbours.npy").read_bytes(), (tmp_path / "m/n/neighbours.json").read_bytes()
    forge(tmp_path / "m/n/neighbours.json", lambda listing: None, neighbours__npy=good.replace(b"<i8", b"<f8"))
    with pytest.raises(ValueError, match=r"neighbours\.npy: expected an array int64 .*; got float64"):
        opened(tmp_path / "m", rows, embedder)
    for k in (3, "2", None):
        (tmp_path / "m/n/neighbours.json").write_bytes(manifest)
        forge(tmp_path / "m/n/neighbours.json", at("settings", "k", to=k), neighbours__npy=good)
        with pytest.raises(ValueError, match=rf"neighbours\.npy: expected an array int64 \[{len(rows)}, {k!r}\]"):
            opened(tmp_path / "m", rows, embedder)
    keys = (tmp_path / "m/d/keys.npy").read_bytes()
    forge(tmp_path / "m/d/database.json", lambda listing: None, keys__npy=keys.replace(b"<f4", b"|O8"))
    with pytest.raises(ValueError, match=r"keys\.npy: corrupt .*Python objects"):
        ChunkDatabase.open(tmp_path / "m/d", rows, embedder)
    forge(tmp_path / "m/d/database.json", lambda listing: None, keys__npy=keys[: 128 + 64])
    with pytest.raises(ValueError, match=r"keys\.npy: corrupt"):
        ChunkDatabase.open(tmp_path / "m/d", rows, embedder)


def test_a_list_of_shards_that_is_a_link_or_a_pipe(tmp_path, victim):
    path = tmp_path / shards.MANIFEST
    for what, plant in (("link", lambda: path.symlink_to(victim)), ("device or a pipe", lambda: os.mkfifo(path))):
        plant()
        with pytest.raises(ValueError, match=rf"shards\.json: corrupt .*got a {what}"):
            shards.folders(tmp_path, "token store", "store.json")
        path.unlink()


def test_a_tokenizer_is_replaced_at_once(tmp_path, monkeypatch):
    old, new = (Tokenizer.train(["harbour " * 9], size) for size in (258, 262))
    old.save(tmp_path / "t.json")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        new.save(tmp_path / "t.json")
    assert Tokenizer.load(tmp_path / "t.json").name == old.name
    new.save(tmp_path / "t.json")
    assert Tokenizer.load(tmp_path / "t.json").name == new.name


def test_damaged_tokenizers_name_their_file(tmp_path):
    """Truncated or changed anywhere, a tokenizer loads or the error names its file."""
    Tokenizer.train(["def f(x): return x"] * 9, 280).save(tmp_path / "good.json")
    good, rng, path = (tmp_path / "good.json").read_bytes(), np.random.default_rng(0), tmp_path / "t.json"
    texts = [DEEP.encode(), good.replace(b"<pad>", b"<dap>"), b"\x00", b"null"]
    texts.append(good.replace(b'"vocab":{', b'"vocab":{"\\u4e00":280,'))
    for i in range(150):
        spot = int(rng.integers(len(good)))
        texts.append(good[:spot] if i % 2 else good[:spot] + bytes([rng.integers(256)]) + good[spot + 1 :])
    refused = 0
    for text in texts:
        path.write_bytes(text)
        try:
            Tokenizer.load(path)
        except ValueError as error:
            assert str(path) in str(error)
            refused += 1
    assert refused > 100
