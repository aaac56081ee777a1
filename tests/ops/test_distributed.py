"""DDP and FSDP2 over two gloo processes on the CPU: the mean gradient equals one process with both halves."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import retro_kernels as rk
from retro_kernels.testing import inputs
from tests import processes
from tests.conftest import INTERPRETER

pytestmark = pytest.mark.skipif(
    INTERPRETER or not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"
)


class Layer(nn.Module):
    """Projections around the op, so that wrappers have parameters to shard; rel_key and biases are passed directly."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.kv = nn.Linear(32, 32), nn.Linear(32, 64)
        self.rel_key = nn.Parameter(torch.randn(2, 9, 16))
        self.content_bias, self.position_bias = nn.Parameter(torch.randn(2, 16)), nn.Parameter(torch.randn(2, 16))

    def forward(self, x, neighbours):
        key, value = self.kv(neighbours).unflatten(-1, (2, 2, 16)).unbind(-3)
        out = rk.chunked_cross_attention(
            self.q(x).unflatten(-1, (2, 16)),
            key,
            value,
            chunk_len=4,
            rel_key=self.rel_key,
            content_bias=self.content_bias,
            position_bias=self.position_bias,
        )
        return out.square().mean()


def data():
    g = inputs.generator(3)
    return torch.randn(2, 11, 32, generator=g), torch.randn(2, 2, 2, 6, 32, generator=g)


def worker(rank, kind):
    layer = Layer()
    if kind == "ddp":
        layer = nn.parallel.DistributedDataParallel(layer)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    x, neighbours = data()
    layer(x[rank : rank + 1], neighbours[rank : rank + 1]).backward()
    grads = {
        n.removeprefix("module."): p.grad.full_tensor() if kind == "fsdp2" else p.grad
        for n, p in layer.named_parameters()
    }
    return {n: g.numpy() for n, g in grads.items()}


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_gradients_equal_one_process(kind):
    got = processes.two(worker, kind)
    layer, (x, neighbours) = Layer(), data()
    (sum(layer(x[i : i + 1], neighbours[i : i + 1]) for i in range(2)) / 2).backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(torch.from_numpy(got[name]), parameter.grad, msg=name)
