"""Saving and resuming: a resumed run is bitwise the uninterrupted one, saves are atomic, damage is named."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from retro_model import checkpoint, training
from retro_model.base import disk
from retro_model.training import checkpoint_folder
from tests import killing
from tests.model.checkpoints import SETTINGS, Dropped, equal, make, refused, run, tensors, trained


@pytest.fixture
def saved(tmp_path):
    return trained(tmp_path / "at4")


def test_resuming_is_bitwise_the_uninterrupted_run(saved):
    whole, optimizer = make()
    history = run(whole, optimizer, 0, 8)
    torch.manual_seed(99)  # other weights, other random state: all of it must come from the checkpoint
    resumed = Dropped()
    torch.nn.init.normal_(resumed.table.weight)
    again = training.make_optimizer(resumed, SETTINGS)
    state = checkpoint.load(saved, resumed, again)
    assert (state["step"], state["position"], state["extra"]) == (4, 4, {"seed": 5})
    later = run(resumed, again, state["position"], 8)
    assert later == history[4:]
    assert equal(whole, resumed)
    for p, q in zip(whole.parameters(), resumed.parameters()):
        assert all(torch.equal(v, again.state[q][k]) for k, v in optimizer.state[p].items())


def test_without_the_random_state_it_would_differ(saved):
    """Control of the test above: dropout makes the run depend on the generator."""
    whole, optimizer = make()
    run(whole, optimizer, 0, 8)
    resumed, again = make()
    checkpoint.load(saved, resumed, again)
    torch.manual_seed(1)
    run(resumed, again, 4, 8)
    assert not equal(whole, resumed)


def test_weights_alone(saved):
    model = Dropped()
    torch.nn.init.normal_(model.table.weight)
    before = torch.get_rng_state()
    checkpoint.load(saved, model)
    assert torch.equal(torch.get_rng_state(), before)
    trained, optimizer = make()
    run(trained, optimizer, 0, 4)
    assert equal(model, trained)


def test_a_compiled_model_has_the_same_names(saved, tmp_path):
    model, optimizer = make()
    compiled = torch.compile(model, backend="eager")
    checkpoint.load(saved, compiled, optimizer)
    checkpoint.save(tmp_path / "compiled", compiled, optimizer, step=4)
    assert (
        json.loads((tmp_path / "compiled/state.json").read_text())["optimizer"]
        == json.loads((saved / "state.json").read_text())["optimizer"]
    )


@pytest.mark.parametrize("file", ["model", "optimizer", "state"])
@pytest.mark.parametrize("harm", ["missing", "truncated", "flipped"])
def test_a_broken_file_is_named_and_nothing_is_changed(saved, file, harm):
    path = saved / "state.json" if file == "state" else tensors(saved, file)
    data = bytearray(path.read_bytes())
    if harm == "missing":
        path.unlink()
    elif harm == "truncated":
        path.write_bytes(data[: len(data) // 2])
    else:
        data[0 if file == "state" else -5] ^= 0x10
        path.write_bytes(data)
    assert refused(saved, path.name)


def test_a_failed_write_leaves_the_old_checkpoint(saved, monkeypatch):
    model, optimizer = make()

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        checkpoint.save(saved, model, optimizer, step=9)
    assert checkpoint.read_state(saved)["step"] == 4
    assert [p.name for p in saved.parent.iterdir()] == ["at4"]


def test_the_configuration_is_kept(tmp_path):
    model, optimizer = make()
    model.config = SimpleNamespace(to_dict=lambda: {"d_model": 8})
    assert checkpoint.read_state(checkpoint.save(tmp_path / "c", model, optimizer))["config"] == {"d_model": 8}


def test_saving_over_a_checkpoint_replaces_it(saved):
    model, optimizer = make()
    checkpoint.save(saved, model, optimizer, step=9)
    state = checkpoint.read_state(saved)
    assert state["step"] == 9 and state["format"] == checkpoint_folder.FORMAT
    assert sorted(p.name for p in saved.parent.iterdir()) == ["at4"]


def test_what_a_save_replaces(tmp_path):
    """An empty folder, the leftovers of a first save into it, and nothing else; foreign files in a checkpoint stay."""
    model, optimizer = make()
    (tmp_path / "proj").mkdir()
    (tmp_path / "proj/thesis.tex").write_text("years")
    (tmp_path / "file").write_text("years")
    (tmp_path / "broken").symlink_to(tmp_path / "nothing")
    for name, message in (
        ("proj", r"proj is no checkpoint \(it holds thesis.tex\)"),
        ("file", "file: expected a folder, or nothing; got a file or a broken link"),
        ("broken", "broken: expected a folder"),
    ):
        with pytest.raises(checkpoint.CheckpointError, match=message):
            checkpoint.save(tmp_path / name, model, optimizer)
    assert (tmp_path / "proj/thesis.tex").read_text() == (tmp_path / "file").read_text() == "years"
    (tmp_path / "empty/.new").mkdir(parents=True)
    (tmp_path / "empty/model-0123456789abcdef.safetensors").write_text("part")
    for step in (1, 2):
        checkpoint.save(tmp_path / "empty", model, optimizer, step=step)
        (tmp_path / "empty/notes.txt").write_text("mine")
    assert sorted(p.name.split("-")[0] for p in (tmp_path / "empty").iterdir()) == [
        "model",
        "notes.txt",
        "optimizer",
        "state.json",
    ]
    assert {p.name for p in tmp_path.iterdir()} == {"proj", "file", "broken", "empty"}


def test_a_checkpoint_of_another_version_is_refused_and_kept(saved):
    """Format 1 had plain names and no digest of the state."""
    state = json.loads((saved / "state.json").read_text()) | {"format": 1}
    del state["sha256"]
    for kind in ("model", "optimizer"):
        tensors(saved, kind).rename(saved / f"{kind}.safetensors")
    (saved / "state.json").write_text(json.dumps(state))
    with pytest.raises(checkpoint.CheckpointError, match=r"state\.json: expected format 2; got 1, of another version"):
        checkpoint.load(saved, *make())
    with pytest.raises(checkpoint.CheckpointError, match=r"at4 is no checkpoint \(it holds model\.safetensors\)"):
        checkpoint.save(saved, *make(), step=5)
    assert (saved / "model.safetensors").exists()


KILLED = """
import shutil
from pathlib import Path
import torch
from tests import killing
from tests.model import toys
from retro_model import checkpoint, training
import safetensors.torch  # not in the child, where each call would count
torch.set_num_threads(1)

def make(value):
    model = toys.Bigram(vocab=3)
    torch.nn.init.constant_(model.table.weight, value)
    return model, training.make_optimizer(model, training.Settings(steps=8, warmup_steps=2))

there, here, steps = Path(sys.argv[1]), Path(sys.argv[2]), []
new = make(2.0)
checkpoint.save(there / "c", *make(1.0), step=1)

def prepare():
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir() if sys.argv[3] == "first" else shutil.copytree(there, here)

def check(n):
    model = make(0.0)[0]
    if not (here / "c").exists():
        assert sys.argv[3] == "first"
        steps.append(0)
        return
    steps.append(checkpoint.load(here / "c", model)["step"])
    assert (model.table.weight == steps[-1]).all()

calls = killing.at_every_call(prepare, lambda: checkpoint.save(here / "c", *new, step=2), check)
prepare()
killing.killed_at(calls - 3, lambda: checkpoint.save(here / "c", *new, step=2))
killing.killed_at(calls // 2, lambda: checkpoint.save(here / "c", *new, step=2))
checkpoint.save(here / "c", *new, step=2)
names = [p.name for p in here.iterdir()], sorted(p.name.split("-")[0] for p in (here / "c").iterdir())
assert names == (["c"], ["model", "optimizer", "state.json"]), names
print(calls, steps == sorted(steps), *sorted(set(steps)))
"""


@pytest.mark.parametrize("kind, left", [("first", "0 2"), ("again", "1 2")])
def test_a_kill_at_any_system_call_leaves_the_old_or_the_new(tmp_path, kind, left):
    """Whole, and in that order; the next save removes leftovers of dead processes."""
    if not killing.allowed():
        pytest.skip("this system does not let a process trace its child")
    calls, in_order, *outcomes = killing.in_a_process(
        KILLED, tmp_path / "there", killing.fast_folder(tmp_path), kind
    ).split()
    assert int(calls) > 40 and in_order == "True" and " ".join(outcomes) == left


@pytest.mark.parametrize("again", [False, True])
def test_what_is_named_is_on_the_disk_before_its_name(tmp_path, monkeypatch, again):
    """Order of syncs and renames: tensor files, their names, the state, the state's name."""
    model, optimizer = make()
    if again:
        checkpoint.save(tmp_path / "c", model, optimizer)
        torch.nn.init.normal_(model.table.weight)
    steps, replace, rename, fsync = [], os.replace, os.rename, os.fsync
    place = lambda p: str(Path(p).relative_to(tmp_path)).split("-")[0]  # noqa: E731
    monkeypatch.setattr(
        os, "fsync", lambda fd: (steps.append(("sync", place(os.readlink(f"/proc/self/fd/{fd}")))), fsync(fd))
    )
    monkeypatch.setattr(os, "replace", lambda a, b: (steps.append(("name", place(b))), replace(a, b)))
    monkeypatch.setattr(os, "rename", lambda a, b: (steps.append(("name", place(b))), rename(a, b)))
    checkpoint.save(tmp_path / "c", model, optimizer, step=1)
    fresh = "c/.new" if again else ".c.new"
    written = [
        step for kind in ("model", "optimizer") for step in (("sync", f"{fresh}/{kind}"), ("name", f"{fresh}/{kind}"))
    ]
    state = [("sync", f"{fresh}/state.json.new"), ("name", f"{fresh}/state.json"), ("sync", fresh)]
    placed = [("name", "c/model"), ("name", "c/optimizer"), ("sync", "c"), ("name", "c/state.json"), ("sync", "c")]
    assert steps == written + state + (placed if again else [("name", "c"), ("sync", ".")])


def test_a_second_process_is_refused_by_name(saved):
    model, optimizer = make()
    with (
        disk.Lock(saved.parent / ".at4.lock", "x"),
        pytest.raises(disk.Busy, match=rf"at4 is being saved by process {os.getpid()} on "),
    ):
        checkpoint.save(saved, model, optimizer, step=9)
    assert checkpoint.read_state(saved)["step"] == 4
    checkpoint.save(saved, model, optimizer, step=9)


def test_a_folder_of_two_names_has_one_lock(saved, tmp_path):
    """Two savers of one folder would delete each other's files."""
    model, optimizer = make()
    (tmp_path / "link").symlink_to(saved)
    with disk.Lock(saved.parent / ".at4.lock", "x"), pytest.raises(disk.Busy, match="at4 is being saved"):
        checkpoint.save(tmp_path / "link", model, optimizer, step=9)
    checkpoint.save(tmp_path / "link", model, optimizer, step=9)
    assert checkpoint.read_state(saved)["step"] == 9 and (tmp_path / "link").is_symlink()
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    with pytest.raises(checkpoint.CheckpointError, match="nowhere: expected a folder, or nothing"):
        checkpoint.save(tmp_path / "nowhere", model, optimizer)
    assert not (tmp_path / "absent").exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes that have names")
@pytest.mark.parametrize("name", ["state.json", "model"])
def test_a_pipe_in_a_checkpoint_is_refused_and_not_waited_for(saved, name):
    path = next(saved.glob(f"{name}*"))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(checkpoint.CheckpointError, match=f"{name}.*( is missing|got a pipe)"):
        checkpoint.read_state(saved)
        checkpoint.load(saved, *make())


def test_a_forked_or_dead_process_holds_no_lock(tmp_path):
    """The lock's holder forks and dies; its child lives on."""
    code = """
import os, signal, sys, time
from retro_model.base import disk
lock = disk.Lock(__import__("pathlib").Path(sys.argv[1]), "x")
if os.fork() == 0:
    print("forked", flush=True)
    time.sleep(60)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "lock"],
        cwd=killing.ROOT,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as child:
        assert child.stdout.readline() == b"forked\n"
        child.wait()
        try:
            disk.Lock(tmp_path / "lock", "x").release()
        finally:
            os.killpg(child.pid, 9)
    assert not (tmp_path / "lock").exists()
