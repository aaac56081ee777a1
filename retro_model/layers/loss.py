"""Cross-entropy of a readout in blocks of rows: the logits of all tokens are never in memory together."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import retro_kernels  # noqa: F401, it registers the operators
from retro_model.base import checks

#: Logits of a block: 256 MiB in float32, 524 rows of a vocabulary of 128,000. A smaller block would read the matrix
#: more often.
LOGITS_AT_ONCE = 2**26
#: Target of a token without a loss, as in torch.
IGNORED = -100
#: Logits that one thread's softmax reads at a time, so that its passes stay in the cache.
LOGITS_IN_CACHE = 2**20


class NextTokenLoss(NamedTuple):
    """Negative log-likelihood of each token given the tokens before it, in nats.

    total: the sum, differentiable. losses: [B,N-1], of tokens 1 to N-1, without a gradient; 0 where not counted.
    """

    total: Tensor
    losses: Tensor


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, weights: Tensor | None = None, *, rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the sum over tokens of weights[t] * -log softmax(x[t] weight^T)[targets[t]], and its terms.

    The forward pass makes logits and their gradients for `rows` rows at a time; the backward pass computes no logits.
    The number of operations is the same as with all logits at once. The memory is [rows,V] instead of several [T,V].
    Logits have the type of x and weight, or autocast's; exponentials are summed in float32 at least.

    Example:
        total, losses = linear_cross_entropy(x, readout.weight, targets)  # x [T,d], weight [V,d], targets [T]
        (total / len(targets)).backward()

    Args:
        x: [T,d].
        weight: [V,d].
        targets: int64 [T], each from 0 to V-1, also where the weight is 0; or -100, a token without a loss.
        weights: [T], bool or real; None: 1.
        rows: rows of a block; None: LOGITS_AT_ONCE // V.

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
    """Return the loss of tokens [B,N], each predicted from x [B,N,d] of the token before by a readout's weight [V,d].

    counted: bool or real [B,N], the weight of each token; the first of a sequence never counts.
    """
    # the last row of x predicts nothing: its weight is 0, which saves a copy of x without it
    counted = torch.cat([counted[:, 1:], torch.zeros_like(counted[:, :1])], 1)
    total, losses = linear_cross_entropy(x.flatten(0, 1), weight, tokens.roll(-1, 1).flatten(), counted.flatten())
    return NextTokenLoss(total, losses.view(tokens.shape)[:, :-1])


@torch.library.custom_op("retro_model::linear_cross_entropy", mutates_args=())
def _op(
    x: Tensor, weight: Tensor, targets: Tensor, weights: Tensor, rows: int, grad_x: bool, grad_weight: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the sum, its terms, and the sum's gradients, which are empty unless asked for."""
    acc_dtype, losses = weights.dtype, torch.empty_like(weights)
    dx = torch.empty_like(x) if grad_x else x.new_empty(0)
    dweight = torch.zeros_like(weight, dtype=acc_dtype) if grad_weight and not len(x) else weight.new_empty(0)
    with torch.autocast(x.device.type, enabled=False):
        for first in range(0, len(x), rows):
            part = slice(first, first + rows)
            grad = F.linear(x[part], weight).to(acc_dtype)
            losses[part] = _softmax_losses_(grad, targets[part], weights[part], grad_x or grad_weight)
            grad = grad.to(x.dtype)
            if grad_x:
                dx[part] = grad @ weight
            if grad_weight:
                product = grad.T @ x[part]
                dweight = product.to(acc_dtype) if first == 0 else dweight.add_(product)
    return losses.sum(), losses, dx, dweight.to(weight.dtype)


def _softmax_losses_(logits: Tensor, targets: Tensor, weights: Tensor, wanted: bool) -> Tensor:
    """Return weighted losses [T] of logits [T,V]; if `wanted`, overwrite the logits with the losses' gradient."""
    cached = LOGITS_IN_CACHE * torch.get_num_threads()
    rows = max(1, (cached if logits.device.type == "cpu" else LOGITS_AT_ONCE // 8) // logits.shape[1])
    losses = torch.empty_like(weights)
    for first in range(0, len(logits), rows):
        part = slice(first, first + rows)
        call = logits[part], targets[part].contiguous(), IGNORED, None
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
