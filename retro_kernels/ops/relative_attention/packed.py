"""Conversion of `cu_seqlens`, flash-attention's boundaries of packed documents, into segments."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ... import checks


def segments(cu_seqlens: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return (query_segment, key_segment), int32 [1,N] and ascending. On a GPU the host reads nothing.

    A token before cu_seqlens[0] or from cu_seqlens[-1] on gets a query segment and a key segment without partners. If
    the boundaries decrease on a GPU, the segments are unspecified but still ascend.

    >>> queries = keys = torch.empty(1, 5, 2, 16)
    >>> [s.tolist() for s in segments(torch.tensor([0, 3, 5], dtype=torch.int32), queries, keys)]
    [[[0, 0, 0, 1, 1]], [[0, 0, 0, 1, 1]]]
    """
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens: expected a tensor or None; got {type(cu_seqlens).__name__}")
    checks.like("cu_seqlens", cu_seqlens, query, (torch.int32,))
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens: expected [documents+1]; got {list(cu_seqlens.shape)}")
    for name, tensor, heads in (("query", query, "H"), ("key", key, "G")):
        if tensor.dim() != 4 or tensor.shape[0] != 1 or tensor.shape[1] != query.shape[1]:
            raise ValueError(f"{name}: expected [1,N,{heads},D] where cu_seqlens is given; got {list(tensor.shape)}")
    n = query.shape[1]
    if query.device.type == "cpu":  # the host does not wait for a GPU's values
        cu_seqlens = _checked(cu_seqlens, n)
    token = torch.arange(n, dtype=torch.int32, device=query.device)
    number = torch.bucketize(token, cu_seqlens, right=True, out_int32=True) - 1
    beyond, before = number == cu_seqlens.shape[0] - 1, number < 0
    return number[None], (number + beyond.to(torch.int32) - before.to(torch.int32))[None]


@torch.library.custom_op("retro_kernels::checked_boundaries", mutates_args=())
def _checked(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Return a copy of the boundaries on the CPU after a check of their values. It is an operator, so that compiled,
    traced and transformed calls check the values of every run.
    """
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != tokens or any(a > b for a, b in itertools.pairwise(ends)):
        raise ValueError(f"cu_seqlens: expected to begin with 0, never to fall and to end with N={tokens}; got {ends}")
    return cu_seqlens.clone()


@_checked.register_fake
def _(cu_seqlens: Tensor, tokens: int) -> Tensor:
    return torch.empty_like(cu_seqlens)
