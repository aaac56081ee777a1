"""Exact top-k on the CPU (csrc/cpu/topk_chunks.cpp): queries are the lanes of a register, keys are broadcast, and
scores above a row's k-th go into its sorted list.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...cpu_lib import empty, native_call, unsupported_tensors


def unsupported(call) -> str | None:
    docs = {"query_doc": call.query_doc, "key_doc": call.key_doc, "key_mask": call.key_mask}
    for name, tensor in docs.items():
        if tensor is not None and tensor.device.type != "cpu":
            return f"{name} is on {tensor.device}, not on the CPU"
    return unsupported_tensors({"query": call.query, "key": call.key})


def forward(call) -> tuple[Tensor, Tensor]:
    b, q, _ = call.query.shape
    scores = empty((b, q, call.k), torch.float32)
    indices = empty((b, q, call.k), torch.int64)
    causal = call.causal_gap is not None
    gap, s = call.causal_gap or 0, call.key.shape[1]
    # clamped, because the difference might not fit 64 bits; at the bounds every key or none is visible
    shift = max(-q, min(s, call.query_offset - gap if causal else 0))
    tensors = (call.query, call.key, call.query_doc, call.key_doc, call.key_mask, scores, indices)
    native_call.call("topk_chunks_forward", *tensors, call.metric == "l2", causal, shift)
    return scores, indices


def backward(call, outputs, grads, needs) -> list[Tensor | None]:
    """Return the gradients, which come from the chosen slots alone. It takes O(B*Q*k + S) integers of memory."""
    inputs = (call.query, call.key)
    results = [empty(t.shape, t.dtype) if need else None for need, t in zip(needs, inputs, strict=True)]
    tensors = (*inputs, outputs[1], grads[0], *results)
    native_call.call("topk_chunks_backward", *tensors, call.metric == "l2")
    return results
