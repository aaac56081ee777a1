"""Merge of attentions on the CPU (csrc/cpu/merge_attention.cpp): one pass over the parts, with float32 sums."""

from __future__ import annotations

import torch
from torch import Tensor

from ...cpu_lib import empty, native_call, unsupported_tensors


def unsupported(call) -> str | None:
    return unsupported_tensors({"outs": call.outs}) or unsupported_tensors({"lses": call.lses})


def forward(call) -> tuple[Tensor, Tensor]:
    out, lse = empty(call.outs.shape[1:], call.outs.dtype), empty(call.lses.shape[1:], torch.float32)
    native_call.call("merge_attention_forward", *call, out, lse)
    return out, lse


def backward(call, outputs, grads, needs) -> list[Tensor | None]:
    results = [empty(x.shape, x.dtype) if need else None for x, need in zip(call, needs, strict=True)]
    native_call.call("merge_attention_backward", *call, *grads, *results)
    return results
