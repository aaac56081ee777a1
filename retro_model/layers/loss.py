"""Cross-entropy of a readout, without ever making the logits of all tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import retro_kernels as rk
from retro_model.base import checks

#: Logits made at a time: 256 MiB in float32, 524 rows of a vocabulary
#: of 128,000. Fewer rows would read the matrix too often.
LOGITS_AT_ONCE = 2**26
#: Logits that a thread's softmax goes over at a time, so that its passes stay in the cache.
LOGITS_IN_CACHE = 2**20


class NextTokenLoss(NamedTuple):
    """Negative log-likelihoods in nats, of tokens given those before them.

    total: their sum, differentiable. losses: [B,N-1], those of tokens 1 to N-1, without a gradient; 0 where not
    counted.
    """

    total: Tensor
    losses: Tensor


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, weights: Tensor | None = None, *, rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """The sum over tokens of weights[t] * -log softmax(x[t] weight^T)[targets[t]], and its terms.

    Logits are made for some rows at a time, and their gradients with them, so that the backward pass computes no logits
    again: as many operations as the plain way, and [rows,V] in place of several [T,V]. Logits are of the type of x and
    weight (under autocast, of autocast's), their exponentials are summed in float32 at least.

    Example:
        total, losses = linear_cross_entropy(x, readout.weight, targets)  # x [T,d], weight [V,d], targets [T]
        (total / len(targets)).backward()

    Args:
        x: [T,d].
        weight: [V,d].
        targets: int64 [T], from 0 to V-1, also where the weight is 0.
        weights: [T], bool or real; None: 1.
        rows: at a time; None: as many as make LOGITS_AT_ONCE logits.

    Returns:
        The sum, float32 (float64 for such x), and its terms [T], which have no gradient.

    Differentiable in x and weight.
    """
    sizes: dict[str, int] = {}
    checks.shape("x", x, "T,d", sizes)
    checks.shape("weight", weight, "V,d", sizes)
    checks.shape("targets", targets, "T", sizes)
    if weights is not None:
        checks.shape("weights", weights, "T", sizes)
    rows = max(1, LOGITS_AT_ONCE // sizes["V"]) if rows is None else checks.integer("rows", rows, low=1)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    acc_dtype = torch.promote_types(x.dtype, torch.float32)
    weights = torch.ones_like(targets, dtype=acc_dtype) if weights is None else weights.to(acc_dtype)
    grads = torch.is_grad_enabled()
    return _op(x, weight, targets, weights, rows, grads and x.requires_grad, grads and weight.requires_grad)[:2]


def next_token_loss(x: Tensor, weight: Tensor, tokens: Tensor, counted: Tensor) -> NextTokenLoss:
    """The loss of predicting tokens 1 to N-1 [B,N] from activations x [B,N,d] before them, through a readout's weight
    [V,d].

    counted: bool or real [B,N], the weight of each token; a sequence's first has none before it and never counts.
    """
    # the last row predicts nothing: no copy of x without it
    counted = torch.cat([counted[:, 1:], torch.zeros_like(counted[:, :1])], 1)
    total, losses = linear_cross_entropy(x.flatten(0, 1), weight, tokens.roll(-1, 1).flatten(), counted.flatten())
    return NextTokenLoss(total, losses.view(tokens.shape)[:, :-1])


@torch.library.custom_op("retro_model::linear_cross_entropy", mutates_args=())
def _op(
    x: Tensor, weight: Tensor, targets: Tensor, weights: Tensor, rows: int, grad_x: bool, grad_weight: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum, its terms, and the sum's gradients (empty where not asked for)."""
    acc_dtype = weights.dtype
    losses = torch.empty_like(weights)
    dx = torch.empty_like(x) if grad_x else x.new_empty(0)
    dweight = torch.zeros_like(weight, dtype=acc_dtype) if grad_weight and not len(x) else weight.new_empty(0)
    with torch.autocast(x.device.type, enabled=False):
        for first in range(0, len(x), rows):
            part = slice(first, first + rows)
            grad = rk.linear(x[part], weight).to(acc_dtype)
            losses[part] = _softmax_losses_(grad, targets[part], weights[part], grad_x or grad_weight)
            grad = grad.to(x.dtype)
            if grad_x:
                dx[part] = rk.linear(grad, weight.T)
            if grad_weight:
                product = rk.linear(grad.T, x[part].T)
                dweight = product.to(acc_dtype) if first == 0 else dweight.add_(product)
    return losses.sum(), losses, dx, dweight.to(weight.dtype)


def _softmax_losses_(logits: Tensor, targets: Tensor, weights: Tensor, wanted: bool) -> Tensor:
    """Weighted losses [T] of logits [T,V], which become the losses' gradient if it is wanted."""
    cached = LOGITS_IN_CACHE * torch.get_num_threads()
    rows = max(1, (cached if logits.device.type == "cpu" else LOGITS_AT_ONCE // 8) // logits.shape[1])
    losses = torch.empty_like(weights)
    for first in range(0, len(logits), rows):
        part = slice(first, first + rows)
        call = logits[part], targets[part].contiguous(), None
        losses[part] = torch.ops.retro_kernels.cross_entropy(*call) * weights[part]
        if wanted:
            (logits[part],) = torch.ops.retro_kernels.cross_entropy_backward(*call, weights[part], [True])
    return losses


@_op.register_fake
def _(x, weight, targets, weights, rows, grad_x, grad_weight):
    dx = torch.empty_like(x) if grad_x else x.new_empty(0)
    dweight = torch.empty_like(weight) if grad_weight else weight.new_empty(0)
    return weights.new_empty(()), torch.empty_like(weights), dx, dweight


def _keep(ctx, inputs, output):
    ctx.asked = inputs[5:]
    ctx.save_for_backward(*output[2:])
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx, grad, *_):
    dx, dweight = (t * grad.to(t.dtype) if asked else None for t, asked in zip(ctx.saved_tensors, ctx.asked))
    return dx, dweight, None, None, None, None, None


_op.register_autograd(_backward, setup_context=_keep)
