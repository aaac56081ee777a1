"""Sharded checkpoints in one process: kills and refusals. test_tensor_parallel.py has those of several processes."""

import os
from pathlib import Path

import pytest
import torch

from retro_model import checkpoint
from retro_model.base import disk
from retro_model.training import Settings, make_optimizer, sharded_checkpoint
from tests import killing
from tests.conftest import INTERPRETER
from tests.model import toys

pytestmark = pytest.mark.skipif(INTERPRETER or not torch.distributed.is_available(), reason="needs torch.distributed")

KILLED = """
import shutil
from pathlib import Path
import torch
from tests import killing
from tests.model import toys
from retro_model import training
from retro_model.training import sharded_checkpoint
torch.set_num_threads(1)

def make(value):
    model = toys.Bigram(vocab=3)
    torch.nn.init.constant_(model.table.weight, value)
    return model, training.make_optimizer(model, training.Settings(steps=8, warmup_steps=2))

there, here, steps = Path(sys.argv[1]), Path(sys.argv[2]), []
new = make(2.0)
sharded_checkpoint.save(there / "c", *make(1.0), step=1)
sharded_checkpoint.load(there / "c", *make(0.0))

def prepare():
    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(there, here)

def save():
    sharded_checkpoint.save(here / "c", *new, step=2)

n, every = 1, 3
while True:
    prepare()
    killed = killing.killed_at(n, save)
    model, optimizer = make(0.0)
    steps.append(sharded_checkpoint.load(here / "c", model, optimizer)["step"])
    assert (model.table.weight == steps[-1]).all()
    if not killed:
        break
    n += every
prepare()
for _ in range(2):  # what is left of two killed saves
    killing.killed_at(n // 2, save)
save()
print(n, steps == sorted(steps), *sorted(set(steps)), len(list((here / "c").iterdir())))
shutil.rmtree(here)
"""


def test_a_kill_leaves_the_old_or_the_new(tmp_path):
    """At every third system call of a save over an older checkpoint."""
    if not killing.allowed():
        pytest.skip("this system does not let a process trace its child")
    calls, in_order, *outcomes = killing.in_a_process(KILLED, tmp_path / "there", killing.fast_folder(tmp_path)).split()
    assert int(calls) > 40 and in_order == "True" and " ".join(outcomes) == "1 2 2"


KILLED_OF_TWO = """
import datetime, os, shutil, signal, time
from pathlib import Path
import torch
import torch.distributed as dist
from tests import killing
from tests.model import toys
from retro_model import training
from retro_model.training import sharded_checkpoint
torch.set_num_threads(1)
folder, made = Path(sys.argv[1]), {}

def make(value):
    model = toys.Bigram(vocab=4)
    torch.nn.init.constant_(model.table.weight, value)
    return model

def join(rank):
    options = {"init_method": f"file://{folder / 'group'}", "timeout": datetime.timedelta(seconds=60)}
    dist.init_process_group("gloo", rank=rank, world_size=2, **options)
    model = make(2.0)
    model.shard_units = list
    made["model"] = training.shard(model, dist.init_device_mesh("cpu", (2,)))
    made["optimizer"] = training.make_optimizer(model, training.Settings(steps=8, warmup_steps=2))
    dist.barrier()

def save():
    sharded_checkpoint.save(folder / "c", made["model"], made["optimizer"], step=2)

def other(rank):
    process = os.fork()
    if process:
        return process
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what it says of the one that was killed
    try:
        join(rank)
        save()
    finally:
        os._exit(0)

def run(traced, function):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    sharded_checkpoint.save(folder / "c", make(1.0), step=1)
    process = other(1 - traced)
    try:
        return function(save, lambda: join(traced))
    finally:  # a process of a group that has lost another is ended
        until = time.monotonic() + 1
        while os.waitpid(process, os.WNOHANG) == (0, 0):
            if time.monotonic() > until:
                os.kill(process, signal.SIGKILL)
            time.sleep(0.01)

found = []
for rank, close in ((0, 60), (1, 0)):  # closely where the first one replaces the old checkpoint
    calls = run(rank, killing.calls_of)
    for n in [*range(1, calls - close, 30), *range(calls - close, calls + 1, 3)]:
        killed = run(rank, lambda *a: killing.killed_at(n, *a))
        model = make(0.0)
        step = sharded_checkpoint.load(folder / "c", model)["step"]
        assert (model.table.weight == step).all()
        found.append((killed, step))
sharded_checkpoint.save(folder / "c", make(3.0), step=3)
assert len(list((folder / "c").iterdir())) == 2
print(len([1 for killed, _ in found if killed]), *sorted({step for killed, step in found}))
shutil.rmtree(folder)
"""


def test_a_kill_of_one_of_two_processes_leaves_the_old_or_the_new(tmp_path):
    """A kill of the first or the second, at system calls throughout a save of both."""
    if not killing.allowed():
        pytest.skip("this system does not let a process trace its child")
    killed, *found = killing.in_a_process(KILLED_OF_TWO, killing.fast_folder(tmp_path)).split()
    assert int(killed) >= 30 and found == ["1", "2"]


@pytest.fixture
def saved(tmp_path):
    model = toys.Bigram(vocab=3)
    optimizer = make_optimizer(model, Settings(steps=8, warmup_steps=2))
    return sharded_checkpoint.save(tmp_path / "c", model, optimizer, step=3), model, optimizer


def test_refusals(saved, tmp_path):
    path, model, optimizer = saved
    Error = checkpoint.CheckpointError
    with pytest.raises(Error, match=r"scale.weight is \[3, 3\], the model has \[4, 4\]"):
        sharded_checkpoint.load(path, toys.Bigram(vocab=4))
    with pytest.raises(Error, match=r"state\.json is missing"):
        sharded_checkpoint.load(tmp_path / "none", model)
    one_file = checkpoint.save(tmp_path / "one", model, optimizer)
    with pytest.raises(Error, match="the one-file form"):
        sharded_checkpoint.load(one_file, model)
    with pytest.raises(Error):
        sharded_checkpoint.save(one_file, model, optimizer)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letters.txt").write_text("dear")
    with pytest.raises(Error, match=r"no sharded checkpoint \(it holds letters.txt\)"):
        sharded_checkpoint.save(tmp_path / "mine", model)
    with disk.Lock(path / ".lock", "test"), pytest.raises(disk.Busy, match="is being saved"):
        sharded_checkpoint.save(path, model, optimizer)
    state = sharded_checkpoint.read_state(path)
    assert state["processes"] == 1  # a load compares this number before it restores generators
    shards = path / state["shards"]
    (shards / "more.distcp").write_bytes(b"of another save")
    with pytest.raises(Error, match=r"more\.distcp is none of the checkpoint"):
        sharded_checkpoint.load(path, model, optimizer)
    (shards / "more.distcp").unlink()
    next(shards.glob("*.distcp")).write_bytes(b"short")
    before = model.table.weight.detach().clone()
    with pytest.raises(Error, match="truncated or corrupt"):
        sharded_checkpoint.load(path, model, optimizer)
    assert torch.equal(model.table.weight, before)
    only = sharded_checkpoint.save(tmp_path / "only", model)
    with pytest.raises(Error, match="saved without an optimiser"):
        sharded_checkpoint.load(only, model, optimizer)


def test_shards_are_on_the_disk_before_the_state_that_names_them(saved, monkeypatch):
    path, model, optimizer = saved
    steps, fsync, replace = [], os.fsync, os.replace
    place = lambda p: Path(p).relative_to(path.parent).parts  # noqa: E731
    monkeypatch.setattr(os, "fsync", lambda fd: (steps.append(place(os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (steps.append(("named", *place(b))), replace(a, b)))
    sharded_checkpoint.save(path, model, optimizer, step=4)
    shards = sharded_checkpoint.read_state(path)["shards"]
    named = steps.index(("named", "c", "state.json"))
    files = [("c", shards, file.name) for file in (path / shards).iterdir()]
    assert files and max(map(steps.index, files)) < steps.index(("c", shards)) < steps.index(("c",)) < named
