"""Host side of merge_attention: the launches of a call, as values. Nothing here runs or waits for the device."""

from __future__ import annotations

import torch

from ....compile.target import Target
from ....triton_lib.launch import Launch, power_of_two, strided
from ....triton_lib.plan import Plan
from ..call import MergeAttention
from .kernels import _merge_attention_backward_kernel, _merge_attention_forward_kernel


def forward(call: MergeAttention, target: Target) -> Plan:
    """Plan out and lse."""
    out, lse = call.empty_outputs()
    arguments = _inputs(call) | {"out_ptr": out, "lse_ptr": lse}
    return Plan([_launch(_merge_attention_forward_kernel, call, arguments)], (out, lse))


def backward(call: MergeAttention, outputs, grads, needs, target: Target) -> Plan:
    """Plan the gradients of outs and lses."""
    (_, lse), (grad_out, grad_lse) = outputs, grads
    douts, dlses = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in call)
    arguments = _inputs(call) | strided("dout", grad_out, "do", "bnh") | strided("dlse", grad_lse, "dl", "bhn")
    arguments |= {"lse_ptr": lse, "douts_ptr": douts, "dlses_ptr": dlses}
    wanted = [grad if need else None for grad, need in zip((douts, dlses), needs, strict=True)]
    return Plan([_launch(_merge_attention_backward_kernel, call, arguments)], gradients=lambda: wanted)


def _inputs(call: MergeAttention) -> dict:
    parts, *_, h, d = call.outs.shape
    sizes = {"H": h, "parts": parts, "D": d, "BLOCK_D": power_of_two(d)}
    return strided("outs", call.outs, "x", "pbnh") | strided("lses", call.lses, "l", "pbhn") | sizes


def _launch(kernel, call: MergeAttention, arguments: dict) -> Launch:
    _, b, n, h, _ = call.outs.shape
    return Launch(kernel, (n * h, b), arguments, num_warps=1, num_stages=1)
