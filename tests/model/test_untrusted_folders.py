"""Folders from elsewhere: no code in them runs, nothing waits forever, and every refusal is an exception."""

import os

import pytest

from retro_model.base import disk
from retro_model.data import shards
from retro_model.data.tokens import Tokenizer


def plant(file, what: str):
    """Replace a file by a pipe or a link."""
    kept = file.with_name(file.name + ".kept")
    file.rename(kept)
    os.mkfifo(file) if what == "pipe" else file.symlink_to(kept)


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
    from retro_model.commands.neighbours import command as neighbours

    for number in range(2):
        (tmp_path / f"{number}.txt").write_text("harbour crane " * 50)
    Tokenizer.train(["harbour"], 258).save(tmp_path / "out/tokenizer.json")
    text = (tmp_path / "out/tokenizer.json").read_text()
    (tmp_path / "out/tokenizer.json").write_text(text[: len(text) // 2])
    with pytest.raises(SystemExit, match=r"retro-model neighbours: .*tokenizer\.json: truncated"):
        neighbours.main([str(tmp_path / "out"), "--documents", str(tmp_path / "*.txt"), "--tokenizer", "train:258"])
