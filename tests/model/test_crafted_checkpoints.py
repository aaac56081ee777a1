"""Checkpoints with right digests and content that no save writes: refused by name, nothing changed."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from retro_model import checkpoint
from retro_model.base import disk
from retro_model.training import checkpoint_folder
from tests.model import toys
from tests.model.checkpoints import Dropped, make, refused, run, tensors, trained


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        '{"files": 3}',
        '{"files": {"model.safetensors": 5}}',
        '{"format": 2}',
        "[" * 200_000,
        '{"format": %s}' % ("7" * 5000),
        "\xff",
    ],
)
def test_a_state_of_another_shape_is_corrupt(saved, content):
    (saved / "state.json").write_text(content)
    with pytest.raises(checkpoint.CheckpointError, match=r"state\.json is corrupt"):
        checkpoint.read_state(saved)


@pytest.fixture
def saved(tmp_path):
    return trained(tmp_path / "at4")


def test_a_changed_step_is_noticed(saved):
    text = (saved / "state.json").read_text()
    (saved / "state.json").write_text(text.replace('"step": 4', '"step": 5'))
    with pytest.raises(checkpoint.CheckpointError, match=r"state\.json is corrupt: its SHA-256"):
        checkpoint.read_state(saved)


def test_another_model_is_refused_by_name(saved):
    with pytest.raises(checkpoint.CheckpointError, match=r"model-.*: calls is int64 \[\], the model has none"):
        checkpoint.load(saved, toys.Bigram())
    model, _ = make()
    model.table = nn.Embedding(9, 17)
    with pytest.raises(
        checkpoint.CheckpointError,
        match=r"model-.*: table.weight is float32 \[17, 17\], the model has float32 \[9, 17\]",
    ):
        checkpoint.load(saved, model)
    with pytest.raises(
        checkpoint.CheckpointError, match=r"model-.*: scale.weight is float32 .*, the model has float64"
    ):
        checkpoint.load(saved, make()[0].double())
    model, _ = make()
    with pytest.raises(checkpoint.CheckpointError, match=r"optimizer-.*: the optimiser's 1 groups"):
        checkpoint.load(saved, model, torch.optim.AdamW(model.parameters()))


def crafted(saved, change_tensors=None, change_state=None):
    """Write a checkpoint with right digests and content that no save writes."""
    state = json.loads((saved / "state.json").read_text())
    path = tensors(saved, "optimizer")
    content = load_file(path)
    if change_tensors:
        change_tensors(content)
        content = {k: v.contiguous() for k, v in content.items()}
        save_file(content, path)
        state["files"][path.name] = {"bytes": path.stat().st_size, "sha256": disk.sha256_of(path)}
    if change_state:
        change_state(state)
    (saved / "state.json").write_text(json.dumps(state | {"sha256": checkpoint_folder.state_digest(state)}))


MOMENT = "state.table.weight.exp_avg"


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda t: t.update({MOMENT: torch.zeros(3)}),
            r"table.weight's exp_avg is float32 \[3\], the optimiser has float32 \[17, 17\]",
        ),
        (lambda t: t.update({MOMENT: torch.zeros(17, 17).double()}), "table.weight's exp_avg is float64"),
        (lambda t: t.update({MOMENT: torch.zeros(17, 17).long()}), "table.weight's exp_avg is int64"),
        (lambda t: t.pop(MOMENT), "table.weight's exp_avg is absent"),
        (
            lambda t: t.update({MOMENT + "_3": torch.zeros(17, 17)}),
            "table.weight's exp_avg_3 is float32 .*, the optimiser has none",
        ),
        (lambda t: t.update({"state.table.weight.step": torch.tensor(-1.0)}), "table.weight's step is -1"),
        (lambda t: t.update({"state.table.weight.step": torch.ones(17, 17)}), "table.weight's step is float32"),
        (lambda t: t.update({"state.other.step": torch.tensor(1.0)}), "state.other.step is of no parameter"),
        (
            lambda t: t.update({"random.cpu": torch.zeros(7, dtype=torch.uint8)}),
            "random.cpu is no state of a cpu generator",
        ),
        (
            lambda t: t.update({"random.cpu": torch.zeros(5056, dtype=torch.uint8)}),
            "random.cpu is no state of a cpu generator",
        ),
        (lambda t: t.update({"random.cpu": torch.zeros(5056)}), "random.cpu is float32"),
        (lambda t: t.update({"random.1.cpu": torch.zeros(2, 2, dtype=torch.uint8)}), "random.1.cpu is uint8"),
    ],
)
def test_crafted_tensors_change_nothing(saved, change, message):
    crafted(saved, change)
    assert refused(saved, message)


def options(**changes):
    return lambda state: state["optimizer"][0]["options"].update(changes)


@pytest.mark.parametrize(
    "change, message",
    [
        (options(lr=float("nan")), "group 0's lr is nan, out of range"),
        (options(lr=-1.0), "lr is -1.0, out of range"),
        (options(lr="fast"), "lr is 'fast', the optimiser has"),
        (options(lr=True), "lr is True"),
        (options(betas=[0.9, 1.0]), r"betas\[1\] is 1.0"),
        (options(betas=[0.9]), "betas is"),
        (options(betas=0.9), "betas is 0.9"),
        (options(eps=float("inf")), "eps is inf"),
        (options(params=[]), "params is"),
        (options(other=1), "other is no option"),
        (options(fused="yes"), "fused is 'yes'"),
        (options(amsgrad=True), "weight's max_exp_avg_sq is absent"),
        (options(fused=False, capturable=True), "cannot step with the saved options"),
        (lambda s: s.update(step=-1), "step is no count"),
        (lambda s: s.update(position=1.5), "position is no count"),
        (lambda s: s.update(extra=[]), "extra is no object"),
        (lambda s: s.update(config=3), "config is no object"),
        (lambda s: s.update(optimizer=5), "state.json is corrupt"),
        (lambda s: s["optimizer"][0].pop("options"), "state.json is corrupt"),
        (
            lambda s: s.update(files={"../../model.safetensors": {"bytes": 1, "sha256": ""}}),
            "model.safetensors is missing",
        ),
        (lambda s: s.update(files={}), "model.safetensors is missing"),
    ],
)
def test_a_crafted_state_changes_nothing(saved, change, message):
    crafted(saved, change_state=change)
    assert refused(saved, message)


def test_moments_of_other_optimisers(tmp_path):
    """A step on zeros shows the moments of a fresh optimiser: SGD with and without momentum, Adagrad, Adam with
    amsgrad.
    """
    makers = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adagrad": lambda p: torch.optim.Adagrad(p),
        "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True, foreach=True),
        "adafactor": lambda p: torch.optim.Adafactor(p),
        "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True),
    }
    for name, maker in makers.items():
        model = Dropped()
        optimizer = maker(model.parameters())
        run(model, optimizer, 0, 2)
        checkpoint.save(tmp_path / name, model, optimizer)
        again = Dropped()
        other = maker(again.parameters())
        checkpoint.load(tmp_path / name, again, other)
        for p, q in zip(model.parameters(), again.parameters()):
            assert all(torch.equal(v, other.state[q][k]) for k, v in optimizer.state[p].items()), name
