"""DDP and FSDP2 over two gloo processes: a step on both losses equals a step of one process with the whole batch."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from retro_model import training
from retro_model.rpt import OWN
from retro_model.rpt.supervision import Supervision
from retro_model.training import rpt
from tests import processes
from tests.conftest import INTERPRETER
from tests.model.rpt import tiny

pytestmark = pytest.mark.skipif(
    INTERPRETER or not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"
)

SETTINGS = training.Settings(steps=3, warmup_steps=0, max_lr=0.3, clip=0.5)
LESSONS = rpt.Lessons(3, alpha_ret=0.5, retriever_alpha=1.0, alpha_steps=0, tau=1.0)


def data():
    """Four sequences, unequal numbers of positives, half of the neighbours from the teacher."""
    g = torch.Generator().manual_seed(0)
    tokens = tiny.tokens(43, batch=4)
    number = torch.arange(10)
    candidates = torch.stack([(number - 2 - c).clamp(min=-1) for c in range(3)], 1).expand(4, -1, -1).contiguous()
    scores = torch.randn(4, 10, 3, generator=g).masked_fill(candidates < 0, -torch.inf)
    lessons = Supervision(candidates, scores)
    index = lessons.teacher(2)
    index[::2] = OWN
    return tokens, lessons, index


def run(model: nn.Module, rows: slice):
    """Plain SGD: Adam's first steps are signs, which rounding can flip."""
    tokens, lessons, index = data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    part = Supervision(*(t[rows] for t in lessons))
    return [
        rpt.train_step(model, optimizer, tokens[rows], part, SETTINGS, LESSONS, step, index=index[rows])
        for step in range(3)
    ]


def worker(rank, kind):
    model = tiny.model(dtype=torch.float32, score_scale=0.2)
    if kind == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh

        wrapped = training.shard(model, init_device_mesh("cpu", (2,)))
    history = run(wrapped, slice(rank * 2, rank * 2 + 2))
    weight = model.retriever.key.weight
    weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return (history, weight.detach().numpy())


@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.nightly), "fsdp2"])
def test_steps_equal_one_process(kind):
    got, weight = processes.two(worker, kind)
    model = tiny.model(dtype=torch.float32, score_scale=0.2)
    want = run(model, slice(0, 4))
    for a, b in zip(got, want):
        assert a["pairs"] == b["pairs"] > 50
        for name in ("loss", "retrieval_loss"):
            assert a[name] == pytest.approx(b[name], rel=1e-5)
        assert a["gradient_norm"] == pytest.approx(b["gradient_norm"], rel=1e-4)
    torch.testing.assert_close(torch.from_numpy(weight), model.retriever.key.weight.detach(), rtol=1e-4, atol=1e-6)
    assert not torch.equal(model.retriever.key.weight, tiny.model(dtype=torch.float32).retriever.key.weight)
