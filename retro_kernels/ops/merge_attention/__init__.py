"""The differentiable merge of attentions over parts of the keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ... import checks
from ...core import operator
from ...core.call import serve
from .call import MergeAttention


def merge_attention(
    outs: Sequence[Tensor] | Tensor, lses: Sequence[Tensor] | Tensor, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Merge attentions over disjoint parts of the keys into the attention over all of them.

    lse = log sum_p exp(lse_p) and out = sum_p exp(lse_p - lse) out_p.

        >>> outs = torch.ones(1, 1, 1, 1), torch.full((1, 1, 1, 1), 4.0)
        >>> lses = torch.zeros(1, 1, 1), torch.full((1, 1, 1), 2.0).log()
        >>> merge_attention(outs, lses)[0].item()
        3.0

    Add to a part's lse to bias attention towards it; multiply its out to scale its values.

    Args:
        outs: 2 or more tensors [B,N,H,D], one for each part; or one tensor [P,B,N,H,D].
        lses: as many tensors [B,H,N], natural logarithm, float32 (float64 with float64); or one tensor [P,B,H,N].
        backend: "triton", "cpu" or "reference"; None: the fastest that serves the call.

    Returns:
        out [B,N,H,D] in the type of outs, and lse [B,H,N]. A part with lse -inf is ignored, even if its out is NaN.
        If all parts have lse -inf, out is 0 and lse is -inf. The gradients are then zero, even if the gradient of out
        or lse is NaN.

    Differentiable in all outs and lses, once.

    Copies: a sequence is stacked; one tensor is read in place.

    Raises:
        ValueError, TypeError: naming the argument, before any kernel runs.

    Source: Dao et al., "FlashAttention", arXiv 2205.14135, section 3.1 (the softmax of a concatenation).
    """
    call = MergeAttention(_stacked("outs", outs, "B,N,H,D"), _stacked("lses", lses, "B,H,N"))
    return serve("merge_attention", call, backend)


def _stacked(name: str, parts, dims: str) -> Tensor:
    """Return the parts stacked, after checks of shapes and types, because torch.stack's messages name no argument."""
    if isinstance(parts, Tensor):
        return parts
    if not isinstance(parts, Sequence):
        raise TypeError(f"{name}: expected a sequence of tensors [{dims}] or a tensor [P,{dims}]; got {type(parts)}")
    if len(parts) < 2:
        raise ValueError(f"{name}: expected 2 or more tensors [{dims}]; got {len(parts)}")
    sizes: dict[str, int] = {}
    for i, part in enumerate(parts):
        checks.shape(f"{name}[{i}]", part, dims, sizes)
        checks.like(f"{name}[{i}]", part, parts[0], first=f"{name}[0]")
    return torch.stack(list(parts))


def _tangents(call: MergeAttention, outs: tuple[Tensor, Tensor], moved: MergeAttention, backend):
    """Return the tangents: with the weights w, the softmax of the lses, dlse = sum w dlse_p and
    dout = sum w (dout_p + (out_p - out) dlse_p).
    """
    out, _ = outs
    counts = call.lses > -torch.inf
    weights = torch.where(counts, call.lses.softmax(0), 0)  # NaN where no part counts

    def of_rows(x: Tensor) -> Tensor:
        return x.transpose(-1, -2).unsqueeze(-1)  # [P,B,H,N] -> [P,B,N,H,1]

    moved_lses = 0 if moved.lses is None else torch.where(counts, moved.lses, 0)
    terms = 0 if moved.outs is None else moved.outs
    if moved.lses is not None:
        terms = terms + (call.outs - out) * of_rows(moved_lses)
    moved_out = torch.where(of_rows(counts), of_rows(weights) * terms, 0).sum(0)
    return moved_out.to(out.dtype), (weights * moved_lses).sum(0)


operator.register("merge_attention", MergeAttention, _tangents)
