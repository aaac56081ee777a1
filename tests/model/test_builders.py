"""Builders that meet or are killed: one builds at a time, and finished parts stay."""

import os
import shutil
import subprocess
import sys

import pytest

from retro_model.base import disk
from retro_model.data import files, store
from retro_model.data.database import ChunkDatabase
from retro_model.data.embed import HashedTfidf
from retro_model.data.neighbours import precompute_neighbours
from retro_model.data.store import TokenStore
from tests import killing
from tests.model.data import build_small as build

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
    with subprocess.Popen(command, cwd=killing.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "building\n"
        with monkeypatch.context() as patch:
            patch.setattr(files, "checksum", lambda *_: pytest.fail("it reads"))
            with pytest.raises(disk.Busy, match=rf"the token store is being built by process {first.pid} on "):
                build(tmp_path / "s")
        with pytest.raises(ValueError, match="unfinished"):
            TokenStore(tmp_path / "s")
        first.communicate("go on\n")
        assert first.returncode == 0
    assert build(tmp_path / "s").identity == build(tmp_path / "other").identity
    assert {p.name for p in (tmp_path / "s").iterdir()} == {*store.NAMES, "store.json", ".store.json.lock"}


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
import shutil
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
    assert int(killing.in_a_process(KILLED, tmp_path / "whole", killing.fast_folder(tmp_path))) > 40
