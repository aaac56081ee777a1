"""DDP and FSDP2 over two gloo processes on the CPU: each step equals the step of one process with the whole batch."""

import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from retro_model import checkpoint, training
from retro_model.memory_mosaics import MemoryMosaics, MosaicsConfig
from retro_model.retro import Retro
from retro_model.retro.config import RetroConfig
from retro_model.rpt import OWN
from retro_model.rpt.supervision import Supervision
from retro_model.training import rpt
from tests import processes
from tests.model import toys
from tests.model.rpt import tiny as tiny_rpt

pytestmark = toys.needs_gloo

SETTINGS = training.Settings(steps=3, warmup_steps=0, max_lr=0.3, clip=0.5)
CONFIG = RetroConfig.small(17, 16, 32, num_heads=1, num_layers=2, chunk_len=4, cca_layers=(1, 2), max_len=16)
MOSAICS = MosaicsConfig(vocab_size=17, d_model=32, num_heads=2, num_layers=2, persistent_slots=5)


LESSONS = rpt.Lessons(3, alpha_ret=0.5, retriever_alpha=1.0, alpha_steps=0, tau=1.0)


def model(name: str) -> nn.Module:
    if name == "rpt":
        return tiny_rpt.model(dtype=torch.float32, score_scale=0.2)
    torch.manual_seed(0)
    return Retro(CONFIG) if name == "retro" else MemoryMosaics(MOSAICS)


def run(wrapped: nn.Module, rank: int, world_size: int, name: str):
    """Three steps. Plain SGD: Adam's first steps are signs, which rounding can flip."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    return (taught if name == "rpt" else trained)(wrapped, optimizer, rank, world_size, name), optimizer


def trained(wrapped, optimizer, rank, world_size, name) -> list[dict]:
    """Train on two accumulated batches per step."""
    retrieved = {}
    if name == "retro":
        neighbours = np.random.default_rng(0).integers(-1, 30, (41, 2))
        retrieved = {"neighbours": neighbours, "database": toys.Database(toys.random_store(30, seed=1))}
    share = {"batch_size": 4, "rank": rank, "world_size": world_size}
    stream = training.batches(toys.random_store(41), window=8, seed=5, **share, **retrieved)
    return toys.untimed(training.train(wrapped, optimizer, stream, SETTINGS, accumulate=2))


def taught(wrapped, optimizer, rank, world_size, name) -> list[dict]:
    """Train on both losses: four sequences, unequal numbers of positives, half of the neighbours from the teacher."""
    g, number = torch.Generator().manual_seed(0), torch.arange(10)
    candidates = torch.stack([(number - 2 - c).clamp(min=-1) for c in range(3)], 1).expand(4, -1, -1).contiguous()
    lessons = Supervision(candidates, torch.randn(4, 10, 3, generator=g).masked_fill(candidates < 0, -torch.inf))
    index = lessons.teacher(2)
    index[::2] = OWN
    rows = slice(rank * 4 // world_size, (rank + 1) * 4 // world_size)
    tokens, part, index = tiny_rpt.tokens(43, batch=4)[rows], Supervision(*(t[rows] for t in lessons)), index[rows]
    return [rpt.train_step(wrapped, optimizer, tokens, part, SETTINGS, LESSONS, step, index=index) for step in range(3)]


def contents(folder):
    """Return all tensors of a checkpoint by file and name. Torch may write them in another order."""
    files = (folder / checkpoint.read_state(folder)["shards"]).iterdir()
    return {(file.name, name): tensor for file in files for name, tensor in load_file(file).items()}


def worker(rank, kind, name, folder):
    wrapped = model(name)
    if kind == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(wrapped)
    else:
        from torch.distributed.device_mesh import init_device_mesh

        training.shard(wrapped, init_device_mesh("cpu", (2,)))
    history, optimizer = run(wrapped, rank, 2, name)
    torch.manual_seed(rank)  # dropout differs between processes
    checkpoint.save(folder, wrapped, optimizer, step=3, position=6)
    drawn = torch.rand(8)
    checkpoint.load(folder, wrapped, optimizer)  # shards load their own state
    checkpoint.save(f"{folder}-again", wrapped, optimizer, step=3, position=6)
    assert torch.equal(torch.rand(8), drawn)  # every generator continues
    os.makedirs(f"{folder}-not/mine", exist_ok=True)
    with pytest.raises(checkpoint.CheckpointError, match="no checkpoint"):  # in every process: none waits for another
        checkpoint.save(f"{folder}-not", wrapped, optimizer)
    return history


CASES = [(kind, name) for kind in ("ddp", "fsdp2") for name in ("retro", "mosaics")]
CASES += [pytest.param("ddp", "rpt", marks=pytest.mark.nightly), ("fsdp2", "rpt")]


@pytest.mark.parametrize("kind, name", CASES)
def test_steps_equal_one_process(kind, name, tmp_path):
    got = processes.two(worker, kind, name, str(tmp_path / "saved"))
    whole = model(name)
    want, optimizer = run(whole, 0, 1, name)
    for a, b in zip(got, want, strict=True):
        assert a.pop("gradient_norm") == pytest.approx(b.pop("gradient_norm"), rel=1e-4)
        assert a == pytest.approx(b, rel=1e-5)  # losses, tokens and RPT's pairs
    assert want[0]["pairs"] > 50 if name == "rpt" else len({h["tokens"] for h in want}) > 1
    # A single process reads the checkpoint of two.
    restored = model(name)
    again = torch.optim.SGD(restored.parameters(), lr=0.1, momentum=0.9)
    checkpoint.load(tmp_path / "saved", restored, again)
    for (part, p), q in zip(whole.named_parameters(), restored.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-4, atol=1e-5, msg=part)
        both = (of.state[tensor]["momentum_buffer"] for of, tensor in ((again, q), (optimizer, p)))
        torch.testing.assert_close(*both, rtol=1e-4, atol=1e-5, msg=part)
    saved, again = contents(tmp_path / "saved"), contents(tmp_path / "saved-again")
    assert saved.keys() == again.keys() and all(torch.equal(saved[name], again[name]) for name in saved)
    moved = "retriever.key.weight" if name == "rpt" else "embedding.weight"
    assert not torch.equal(whole.get_parameter(moved), model(name).get_parameter(moved))
