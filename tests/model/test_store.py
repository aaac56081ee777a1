"""Tokenizer and token store: exact bytes, rows, damage named; builders that meet or are killed continue."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retro_model.base import disk
from retro_model.data import files
from retro_model.data import store as stores
from retro_model.data.database import ChunkDatabase
from retro_model.data.embed import HashedTfidf
from retro_model.data.neighbours import precompute_neighbours
from retro_model.data.store import Document, TokenStore, build_store
from retro_model.data.tokens import BOS, PAD, Tokenizer
from tests import killing
from tests.fresh import ROOT, python
from tests.model.data import build_small as build
from tests.refusals import refused

TEXTS = ["def f(x):\n    return x + 1\n" * 3, "naïve café €100 😀", "<pad> is <bos>", "x"]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(TEXTS * 4, 300)


def documents(n=12):
    rng = np.random.default_rng(0)
    return [
        Document(f"doc{i}", f"group{i % 3}", TEXTS[i % 4] * (i + 1) if i % 2 else rng.integers(2, 258, 5 * i + 1))
        for i in range(n)
    ]


def test_rows_and_bytes(tmp_path, tokenizer):
    store = build_store(tmp_path / "s", documents(), tokenizer, chunk_len=8)
    assert [(e.name, e.group) for e in store.documents] == [(d.name, d.group) for d in documents()]
    row = 0
    for number, document in enumerate(documents()):
        ids = tokenizer.encode(document.content) if isinstance(document.content, str) else document.content
        assert store.document_tokens(number).tolist() == ids.tolist()
        entry = store.documents[number]
        assert (entry.first_chunk, entry.num_tokens) == (row, len(ids))
        if isinstance(document.content, str):
            assert entry.num_bytes == len(document.content.encode())
        for start in range(0, len(ids), 8):
            part = ids[start : start + 8]
            assert store.tokens[row].tolist() == [*part, *[PAD] * (8 - len(part))]
            assert (store.lengths[row], store.chunk_doc[row]) == (len(part), number)
            assert store.chunk_bytes[row] == len(tokenizer.decode_bytes(part))
            row += 1
    assert len(store) == row == len(store.lengths) == len(store.chunk_bytes)
    assert store.num_bytes == store.chunk_bytes.sum() and store.num_tokens == store.lengths.sum()
    assert store.tokens.dtype == np.uint16 and not store.tokens.flags.writeable
    again = build_store(tmp_path / "t", store.stream(), tokenizer, chunk_len=8)
    assert np.array_equal(again.tokens, store.tokens) and again.num_bytes == store.num_bytes


def test_bos_costs_no_bytes(tmp_path, tokenizer):
    store = build_store(tmp_path, [("a", "g", "abc")], tokenizer, chunk_len=4, bos=True)
    assert store.tokens[0, 0] == BOS and store.num_bytes == 3
    nothing = build_store(tmp_path / "n", [("a", "g", np.array([BOS]))], tokenizer, chunk_len=4)
    assert TokenStore(nothing.folder).num_bytes == 0


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_round_trips_and_its_bytes_add_up(text):
    tokenizer = TRAINED
    ids = tokenizer.encode(text)
    assert tokenizer.byte_lengths[ids].sum() == len(text.encode())
    assert tokenizer.decode(ids) == text and not set(ids.tolist()) & {PAD, BOS}


TRAINED = Tokenizer.train(TEXTS, 280)


def test_special_tokens_in_text_are_text(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "t.json")
    for one in (tokenizer, Tokenizer.load(tmp_path / "t.json")):
        ids = one.encode("<pad><bos>", bos=True)
        assert ids[0] == BOS and PAD not in ids and BOS not in ids[1:]
        assert one.byte_lengths[ids].sum() == 10 and one.decode(ids) == "<pad><bos>"
        assert one.name == tokenizer.name
    good = (tmp_path / "t.json").read_bytes()
    for damaged in (good[:100], b"", b"{}"):
        (tmp_path / "t.json").write_bytes(damaged)
        refused(r"t\.json: truncated, corrupt or no tokenizer", Tokenizer.load, tmp_path / "t.json")
    refused("texts: expected an iterable of str; got one str", Tokenizer.train, "abc", 300, error=TypeError)
    refused("vocab_size: expected at least 258", Tokenizer.train, TEXTS, 257)
    refused("texts: expected at least one; got none", Tokenizer.train, [], 300)


def content(folder: Path) -> dict:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".lock"}


def interrupted(folder):
    def stream():
        yield from documents()[:7]
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(stores, "ENCODED_AT_ONCE", 1)
        build_store(folder, stream(), TRAINED, chunk_len=8, commit_every=2)


def test_continuing_reads_but_does_not_encode_again(tmp_path):
    """The result is bitwise the store of an uninterrupted build; a test below kills a build at any call."""
    interrupted(tmp_path / "cut")
    refused("unfinished; run the same build again", TokenStore, tmp_path / "cut")
    seen = []

    class Counting:
        name, vocab_size, byte_lengths = TRAINED.name, TRAINED.vocab_size, TRAINED.byte_lengths

        def encode_batch(self, texts):
            seen.extend(texts)
            return TRAINED.encode_batch(texts)

    build_store(tmp_path / "cut", documents(), Counting(), chunk_len=8)
    assert seen == [d.content for d in documents()[6:] if isinstance(d.content, str)]
    build_store(tmp_path / "whole", documents(), TRAINED, chunk_len=8)
    assert content(tmp_path / "cut") == content(tmp_path / "whole")


def test_other_input_or_settings_are_refused(tmp_path):
    interrupted(tmp_path)
    other = documents()
    other[4] = other[4]._replace(content="changed")
    refused("document 4 was 'doc4'; now 'doc4' or of other content", build_store, tmp_path, other, TRAINED, chunk_len=8)
    with pytest.raises(ValueError, match="holds 6 documents; now the input ends after 3"):
        build_store(tmp_path, documents()[:3], TRAINED, chunk_len=8)
    refused("built with chunk_len=8; now chunk_len=16", build_store, tmp_path, documents(), TRAINED, chunk_len=16)
    whole = build_store(tmp_path, documents(), TRAINED, chunk_len=8)
    assert build_store(tmp_path, documents(), TRAINED, chunk_len=8).identity == whole.identity
    with pytest.raises(ValueError, match="the store is complete without document 'doc12'"):
        build_store(tmp_path, documents(13), TRAINED, chunk_len=8)


@pytest.mark.parametrize("name", [*stores.NAMES, stores.MANIFEST])
def test_damage_is_named(tmp_path, name):
    store = build_store(tmp_path, documents(), TRAINED, chunk_len=8)
    path = tmp_path / name
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    refused(f"{name}: (truncated|the manifest is corrupt)", TokenStore, tmp_path, verify=False)
    path.write_bytes(good[:9] + bytes([good[9] ^ 1]) + good[10:])
    refused(f"{name}: (corrupt|the manifest is corrupt|expected a token store)", TokenStore, tmp_path)
    path.unlink()
    refused(f"{name}: (missing|no token store here)", TokenStore, tmp_path, error=(ValueError, FileNotFoundError))
    path.write_bytes(good)
    assert TokenStore(tmp_path).identity == store.identity


def test_damage_to_an_unfinished_build_is_named(tmp_path):
    interrupted(tmp_path)
    path = tmp_path / "tokens.bin"
    path.write_bytes(b"\xff" + path.read_bytes()[1:])
    refused(r"tokens\.bin: corrupt", build_store, tmp_path, documents(), TRAINED, chunk_len=8)


@pytest.mark.parametrize(
    "content, error, message",
    [
        ("", ValueError, "document 'bad': expected at least one token"),
        (np.zeros(0, np.int64), ValueError, "document 'bad': expected at least one token"),
        (np.array([1, 9999]), ValueError, r"document 'bad': expected token ids below \d+; got 1 .. 9999"),
        ([1.5], TypeError, "document 'bad': expected text or integer token ids; got float64"),
        (b"bytes", TypeError, "document 'bad': expected text or integer"),
        ("\ud800", ValueError, "document 'bad': expected text that UTF-8 can hold"),
        (np.ones((2, 2), int), ValueError, "document 'bad': .* in one dimension"),
    ],
)
def test_bad_documents_are_named(tmp_path, content, error, message):
    refused(message, build_store, tmp_path, [("good", "g", "abc"), ("bad", "g", content)], TRAINED, error=error)


def test_an_empty_store_is_built_only_on_request(tmp_path):
    store = build_store(tmp_path / "none", [], TRAINED, chunk_len=8, allow_empty=True)
    assert len(store) == 0 and store.tokens.shape == (0, 8)
    for nothing in ([], iter(())):
        refused("documents: expected at least one; got none", build_store, tmp_path / "refused", nothing, TRAINED)
    assert os.listdir(tmp_path) == ["none"]
    refused("chunk_len: expected an int", build_store, tmp_path / "bad", [], TRAINED, chunk_len=0)


BUILDER = """
import sys
from tests.model.data import random_documents, Given
from retro_model.data import store
store.ENCODED_AT_ONCE = 1
def documents():
    for i, document in enumerate(random_documents(6)):
        if i == 4:
            print("building", flush=True)
            sys.stdin.readline()
        yield str(i), "g", document
store.build_store(sys.argv[1], documents(), Given(200), chunk_len=8, commit_every=1)
"""


@pytest.mark.parametrize("begun", [False, True])
def test_a_second_builder_is_refused_at_once(tmp_path, begun, monkeypatch):
    """It is refused before it reads partial files. It does not disturb the first builder, which finishes."""
    if begun:  # leftovers of an earlier, killed run
        (tmp_path / "s").mkdir()
        (tmp_path / "s/.store.json.lock").write_text("process 1 on nowhere\n")
    command = [sys.executable, "-c", BUILDER, tmp_path / "s"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "building\n"
        with monkeypatch.context() as patch:
            patch.setattr(files, "checksum", lambda *_: pytest.fail("it reads"))
            with pytest.raises(disk.Busy, match=rf"the token store is being built by process {first.pid} on "):
                build(tmp_path / "s")
        refused("unfinished", TokenStore, tmp_path / "s")
        first.communicate("go on\n")
        assert first.returncode == 0
    assert build(tmp_path / "s").identity == build(tmp_path / "other").identity
    assert {p.name for p in (tmp_path / "s").iterdir()} == {*stores.NAMES, "store.json", ".store.json.lock"}


def test_a_lock_has_one_holder_and_its_file_stays(tmp_path):
    """The file is never removed, because a process that waits for its name could then lock another file."""
    for _ in range(2):
        with disk.Lock(tmp_path / "lock", "x"), pytest.raises(disk.Busy, match=f"x by process {os.getpid()} on"):
            disk.Lock(tmp_path / "lock", "x")
        assert (tmp_path / "lock").exists()


def test_other_builders_are_refused_too(tmp_path):
    rows = build(tmp_path / "s")
    embedder = HashedTfidf(16).fit(rows)
    ChunkDatabase.build(tmp_path / "indexed", rows, embedder, index="IVF2,Flat")
    (tmp_path / "d").mkdir()
    busy = pytest.raises(disk.Busy, match=r"database\.json: the chunk database is being")
    with disk.Lock(tmp_path / "d/.database.json.lock", "x"), busy:
        ChunkDatabase.build(tmp_path / "d", rows, embedder)
    database = ChunkDatabase.build(tmp_path / "d", rows, embedder)
    (name,) = {p.name for p in (tmp_path / "indexed").glob("*.faiss.json")}
    with disk.Lock(tmp_path / f"d/.{name}.lock", "x"), pytest.raises(disk.Busy, match="the index is being built"):
        ChunkDatabase.open(tmp_path / "d", rows, embedder, index="IVF2,Flat")
    (tmp_path / "n").mkdir()
    busy = pytest.raises(disk.Busy, match="the neighbours is being built")
    with disk.Lock(tmp_path / "n/.neighbours.json.lock", "x"), busy:
        precompute_neighbours(tmp_path / "n", rows, database, 1)
    shutil.copytree(tmp_path / "d", tmp_path / "e")
    with disk.Lock(tmp_path / "e/.database.json.lock", "x"):
        ChunkDatabase.build(tmp_path / "e", rows, embedder)  # complete: it is only read


KILLED = """
import shutil, sys
from pathlib import Path
from tests import killing
from tests.model.data import build_small as build
from tests.model.data import store_of
import numpy as np
whole, here = Path(sys.argv[1]), Path(sys.argv[2])
documents = [np.arange(2, 2 + n) for n in (9, 8, 3)]
act = lambda: store_of(here, documents)
content = lambda folder: {p.name: p.read_bytes() for p in folder.iterdir() if p.name != ".store.json.lock"}
store_of(whole, documents)

def check(n):
    act()
    assert content(here) == content(whole), n

print(killing.at_every_call(lambda: shutil.rmtree(here, ignore_errors=True), act, check))
"""


def test_a_build_killed_at_any_system_call_continues_bitwise(tmp_path):
    if not killing.allowed():
        pytest.skip("this system does not let a process trace its child")
    where = tmp_path / "whole", killing.fast_folder(tmp_path)
    assert int(python("-c", KILLED, *where, **killing.ONE_THREAD)) > 40
