"""Collectives of a process group: differentiable where needed, their bytes counted."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor


class Line:
    """Processes in a row, each with the one before and the one after it.

    Attributes:
        rank, size: this process's place and how many there are.
        sent: bytes that this process has sent, by what they were.

    Args:
        group: a process group, or a device mesh of one dimension; None: all processes.
    """

    def __init__(self, group=None) -> None:
        self.group = group.get_group() if hasattr(group, "get_group") else group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.sent: Counter[str] = Counter()

    def exchange(self, what: str, outgoing: dict[int, list[Tensor]], incoming: dict[int, list[Tensor]]) -> None:
        """Sends tensors to ranks and receives into tensors from ranks, all at once; in the same order on both sides."""
        operations = []
        for send, places in ((True, outgoing), (False, incoming)):
            for rank, tensors in places.items():
                peer = rank if self.group is None else dist.get_global_rank(self.group, rank)
                for tensor in tensors:
                    operations.append(dist.P2POp(dist.isend if send else dist.irecv, tensor, peer, self.group))
                    self.sent[what] += tensor.nbytes * send
        for request in dist.batch_isend_irecv(operations) if operations else []:
            request.wait()

    def from_before(self, what: str, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors of the process before; the first process gets its own back, which mean nothing."""
        return self._shifted(what, tensors, 1)

    def from_after(self, what: str, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors of the process after; the last process gets its own back, which mean nothing."""
        return self._shifted(what, tensors, -1)

    def _shifted(self, what: str, tensors: list[Tensor], step: int) -> list[Tensor]:
        tensors = [t.contiguous() for t in tensors]
        to, source = self.rank + step, self.rank - step
        here = 0 <= source < self.size
        received = [torch.empty_like(t) if here else t for t in tensors]
        self.exchange(what, {to: tensors} if 0 <= to < self.size else {}, {source: received} if here else {})
        return received

    def gather(self, what: str, tensor: Tensor) -> Tensor:
        """The tensors of all processes, [size, ...]; without a gradient."""
        whole = tensor.new_empty(self.size, *tensor.shape)
        dist.all_gather(list(whole.unbind()), tensor.contiguous(), group=self.group)
        self.sent[what] += tensor.nbytes * (self.size - 1)
        return whole


class GatherAll(torch.autograd.Function):
    """GatherAll.apply(line, what, x): `Line.gather`; each process gets the sum of its own tensor's gradients back."""

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
    """StateBefore.apply(line, x, m): x [B,N,d] and the last m rows of the process before's x [B,m,d].

    x comes out as it went in, so that every process takes part in the backward pass, the first one too.
    """

    @staticmethod
    def forward(ctx, line: Line, x: Tensor, m: int) -> tuple[Tensor, Tensor]:
        ctx.line, ctx.m = line, m
        before = line.from_before("state of the chunk before", [x[:, -m:]])[0]
        return x.view_as(x), before.clone() if line.rank == 0 else before

    @staticmethod
    def backward(ctx, grad: Tensor, grad_before: Tensor):
        line, m = ctx.line, ctx.m
        received = line.from_after("state of the chunk before", [grad_before])[0]
        if line.rank == line.size - 1:
            return None, grad, None
        return None, torch.cat([grad[:, :-m], grad[:, -m:] + received], 1), None
