"""Sharded checkpoints and other folders from elsewhere: none of their code runs, nothing waits for ever, and every
refusal is an exception that a caller can catch.
"""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys

import pytest
import torch

from retro_model import checkpoint
from retro_model.base import disk
from retro_model.data import shards
from retro_model.data.tokens import Tokenizer
from retro_model.training import Settings, make_optimizer, sharded_checkpoint
from retro_model.training.checkpoint_folder import state_digest
from tests.conftest import INTERPRETER
from tests.model import toys

pytestmark = pytest.mark.skipif(INTERPRETER or not torch.distributed.is_available(), reason="needs torch.distributed")
Error = checkpoint.CheckpointError


class Code:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture
def saved(tmp_path):
    model = toys.Bigram(vocab=3)
    optimizer = make_optimizer(model, Settings(steps=8, warmup_steps=2))
    return sharded_checkpoint.save(tmp_path / "c", model, optimizer, step=3), model, optimizer


def folder_of(path):
    return path / sharded_checkpoint.read_state(path)["shards"]


def sign(path, change=lambda state: None):
    """Change state.json and update its digests."""
    state = json.loads((path / "state.json").read_text())
    del state["sha256"]
    state["files"] = {file.name: disk.sha256_of(file) for file in (path / state["shards"]).iterdir()}
    change(state)
    disk.write_json(path / "state.json", state | {"sha256": state_digest(state)})


def plant(file, what: str):
    """Put a pipe or a link in place of a file."""
    kept = file.with_name(file.name + ".kept")
    file.rename(kept)
    os.mkfifo(file) if what == "pipe" else file.symlink_to(kept)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", ["pipe", "link"])
def test_a_state_that_is_no_file(saved, what):
    path, model, optimizer = saved
    plant(path / "state.json", what)
    with pytest.raises(Error, match=rf"state\.json: expected a regular file.*got a {what}"):
        sharded_checkpoint.load(path, model, optimizer)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", ["pipe", "link"])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_shard_that_is_no_file(saved, tmp_path, what, name):
    path, model, optimizer = saved
    file = folder_of(path) / name
    plant(file, what)
    file.with_name(file.name + ".kept").rename(tmp_path / "kept")
    with pytest.raises(Error, match=rf"{name} is truncated or corrupt.*got a (link|pipe)"):
        sharded_checkpoint.load(path, model, optimizer)


def test_a_folder_of_shards_that_is_a_link(saved, tmp_path):
    path, model, _ = saved
    folder = folder_of(path)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Error, match="is missing or a link"):
        sharded_checkpoint.load(path, model)


def test_an_edited_state_is_noticed(saved):
    path, model, _ = saved
    text = (path / "state.json").read_text()
    (path / "state.json").write_text(text.replace('"step": 3', '"step": 4'))
    with pytest.raises(Error, match=r"state\.json is corrupt: its SHA-256"):
        sharded_checkpoint.load(path, model)
    (path / "state.json").write_text(re.sub(r',\s*"sha256": "\w+"(?=\s*}$)', "", text))
    with pytest.raises(Error, match=r"state\.json is corrupt: its SHA-256"):
        sharded_checkpoint.load(path, model)


@pytest.mark.parametrize("field", sorted(sharded_checkpoint.FIELDS))
@pytest.mark.parametrize("value", ["missing", 1.5, -1])
def test_a_field_of_another_type(saved, field, value):
    path, model, optimizer = saved
    sign(path, lambda state: state.pop(field) if value == "missing" else state.update({field: value}))
    with pytest.raises(Error, match=rf"state\.json is corrupt: {field} is"):
        sharded_checkpoint.load(path, model, optimizer)


def test_no_code_of_the_metadata_runs(saved, tmp_path):
    path, model, optimizer = saved
    file = folder_of(path) / ".metadata"
    found = pickle.loads(file.read_bytes())
    found.planner_data = Code(tmp_path / "ran")
    file.write_bytes(pickle.dumps(found))
    sign(path)
    with pytest.raises(Error, match=r"open is no part of a checkpoint's metadata"):
        sharded_checkpoint.load(path, model, optimizer)
    assert not (tmp_path / "ran").exists()


def test_no_code_of_a_value_runs(saved, tmp_path):
    path, model, optimizer = saved
    folder = folder_of(path)
    found = pickle.loads((folder / ".metadata").read_bytes())
    with open(folder / "__0_0.distcp", "ab") as shard:
        for index, place in found.storage_data.items():
            if index.fqn.endswith(".lr"):
                place.offset = shard.tell()
                torch.save(Code(tmp_path / "ran"), shard)
                place.length = shard.tell() - place.offset
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    sign(path)
    with pytest.raises(Error, match="cannot be read"):
        sharded_checkpoint.load(path, model, optimizer)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"x", pickle.dumps(3), pickle.dumps({"a": [torch.float32, torch.Size([1])]})])
def test_metadata_of_another_kind(saved, content):
    path, model, optimizer = saved
    (folder_of(path) / ".metadata").write_bytes(content)
    sign(path)
    with pytest.raises(Error, match="cannot be read"):
        sharded_checkpoint.load(path, model, optimizer)


def test_metadata_names_files_of_the_folder_alone(saved, tmp_path):
    path, model, optimizer = saved
    folder = folder_of(path)
    shutil.copy(folder / "__0_0.distcp", tmp_path / "other.distcp")
    found = pickle.loads((folder / ".metadata").read_bytes())
    for place in found.storage_data.values():
        place.relative_path = "../../other.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    sign(path)
    with pytest.raises(Error, match="names a file that is none of the checkpoint"):
        sharded_checkpoint.load(path, model, optimizer)


FULL = """
import resource, signal, sys
from pathlib import Path
from tests.model import toys
from retro_model.training import Settings, make_optimizer, sharded_checkpoint
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
model = toys.Bigram(vocab=200)
optimizer = make_optimizer(model, Settings(steps=8, warmup_steps=2))
path = sharded_checkpoint.save(Path(sys.argv[1]) / "c", model, optimizer, step=3)
raised = []
for limit in (100, 20_000, 300_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        sharded_checkpoint.save(path, model, optimizer, step=4)
    except Exception as error:
        raised.append(type(error).__name__ * ("cannot be saved" in str(error)))
print(*raised, sharded_checkpoint.load(path, model, optimizer)["step"], len(list(path.iterdir())))
"""


def test_a_full_disk_is_an_error_that_can_be_caught(tmp_path):
    """Files may grow no further; the earlier checkpoint stays whole, and nothing is left beside it."""
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout.split() == ["OSError"] * 3 + ["3", "2"], done.stderr


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", ["pipe", "link"])
def test_a_list_of_shards_that_is_no_file(tmp_path, what):
    (tmp_path / shards.MANIFEST).write_text("{}")
    plant(tmp_path / shards.MANIFEST, what)
    with pytest.raises(ValueError, match=rf"shards\.json: corrupt .*got a {what}"):
        shards.folders(tmp_path, "token store", "store.json")


def test_a_lock_overwrites_no_file_of_another_name(tmp_path):
    (tmp_path / "precious.txt").write_text("precious")
    os.link(tmp_path / "precious.txt", tmp_path / ".lock")
    with pytest.raises(ValueError, match=r"\.lock: expected a lock file with one name; got one with 2 names"):
        disk.Lock(tmp_path / ".lock", "test")
    assert (tmp_path / "precious.txt").read_text() == "precious"
    os.mkfifo(tmp_path / ".pipe")
    with pytest.raises(ValueError, match="got a pipe"):
        disk.Lock(tmp_path / ".pipe", "test")


def test_a_tokenizer_is_replaced_at_once(tmp_path, monkeypatch):
    old, new = (Tokenizer.train(["harbour " * 9], size) for size in (258, 262))
    old.save(tmp_path / "t.json")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        new.save(tmp_path / "t.json")
    monkeypatch.undo()
    assert Tokenizer.load(tmp_path / "t.json").vocab_size == 258
    new.save(tmp_path / "t.json")
    assert Tokenizer.load(tmp_path / "t.json").name == new.name


@pytest.mark.timeout(60)
def test_a_tokenizer_that_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "t.json")
    with pytest.raises(ValueError, match="got a pipe"):
        Tokenizer.load(tmp_path / "t.json")


def test_a_truncated_tokenizer_ends_a_build_with_its_name(tmp_path):
    from retro_model.apps.evaluate import neighbours

    for number in range(2):
        (tmp_path / f"{number}.txt").write_text("harbour crane " * 50)
    Tokenizer.train(["harbour"], 258).save(tmp_path / "out/tokenizer.json")
    text = (tmp_path / "out/tokenizer.json").read_text()
    (tmp_path / "out/tokenizer.json").write_text(text[: len(text) // 2])
    with pytest.raises(SystemExit, match=r"retro-model neighbours: .*tokenizer\.json: truncated"):
        neighbours.main([str(tmp_path / "out"), "--documents", str(tmp_path / "*.txt"), "--tokenizer", "train:258"])
