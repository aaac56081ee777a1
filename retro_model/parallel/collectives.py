"""Collectives of a process group, differentiable where needed, with a count of the bytes sent."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

Group = dist.ProcessGroup | DeviceMesh


class Line:
    """Processes in the order of their ranges; each exchanges tensors with the one before and the one after it.

    Attributes:
        rank, size: rank of this process, number of processes.
        sent: bytes that this process has sent, by description.

    Args:
        group: a process group, or a device mesh of one dimension; None: all processes.
    """

    def __init__(self, group: Group | None = None) -> None:
        self.group = group.get_group() if hasattr(group, "get_group") else group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.sent: Counter[str] = Counter()

    def from_before(self, what: str, tensor: Tensor) -> Tensor:
        """Return the tensor of the process before. The first process gets its own, a placeholder."""
        return self._shifted(what, tensor, 1)

    def from_after(self, what: str, tensor: Tensor) -> Tensor:
        """Return the tensor of the process after. The last process gets its own, a placeholder."""
        return self._shifted(what, tensor, -1)

    def _shifted(self, what: str, tensor: Tensor, step: int) -> Tensor:
        to, source = self.rank + step, self.rank - step
        tensor, operations = tensor.contiguous(), []
        received = torch.empty_like(tensor) if 0 <= source < self.size else tensor
        for operation, rank, moved in ((dist.isend, to, tensor), (dist.irecv, source, received)):
            if 0 <= rank < self.size:
                peer = rank if self.group is None else dist.get_global_rank(self.group, rank)
                operations.append(dist.P2POp(operation, moved, peer, self.group))
                self.sent[what] += moved.nbytes * (operation is dist.isend)
        for request in dist.batch_isend_irecv(operations) if operations else []:
            request.wait()
        return received

    def gather(self, what: str, tensor: Tensor) -> Tensor:
        """Return the tensors of all processes, [size, ...], without a gradient."""
        whole = tensor.new_empty(self.size, *tensor.shape)
        dist.all_gather(list(whole.unbind()), tensor.contiguous(), group=self.group)
        self.sent[what] += tensor.nbytes * (self.size - 1)
        return whole


class GatherAll(torch.autograd.Function):
    """GatherAll.apply(line, what, x): differentiable `Line.gather`. Gradients of a tensor are summed over processes."""

    @staticmethod
    def forward(ctx, line: Line, what: str, x: Tensor) -> Tensor:
        ctx.line, ctx.what = line, what
        return line.gather(what, x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        line = ctx.line
        grad = grad.contiguous()
        mine = torch.empty_like(grad[0])
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # the older name
        scatter(mine.view(-1), grad.view(-1), group=line.group)
        line.sent[ctx.what] += mine.nbytes * (line.size - 1)
        return None, None, mine


class StateBefore(torch.autograd.Function):
    """StateBefore.apply(line, x, m): return x [B,N,d] and the last m rows [B,m,d] of x of the process before.

    x passes through so that every process, the first one included, takes part in the backward pass.
    """

    @staticmethod
    def forward(ctx, line: Line, x: Tensor, m: int) -> tuple[Tensor, Tensor]:
        ctx.line, ctx.m = line, m
        before = line.from_before("state of the chunk before", x[:, -m:])
        return x.view_as(x), before.clone() if line.rank == 0 else before

    @staticmethod
    def backward(ctx, grad: Tensor, grad_before: Tensor):
        line, m = ctx.line, ctx.m
        received = line.from_after("state of the chunk before", grad_before)
        if line.rank == line.size - 1:
            return None, grad, None
        return None, torch.cat([grad[:, :-m], grad[:, -m:] + received], 1), None
