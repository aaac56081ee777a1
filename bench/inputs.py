"""Inputs of each operator, drawn from a seed: Gaussian, never zeros, in the case's letters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Draw:
    """A stream of random tensors on one device; half types are drawn in float32 and rounded."""

    def __init__(self, seed: int, device: str, dtype: torch.dtype):
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device=device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(*shape, generator=self.generator, device=self.device, dtype=torch.float32)
        return (drawn * scale if scale != 1.0 else drawn).to(self.dtype)

    def uniform(self, *shape: int, low: float, high: float) -> Tensor:
        drawn = torch.rand(*shape, generator=self.generator, device=self.device, dtype=torch.float32)
        return (low + (high - low) * drawn).to(self.dtype)

    def keep(self, *shape: int, share: float) -> Tensor:
        """bool, True for about `share` of the entries."""
        return torch.rand(*shape, generator=self.generator, device=self.device) < share

    def labels(self, *shape: int, count: int) -> Tensor:
        return torch.randint(count, shape, generator=self.generator, device=self.device)


def chunked_cross_attention(case, draw: Draw) -> dict[str, Any]:
    s = case.shape
    b, n, m, k, r, h, d = (s[x] for x in "BNMKRHD")
    g, chunks = s.get("G", h), s["L"]
    arguments = {"query": draw.normal(b, n, h, d), "key": draw.normal(b, chunks, k, r, g, d), "value": draw.normal(b, chunks, k, r, g, d)}
    arguments["chunk_len"] = m
    arguments |= _relative(case, draw, (b, n, h), rows=m + r - 1)
    if "neighbour_gate" in case.extras:
        arguments["neighbour_gate"] = draw.uniform(b, chunks, k, low=0.1, high=1.0)  # RPT: at least eta = 0.1
    if "neighbour_mask" in case.extras:
        arguments["neighbour_mask"] = draw.keep(b, chunks, k, share=0.9)
    return arguments | dict(case.options)


def relative_attention(case, draw: Draw) -> dict[str, Any]:
    s = case.shape
    b, n, keys, h, d = (s[x] for x in "BNSHD")
    g = s.get("G", h)
    arguments = {"query": draw.normal(b, n, h, d), "key": draw.normal(b, keys, g, d), "value": draw.normal(b, keys, g, d)}
    arguments |= _relative(case, draw, (b, n, h), rows=s.get("T", n + keys - 1))
    if "key_mask" in case.extras:
        arguments["key_mask"] = draw.keep(b, keys, share=0.9)
    return arguments | dict(case.options)


def _relative(case, draw: Draw, tokens: tuple[int, int, int], rows: int) -> dict[str, Any]:
    """rel_key, rel_query and the two biases, as far as `case.extras` names them; scaled so that no logit dominates."""
    h, d = tokens[2], case.shape["D"]
    e = case.shape.get("E", d)
    found = {}
    if "rel_key" in case.extras:
        found["rel_key"] = draw.normal(h, rows, e)
    if "rel_query" in case.extras:
        found["rel_query"] = draw.normal(*tokens, e)
    if "content_bias" in case.extras:
        found["content_bias"] = draw.normal(h, d, scale=0.5)
    if "position_bias" in case.extras:
        found["position_bias"] = draw.normal(h, e, scale=0.5)
    return found


def relative_logits(case, draw: Draw) -> dict[str, Any]:
    s = case.shape
    b, n, keys, h, e = (s[x] for x in "BNSHE")
    arguments = {"query": draw.normal(b, n, h, e), "rel_key": draw.normal(h, s.get("T", n + keys - 1), e), "key_len": keys}
    if "position_bias" in case.extras:
        arguments["position_bias"] = draw.normal(h, e, scale=0.5)
    return arguments | dict(case.options)


def topk_chunks(case, draw: Draw) -> dict[str, Any]:
    s = case.shape
    b, q, keys, d = (s[x] for x in "BQSD")
    shared = s.get("key_batch", b)
    arguments = {"query": draw.normal(b, q, d), "key": draw.normal(shared, keys, d), "k": s["k"]}
    if "query_doc" in case.extras:
        arguments["query_doc"] = draw.labels(b, q, count=64)
        arguments["key_doc"] = draw.labels(shared, keys, count=64)
    return arguments | dict(case.options)


def leaky_average(case, draw: Draw) -> dict[str, Any]:
    b, n, h, d = (case.shape[x] for x in "BNHD")
    arguments = {"x": draw.normal(b, n, h, d), "decay": draw.uniform(h, low=0.3, high=0.99)}
    if "initial" in case.extras:
        arguments["initial"] = draw.normal(b, h, d)
    return arguments | dict(case.options)
