"""A tiny model's checkpoint, and a check that a refused load changes nothing."""

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


def refused(saved, match) -> bool:
    """Check that a load raises an error with that name and changes neither model, optimiser nor generator."""
    model, optimizer = make()
    before, random, options = (
        {k: v.clone() for k, v in model.state_dict().items()},
        torch.get_rng_state(),
        optimizer.state_dict(),
    )
    with pytest.raises(checkpoint.CheckpointError, match=match):
        checkpoint.load(saved, model, optimizer)
    same = all(torch.equal(v, before[k]) for k, v in model.state_dict().items()) and torch.equal(
        random, torch.get_rng_state()
    )
    return same and not optimizer.state and optimizer.state_dict() == options


def trained(folder):
    """Save a checkpoint of four steps in `folder`."""
    model, optimizer = make()
    run(model, optimizer, 0, 4)
    checkpoint.save(folder, model, optimizer, step=4, position=4, extra={"seed": 5})
    return folder
