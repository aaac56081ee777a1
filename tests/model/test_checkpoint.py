"""Saving and resuming: bitwise the uninterrupted run, atomic, and plain about what is broken."""

import json
import os

import pytest
import torch
from torch import nn

from retro_model import checkpoint, training
from tests.model import toys

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
    return training.train(model, optimizer, stream, SETTINGS, start=start, stop=stop)


def make():
    torch.manual_seed(7)
    model = Dropped()
    return model, training.make_optimizer(model, SETTINGS)


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.fixture
def saved(tmp_path):
    model, optimizer = make()
    run(model, optimizer, 0, 4)
    checkpoint.save(tmp_path / "at4", model, optimizer, step=4, position=4, extra={"seed": 5})
    return tmp_path / "at4"


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
    """The control of the test above: dropout makes the run depend on the generator."""
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


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("harm", ["missing", "truncated", "flipped"])
def test_a_broken_file_is_named_and_nothing_is_changed(saved, file, harm):
    path = saved / file
    data = bytearray(path.read_bytes())
    if harm == "missing":
        path.unlink()
    elif harm == "truncated":
        path.write_bytes(data[: len(data) // 2])
    else:
        data[0 if file == "state.json" else -5] ^= 0x10
        path.write_bytes(data)
    model, optimizer = make()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(checkpoint.CheckpointError, match=file):
        checkpoint.load(saved, model, optimizer)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()) and not optimizer.state


@pytest.mark.parametrize("content", ["[]", '{"files": 3}', '{"files": {"model.safetensors": 5}}', '{"format": 1}'])
def test_a_state_of_another_shape_is_corrupt(saved, content):
    (saved / "state.json").write_text(content)
    with pytest.raises(checkpoint.CheckpointError, match=r"state\.json is corrupt"):
        checkpoint.read_state(saved)


def test_a_changed_step_is_noticed(saved):
    text = (saved / "state.json").read_text()
    (saved / "state.json").write_text(text.replace('"step": 4', '"step": 5'))
    with pytest.raises(checkpoint.CheckpointError, match=r"state\.json is corrupt: its SHA-256"):
        checkpoint.read_state(saved)


def test_another_model_is_refused_by_name(saved):
    with pytest.raises(checkpoint.CheckpointError, match=r"model.safetensors: calls is \(\), the model has none"):
        checkpoint.load(saved, toys.Bigram())
    model, _ = make()
    model.table = nn.Embedding(9, 17)
    with pytest.raises(checkpoint.CheckpointError, match=r"model.safetensors: table.weight is \(17, 17\), the model has \(9, 17\)"):
        checkpoint.load(saved, model)
    model, _ = make()
    with pytest.raises(checkpoint.CheckpointError, match=r"optimizer.safetensors"):
        checkpoint.load(saved, model, torch.optim.AdamW(model.parameters()))


def test_a_failed_write_leaves_the_old_checkpoint(saved, monkeypatch):
    model, optimizer = make()

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        checkpoint.save(saved, model, optimizer, step=9)
    assert checkpoint.read_state(saved)["step"] == 4
    assert [p.name for p in saved.parent.iterdir()] == ["at4"]


def test_saving_over_a_checkpoint_replaces_it(saved):
    model, optimizer = make()
    checkpoint.save(saved, model, optimizer, step=9)
    assert checkpoint.read_state(saved)["step"] == 9
    assert sorted(p.name for p in saved.parent.iterdir()) == ["at4"]
