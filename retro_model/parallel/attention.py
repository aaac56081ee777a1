"""Causal relative attention over sequences whose ranges several processes hold."""

from __future__ import annotations

import torch
from torch import Tensor

import retro_kernels as rk

from .collectives import GatherAll, Line

KEYS = "keys and values"


def gathered_attention(
    line: Line, query: Tensor, key: Tensor, value: Tensor, rel_key: Tensor, *, segment: Tensor | None = None, **options
) -> Tensor:
    """The rows of this process of `rk.relative_attention(..., causal=True)` over the whole sequence; all keys come here
    at once.

    Args:
        line: the processes, in the order of their ranges, all of n tokens.
        query, key, value: this process's, [B,n,H,D] and [B,n,G,D].
        rel_key: [H,(rank+1)*n,D], row t for displacement t.
        segment: integers [B,n], packed documents: a token sees its own; None: all see all.
        options: content_bias, position_bias, dropout_p, backend.

    Returns:
        [B,n,H,D].
    """
    seen = (line.rank + 1) * query.shape[1]
    both = GatherAll.apply(line, KEYS, torch.stack([key, value]))  # [size,2,B,n,G,D]
    key, value = both[: line.rank + 1].permute(1, 2, 0, 3, 4, 5).flatten(2, 3)
    if segment is not None:
        every = line.gather("segments", segment)[: line.rank + 1].transpose(0, 1).flatten(1)
        options |= {"query_segment": segment, "key_segment": every}
    return rk.relative_attention(
        query, key, value, rel_key=rel_key, rel_start=0, causal=True, query_offset=seen - query.shape[1], **options
    )


def ring_attention(
    line: Line, query: Tensor, key: Tensor, value: Tensor, rel_key: Tensor, *, segment: Tensor | None = None, **options
) -> Tensor:
    """Compute `gathered_attention` one range of keys at a time: a range goes from each process to the next, half the
    bytes, and no process holds more keys than its own and one range. The backward pass sends them again, with their
    gradients.

    Arguments as in `gathered_attention`; no dropout.

    Source: Liu et al., arXiv 2310.01889 (ring attention); parts of a softmax are joined by their log-sum-exp.
    """
    if options.pop("dropout_p", 0.0):
        raise ValueError(
            "dropout_p: expected 0 around a ring, whose backward pass computes each part again; got more: "
            "exchange='gather'"
        )
    biases = [
        None if b is None else b.to(query.dtype)
        for b in (options.pop("content_bias", None), options.pop("position_bias", None))
    ]
    return _Ring.apply(line, options, segment, query, key, value, rel_key, *biases)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, line, options, segment, query, key, value, rel_key, content_bias, position_bias):
        part = _Part(line.rank, query.shape[1], options, segment)
        out, lse = None, None
        held = [key, value] if segment is None else [key, value, segment]
        for back in range(line.size):
            if back <= line.rank:
                new = part(back, query, held, rel_key, content_bias, position_bias)
                out, lse = new if out is None else _joined(out, lse, *new)
            held = _moved(line, held, back)
        ctx.save_for_backward(query, key, value, rel_key, content_bias, position_bias, segment, out, lse)
        ctx.line, ctx.part = line, part
        return out

    @staticmethod
    def backward(ctx, grad):
        *inputs, segment, out, lse = ctx.saved_tensors
        line, part = ctx.line, ctx.part
        query, key, value, rel_key, *biases = (None if t is None else t.detach().requires_grad_() for t in inputs)
        shared = [t for t in (query, rel_key, *biases) if t is not None]
        totals = [torch.zeros_like(t) for t in shared]
        held = [key, value] if segment is None else [key, value, segment]
        dot = (grad * out).sum(-1)  # [B,n,H]
        grads: list[list[Tensor]] = []  # of the keys and values of the ranges back from here
        for back in range(line.size):
            if back <= line.rank:
                key_value = [t.detach().requires_grad_() for t in held[:2]]
                with torch.enable_grad():
                    mine, mine_lse = part(back, query, [*key_value, *held[2:]], rel_key, *biases)
                share = _share(mine_lse, lse).transpose(1, 2).unsqueeze(-1)  # [B,n,H,1]
                through_lse = (share.squeeze(-1) * ((grad * mine.detach()).sum(-1) - dot)).transpose(1, 2)
                results = torch.autograd.grad(
                    [mine, mine_lse],
                    [*shared, *key_value],
                    [(grad * share).to(grad.dtype), through_lse.to(mine_lse.dtype)],
                )
                for total, new in zip(totals, results):
                    total += new
                grads.append(list(results[len(shared) :]))
            held = _moved(line, held, back)
        dkey, dvalue = _returned(line, grads)
        dquery, drel, *dbiases = totals
        filled = iter(dbiases)
        return None, None, None, dquery, dkey, dvalue, drel, *(None if b is None else next(filled) for b in biases)


class _Part:
    """Attention of this process's queries to the range of keys `back`
    processes before it: out [B,n,H,D] and lse [B,H,n].
    """

    def __init__(self, rank: int, width: int, options: dict, segment: Tensor | None) -> None:
        self.rank, self.width, self.options, self.segment = rank, width, options, segment

    def __call__(self, back: int, query, held, rel_key, content_bias, position_bias) -> tuple[Tensor, Tensor]:
        offset = back * self.width
        first = max(offset - self.width + 1, 0)  # displacements of the range: only its rows of the table take part
        segments = {} if self.segment is None else {"query_segment": self.segment, "key_segment": held[2]}
        return rk.relative_attention(
            query,
            held[0],
            held[1],
            rel_key=rel_key[:, first : offset + self.width],
            rel_start=first,
            causal=True,
            query_offset=offset,
            content_bias=content_bias,
            position_bias=position_bias,
            return_lse=True,
            **segments,
            **self.options,
        )


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """exp(part - whole), 0 where nothing is seen."""
    return torch.where(part == -torch.inf, 0.0, (part - whole).exp())


def _joined(out: Tensor, lse: Tensor, new: Tensor, new_lse: Tensor) -> tuple[Tensor, Tensor]:
    """One softmax of two parts."""
    whole = torch.logaddexp(lse, new_lse)
    a, b = (_share(part, whole).transpose(1, 2).unsqueeze(-1) for part in (lse, new_lse))
    return (a * out + b * new).to(out.dtype), whole


def _moved(line: Line, held: list[Tensor], back: int) -> list[Tensor]:
    """Each range goes one process on: after step `back` this process
    holds the range of rank - back - 1, where there is one.
    """
    held = [t.detach().contiguous() for t in held]
    sends, receives = back <= line.rank < line.size - 1, back < line.rank
    received = [torch.empty_like(t) for t in held] if receives else held
    line.exchange(KEYS, {line.rank + 1: held} if sends else {}, {line.rank - 1: received} if receives else {})
    return received


def _returned(line: Line, grads: list[list[Tensor]]) -> list[Tensor]:
    """The sums of all processes' gradients of this one's keys and
    values: grads[back] goes to the process `back` before.
    """
    total = grads[0]
    for back in range(1, line.size):
        to, source = line.rank - back, line.rank + back
        received = [torch.empty_like(t) for t in total] if source < line.size else []
        outgoing = {to: [t.contiguous() for t in grads[back]]} if to >= 0 else {}
        line.exchange(KEYS, outgoing, {source: received} if received else {})
        total = [a + b for a, b in zip(total, received)] if received else total
    return total
