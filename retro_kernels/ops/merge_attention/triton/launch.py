"""Host side of merge_attention: allocates and launches. Nothing here waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from ....compile.target import Target
from ....core import layouts
from ....triton_lib.launch import Scalars, launch, power_of_two, strides
from ..call import MergeAttention
from .kernels import _merge_attention_backward_kernel, _merge_attention_forward_kernel


def forward(call: MergeAttention, target: Target) -> tuple[Tensor, Tensor]:
    """Return out and lse."""
    out, lse = call.empty_outputs()
    tensors = {"outs_ptr": call.outs, "lses_ptr": call.lses, "out_ptr": out, "lse_ptr": lse}
    scalars = layouts.current().once("merge", lambda: _scalars(call))
    launch(_merge_attention_forward_kernel, tensors, scalars)
    return out, lse


def backward(call: MergeAttention, outputs, grads, needs, target: Target) -> list[Tensor | None]:
    """Return the gradients of outs and lses."""
    (_, lse), (grad_out, grad_lse) = outputs, grads
    douts, dlses = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in call)
    tensors = {"outs_ptr": call.outs, "lses_ptr": call.lses, "lse_ptr": lse, "dout_ptr": grad_out, "dlse_ptr": grad_lse}
    tensors |= {"douts_ptr": douts, "dlses_ptr": dlses}
    scalars = layouts.current().once("merge", lambda: _scalars(call, grad_out, grad_lse))
    launch(_merge_attention_backward_kernel, tensors, scalars)
    return [grad if need else None for grad, need in zip((douts, dlses), needs, strict=True)]


def _scalars(call: MergeAttention, grad_out: Tensor | None = None, grad_lse: Tensor | None = None) -> Scalars:
    parts, b, n, h, d = call.outs.shape
    arguments = {"H": h, "parts": parts, "D": d, "BLOCK_D": power_of_two(d)}
    arguments |= strides(call.outs, "x", "pbnh") | strides(call.lses, "l", "pbhn")
    arguments |= strides(grad_out, "do", "bnh") | strides(grad_lse, "dl", "bhn")
    return Scalars((n * h, b), arguments, num_warps=1, num_stages=1)
