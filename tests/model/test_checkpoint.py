"""Saving and resuming: a resumed run is bitwise the uninterrupted one, saves are atomic, damage is named."""

import json
import os
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from retro_model import checkpoint, training
from retro_model.base import disk
from tests import killing
from tests.conftest import INTERPRETER
from tests.fresh import python
from tests.model import toys
from tests.refusals import refused

pytestmark = pytest.mark.skipif(INTERPRETER or not torch.distributed.is_available(), reason="needs torch.distributed")
Error = checkpoint.CheckpointError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


SETTINGS = training.Settings(steps=8, warmup_steps=2, max_lr=1e-2)


class Dropped(toys.Bigram):
    """A model that draws random numbers, ties two parameters and keeps a buffer."""

    def __init__(self):
        super().__init__(seed=3)
        self.again = self.scale
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens, neighbours=None, *, neighbour_mask=None):
        self.calls += 1
        return nn.functional.dropout(super().forward(tokens), 0.1, self.training)


def run(model, optimizer, start, stop):
    stream = training.batches(toys.random_store(41), window=8, batch_size=2, seed=5, start=start)
    return toys.untimed(training.train(model, optimizer, stream, SETTINGS, start=start, stop=stop))


def make():
    torch.manual_seed(7)
    model = Dropped()
    return model, training.make_optimizer(model, SETTINGS)


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def shard(saved):
    """Return the only file of shards of a checkpoint."""
    (path,) = saved.glob("shards-*/*.safetensors")
    return path


def refuses(saved, match) -> bool:
    """Check that a load raises an error with that name and changes neither model, optimiser nor generator."""
    model, optimizer = make()
    before, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    options = optimizer.state_dict()
    refused(match, checkpoint.load, saved, model, optimizer, error=Error)
    same = all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    same = same and torch.equal(random, torch.get_rng_state())
    return same and not optimizer.state and optimizer.state_dict() == options


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint of four steps."""
    model, optimizer = make()
    run(model, optimizer, 0, 4)
    folder = tmp_path_factory.mktemp("trained") / "at4"
    return checkpoint.save(folder, model, optimizer, step=4, position=4, extra={"seed": 5})


@pytest.fixture
def saved(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "at4")


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
    checkpoint.load(saved, resumed, again)
    torch.manual_seed(1)  # dropout depends on the generator
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
    both = [checkpoint.read_state(folder)["optimizer"] for folder in (tmp_path / "compiled", saved)]
    assert both[0] == both[1]


@pytest.mark.parametrize("file", ["shard", "state"])
@pytest.mark.parametrize("harm", ["missing", "truncated", "flipped"])
def test_a_broken_file_is_named_and_nothing_is_changed(saved, file, harm):
    path = saved / "state.json" if file == "state" else shard(saved)
    data = bytearray(path.read_bytes())
    if harm == "missing":
        path.unlink()
    elif harm == "truncated":
        path.write_bytes(data[: len(data) // 2])
    else:
        data[0 if file == "state" else -5] ^= 0x10
        path.write_bytes(data)
    assert refuses(saved, path.name)


@pytest.mark.parametrize("name, value", [("step", "3"), ("step", -1), ("position", 1.5)])
def test_a_count_that_no_load_would_accept_is_refused(tmp_path, name, value):
    with pytest.raises((TypeError, ValueError), match=f"{name}: expected an int"):
        checkpoint.save(tmp_path / "model", torch.nn.Linear(1, 1), **{name: value})
    assert not (tmp_path / "model").exists()


def test_the_configuration_is_kept(tmp_path):
    model, optimizer = make()
    model.config = SimpleNamespace(to_dict=lambda: {"d_model": 8})
    assert checkpoint.read_state(checkpoint.save(tmp_path / "c", model, optimizer))["config"] == {"d_model": 8}


def test_a_save_replaces_checkpoints_and_empty_folders_only(tmp_path):
    """It removes the leftovers of a killed save. Foreign files in a checkpoint stay."""
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
        refused(message, checkpoint.save, tmp_path / name, model, optimizer, error=Error)
    assert (tmp_path / "proj/thesis.tex").read_text() == (tmp_path / "file").read_text() == "years"
    (tmp_path / "empty" / f"shards-{'0' * 32}").mkdir(parents=True)
    for step in (1, 2):
        checkpoint.save(tmp_path / "empty", model, optimizer, step=step)
        (tmp_path / "empty/notes.txt").write_text("mine")
    assert [name.split("-")[0] for name in names(tmp_path / "empty")] == ["notes.txt", "shards", "state.json"]
    assert {p.name for p in tmp_path.iterdir()} == {"proj", "file", "broken", "empty"}


@pytest.mark.parametrize("form", [2, "sharded-2"])
def test_a_checkpoint_of_another_version_is_refused_and_kept(saved, form):
    state = json.loads((saved / "state.json").read_text())
    (saved / "state.json").write_text(json.dumps(state | {"format": form}))
    for call in (lambda: checkpoint.load(saved, *make()), lambda: checkpoint.save(saved, *make(), step=5)):
        refused(rf"state\.json: expected format 3; got {form!r}, of another version", call, error=Error)
    assert shard(saved).exists()


KILLED = """
import shutil, sys
from pathlib import Path
import torch
from tests import killing
from tests.model import toys
from retro_model import checkpoint, training
torch.set_num_threads(1)

def make(value):
    model = toys.Bigram(vocab=3)
    torch.nn.init.constant_(model.table.weight, value)
    return model, training.make_optimizer(model, training.Settings(steps=8, warmup_steps=2))

there, here = Path(sys.argv[1]), Path(sys.argv[2])
new = make(2.0)
checkpoint.save(there / "c", *make(1.0), step=1)
checkpoint.load(there / "c", *make(0.0))

def prepare():
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir() if first else shutil.copytree(there, here)

def save():
    checkpoint.save(here / "c", *new, step=2)

def step_left():
    if not (here / "c" / "state.json").exists():
        assert first
        return 0
    model, optimizer = make(0.0)
    step = checkpoint.load(here / "c", model, optimizer)["step"]
    assert (model.table.weight == step).all()
    return step

for first in (True, False):
    prepare()
    calls, steps = killing.calls_of(save), []
    for n in (calls // 4, calls // 2, calls - 12, calls - 2):
        prepare()
        assert killing.killed_at(n, save)
        steps.append(step_left())
    save()  # over the leftovers of the last kill
    steps.append(step_left())
    left = len([p for p in (here / "c").iterdir() if p.name != ".lock"])
    print(calls > 40, steps == sorted(steps), *sorted(set(steps)), left)
shutil.rmtree(here)
"""


def test_a_kill_leaves_the_old_checkpoint_or_the_new_one(tmp_path):
    """At four places of a first save and of a second one; the next save removes the leftovers."""
    if not killing.allowed():
        pytest.skip("this system does not let a process trace its child")
    where = tmp_path / "there", killing.fast_folder(tmp_path)
    said = python("-c", KILLED, *where, **killing.ONE_THREAD)
    assert said.splitlines() == ["True True 0 2 2", "True True 1 2 2"]


def test_shards_are_on_the_disk_before_the_state_that_names_them(saved, monkeypatch):
    model, optimizer = make()
    steps, fsync, replace = [], os.fsync, os.replace
    place = lambda p: Path(p).relative_to(saved).parts  # noqa: E731
    monkeypatch.setattr(os, "fsync", lambda fd: (steps.append(place(os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (steps.append(("named", *place(b))), replace(a, b)))
    checkpoint.save(saved, model, optimizer, step=5)
    shards = checkpoint.read_state(saved)["shards"]
    named = steps.index(("named", "state.json"))
    assert steps.index((shards, shard(saved).name)) < steps.index((shards,)) < steps.index(()) < named


def test_a_full_disk_is_an_error_that_can_be_caught(tmp_path, monkeypatch):
    """Files may grow no further, or cannot be synced. The earlier checkpoint stays whole, and no leftover remains."""
    model = toys.Bigram(vocab=200)
    optimizer = training.make_optimizer(model, SETTINGS)
    path = checkpoint.save(tmp_path / "c", model, optimizer, step=3)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for limit in (100, 20_000, 150_000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            refused("cannot be saved", checkpoint.save, path, model, optimizer, step=4, error=OSError)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(os, "fsync", full)
        checkpoint.save(path, model, optimizer, step=9)
    assert names(path) == [shard(path).parent.name, "state.json"]
    assert checkpoint.load(path, model, optimizer)["step"] == 3
    checkpoint.save(path, model, optimizer, step=9)
    assert checkpoint.load(path, model, optimizer)["step"] == 9 and len(names(path)) == 2


def test_a_second_process_is_refused_by_name(saved, tmp_path):
    model, optimizer = make()
    (tmp_path / "link").symlink_to(saved)
    for path in (saved, tmp_path / "link"):  # A folder of two names has one lock.
        busy = pytest.raises(disk.Busy, match=rf"is being saved by process {os.getpid()} on ")
        with disk.Lock(saved / ".lock", "x"), busy:
            checkpoint.save(path, model, optimizer, step=9)
    assert checkpoint.read_state(saved)["step"] == 4
    checkpoint.save(tmp_path / "link", model, optimizer, step=9)
    assert checkpoint.read_state(saved)["step"] == 9 and (tmp_path / "link").is_symlink()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", ["pipe", "link"])
@pytest.mark.parametrize("name", ["state.json", "shard"])
def test_a_pipe_or_link_is_refused_and_not_waited_for(saved, tmp_path, what, name):
    path = saved / "state.json" if name == "state.json" else shard(saved)
    path.rename(tmp_path / "kept")
    os.mkfifo(path) if what == "pipe" else path.symlink_to(tmp_path / "kept")
    assert refuses(saved, f"{path.name} is (corrupt: .*got a .*{what}|missing, truncated, corrupt)")


def test_a_folder_of_shards_that_is_a_link_or_has_another_file_is_refused(saved, tmp_path):
    folder = shard(saved).parent
    (folder / "more.safetensors").write_bytes(b"of another save")
    assert refuses(saved, r"more\.safetensors is missing, truncated, corrupt or of another save")
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert refuses(saved, "is missing or a link")


def test_an_optimiser_needs_a_checkpoint_of_one(tmp_path):
    model, _ = make()
    assert refuses(checkpoint.save(tmp_path / "c", model), "was saved without an optimiser")


@pytest.mark.parametrize("content", ["[]", "", '{"format": 3}', "[" * 200_000, "7" * 5000, "\xff"])
def test_a_state_of_another_shape_is_corrupt(saved, content):
    (saved / "state.json").write_text(content)
    refused(r"state\.json is corrupt", checkpoint.read_state, saved, error=Error)


def test_a_changed_step_is_noticed(saved):
    text = (saved / "state.json").read_text()
    (saved / "state.json").write_text(text.replace('"step": 4', '"step": 5'))
    refused(r"state\.json is corrupt: its SHA-256", checkpoint.read_state, saved, error=Error)


def test_another_model_is_refused_by_name(saved):
    refused(r"calls is int64 \[\], the model has none", checkpoint.load, saved, toys.Bigram(), error=Error)
    model, _ = make()
    model.table = nn.Embedding(9, 17)
    with pytest.raises(Error, match=r"table.weight is float32 \[17, 17\], the model has float32 \[9, 17\]"):
        checkpoint.load(saved, model)
    with pytest.raises(Error, match=r"scale.weight is float32 .*, the model has float64"):
        checkpoint.load(saved, make()[0].double())


def test_parameter_groups_may_be_cut_in_another_way(saved):
    """Another number of processes has other groups. Parameters of one group must have the same options."""
    model, _ = make()
    with pytest.raises(Error, match=r"parameters of the optimiser's group 0 have different options"):
        checkpoint.load(saved, model, torch.optim.AdamW(model.parameters(), fused=True))
    optimizer = torch.optim.AdamW([{"params": [p]} for p in reversed([*model.parameters()])], fused=True)
    checkpoint.load(saved, model, optimizer)
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.1}


def crafted(saved, change):
    """Write a state with a right digest and content that no save writes."""
    state = checkpoint.read_state(saved)
    change(state)
    (saved / "state.json").write_text(json.dumps(state | {"sha256": checkpoint._digest(state)}))


def test_a_shard_that_is_no_safetensors_is_refused(saved):
    shard(saved).write_bytes(b"short")
    crafted(saved, lambda state: state.update(files={shard(saved).name: disk.sha256_of(shard(saved))}))
    assert refuses(saved, "cannot be read")


def options(**changes):
    return lambda state: state["optimizer"][0]["options"].update(changes)


@pytest.mark.parametrize(
    "change, message",
    [
        (options(params=[]), "params is no option"),
        (options(other=1), "other is no option"),
        (lambda s: s["optimizer"].pop(), "is a parameter of the optimiser alone"),
        (lambda s: s["optimizer"][0].pop("options"), "cannot be read: 'options'"),
        (lambda s: s.update(files={}), "is missing, truncated, corrupt or of another save"),
        (lambda s: s.update(files={"../../model.safetensors": ""}), "model.safetensors is"),
        (lambda s: s.update(shards="../elsewhere"), "is missing or a link"),
    ],
)
def test_a_crafted_state_changes_nothing(saved, change, message):
    crafted(saved, change)
    assert refuses(saved, message)


@pytest.mark.parametrize(
    "maker",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, amsgrad=True, foreach=True),
        lambda p: torch.optim.Adafactor(p),
    ],
    ids=["sgd", "momentum", "amsgrad", "adafactor"],
)
def test_moments_of_other_optimisers_are_restored(tmp_path, maker):
    """A fresh optimiser has no moments: their shapes come from the checkpoint."""
    model = Dropped()
    optimizer = maker(model.parameters())
    run(model, optimizer, 0, 2)
    checkpoint.save(tmp_path / "c", model, optimizer)
    again = Dropped()
    other = maker(again.parameters())
    checkpoint.load(tmp_path / "c", again, other)
    for p, q in zip(model.parameters(), again.parameters()):
        assert all(torch.equal(v, other.state[q][k]) for k, v in optimizer.state[p].items())
