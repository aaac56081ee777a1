"""Random inputs of every op, guard bands and poison. One builder an op; every test and every backend uses these."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

GUARD = 64  # NaN elements before and after a guarded tensor

#: where the builders put their tensors; conftest sets it to "cuda" for a backend that runs on a GPU
DEVICE = "cpu"


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(g: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)


def _placed(kw: dict) -> dict:
    return {name: v.to(DEVICE) if isinstance(v, Tensor) else v for name, v in kw.items()}


def cross_attention(
    seed: int = 0, *, dtype=torch.float32, B=2, N=19, M=4, K=2, R=6, H=4, G=None, D=16, E=None, query_start=0, extra_chunks=0,
    rel="all", heads="each", rel_start=None, T=None, biases=True, gate=False, mask=None, dropout_p=0.0,
):  # fmt: skip
    """Keyword arguments of `chunked_cross_attention`.

    rel: None, "all" (every displacement) or "bounded" (T rows from rel_start); heads: "each" or "shared" relative keys;
    mask: None, "neighbour" [B,L,K] or "token" [B,L,K,R]; E given means a relative query of its own.
    """
    g = generator(seed)
    G = H if G is None else G
    L = (query_start + N) // M + extra_chunks
    kw = {
        "query": randn(g, B, N, H, D, dtype=dtype),
        "key": randn(g, B, L, K, R, G, D, dtype=dtype),
        "value": randn(g, B, L, K, R, G, D, dtype=dtype),
        "chunk_len": M,
        "query_start": query_start,
        "dropout_p": dropout_p,
    }
    if rel is not None:
        _relative(g, kw, dtype, B, N, H, D, E, heads, M + R - 1 if rel == "all" else T, biases)
        kw["rel_start"] = rel_start if rel == "bounded" else None
    if biases:
        kw["content_bias"] = randn(g, H, D, dtype=dtype)
    if gate:
        kw["neighbour_gate"] = torch.rand(B, L, K, generator=g, dtype=torch.float64).to(dtype)
    if mask == "neighbour":
        kw["neighbour_mask"] = torch.rand(B, L, K, generator=g) < 0.6
    elif mask == "token":
        kw["neighbour_mask"] = torch.rand(B, L, K, R, generator=g) < 0.6
    return _placed(kw)


def self_attention(
    seed: int = 0, *, dtype=torch.float32, B=2, N=13, S=None, H=4, G=None, D=16, E=None, rel="all", heads="each", rel_start=None, T=None,
    biases=True, key_mask=False, segments=False, **options,
):  # fmt: skip
    """Keyword arguments of `relative_attention`; `options` go through (causal, causal_gap, window, window_block, query_offset, dropout_p)."""
    g = generator(seed)
    G, S = H if G is None else G, N if S is None else S
    kw = {
        "query": randn(g, B, N, H, D, dtype=dtype),
        "key": randn(g, B, S, G, D, dtype=dtype),
        "value": randn(g, B, S, G, D, dtype=dtype),
        **options,
    }
    if rel is not None:
        _relative(g, kw, dtype, B, N, H, D, E, heads, N + S - 1 if rel == "all" else T, biases)
        kw["rel_start"] = rel_start if rel == "bounded" else None
    if biases:
        kw["content_bias"] = randn(g, H, D, dtype=dtype)
    if key_mask:
        kw["key_mask"] = torch.rand(B, S, generator=g) < 0.7
    if segments:
        kw["query_segment"] = torch.randint(0, 3, (B, N), generator=g).sort(1).values
        kw["key_segment"] = torch.randint(0, 3, (B, S), generator=g).sort(1).values
    return _placed(kw)


def _relative(g, kw, dtype, B, N, H, D, E, heads, rows, biases) -> None:
    width = D if E is None else E
    kw["rel_key"] = randn(g, H if heads == "each" else 1, rows, width, dtype=dtype)
    if E is not None:
        kw["rel_query"] = randn(g, B, N, H, E, dtype=dtype)
    if biases:
        kw["position_bias"] = randn(g, H, width, dtype=dtype)


def relative_logits(seed: int = 0, *, dtype=torch.float32, B=2, N=7, H=3, E=16, key_len=9, heads="each", biases=True, T=None, **options):
    """Keyword arguments of `relative_logits`; T only with rel_start in `options`."""
    g = generator(seed)
    kw = {"query": randn(g, B, N, H, E, dtype=dtype), "key_len": key_len, **options}
    kw["rel_key"] = randn(g, H if heads == "each" else 1, N + key_len - 1 if T is None else T, E, dtype=dtype)
    if biases:
        kw["position_bias"] = randn(g, H, E, dtype=dtype)
    return _placed(kw)


def topk(seed: int = 0, *, dtype=torch.float32, B=2, Q=7, S=23, D=16, k=4, shared=False, docs=False, mask=False, integers=False, **options):
    """Keyword arguments of `topk_chunks`; `integers` makes scores exact, so that ties are exact in every type."""
    g = generator(seed)
    keys = 1 if shared else B
    if integers:
        query = torch.randint(-3, 4, (B, Q, D), generator=g).to(dtype)
        key = torch.randint(-3, 4, (keys, S, D), generator=g).to(dtype)
    else:
        query, key = randn(g, B, Q, D, dtype=dtype), randn(g, keys, S, D, dtype=dtype)
    kw = {"query": query, "key": key, "k": k, **options}
    if docs:
        kw["query_doc"] = torch.randint(0, 4, (B, Q), generator=g)
        kw["key_doc"] = torch.randint(0, 4, (keys, S), generator=g)
    if mask:
        kw["key_mask"] = torch.rand(keys, S, generator=g) < 0.7
    return _placed(kw)


def leaky(seed: int = 0, *, dtype=torch.float32, B=2, N=37, H=3, D=5, decay=None, initial=True, segments=0):
    """Keyword arguments of `leaky_average`; decay a list of H values, or None for random ones; segments: about how many, 0: none given."""
    g = generator(seed)
    decay = torch.rand(H, generator=g, dtype=torch.float64) if decay is None else torch.tensor(decay, dtype=torch.float64)
    kw = {"x": randn(g, B, N, H, D, dtype=dtype), "decay": decay.to(dtype)}
    if initial:
        kw["initial"] = randn(g, B, H, D, dtype=dtype)
    if segments:
        kw["segment"] = torch.randint(0, segments, (B, N), generator=g).sort(1).values
    return _placed(kw)


def cast(kw: dict, dtype: torch.dtype) -> dict:
    """The same inputs, floating tensors in `dtype`."""
    return {name: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for name, v in kw.items()}


def differentiable(kw: dict) -> dict:
    """Fresh leaves that require grad, for every floating tensor."""
    return {name: v.detach().clone().requires_grad_() if isinstance(v, Tensor) and v.is_floating_point() else v for name, v in kw.items()}


def guarded(tensor: Tensor) -> Tensor:
    """The same values inside a larger buffer whose other elements are NaN (True for bool): reading past an end shows."""
    fill = torch.nan if tensor.is_floating_point() else 1
    buffer = torch.full((tensor.numel() + 2 * GUARD,), fill, dtype=tensor.dtype, device=tensor.device)
    view = buffer[GUARD : GUARD + tensor.numel()].view(tensor.shape)
    view.copy_(tensor)
    return view


def sliced(tensor: Tensor) -> Tensor:
    """The same values as a strided view (rows twice as far apart, NaN between them), last dimension contiguous."""
    if tensor.dim() < 2:
        return tensor
    fill = torch.nan if tensor.is_floating_point() else 0
    wide = torch.full((*tensor.shape[:-2], 2 * tensor.shape[-2], tensor.shape[-1] + 3), fill, dtype=tensor.dtype, device=tensor.device)
    view = wide[..., ::2, 1 : 1 + tensor.shape[-1]]
    view.copy_(tensor)
    return view


def spread(tensor: Tensor) -> Tensor:
    """The same values as a view whose last dimension is strided too; what lies between must not be read."""
    fill = torch.nan if tensor.is_floating_point() else 1
    wide = torch.full((*tensor.shape[:-1], 3 * tensor.shape[-1]), fill, dtype=tensor.dtype, device=tensor.device)
    wide[..., ::3] = tensor
    return wide[..., ::3]


@contextlib.contextmanager
def poisoned_empty():
    """Inside, `torch.empty`, `empty_like` and `new_empty` return NaN (or a large integer) instead of whatever lay there."""
    real_empty, real_like, real_new = torch.empty, torch.empty_like, Tensor.new_empty

    def fill(t: Tensor) -> Tensor:
        if t.dtype == torch.bool or t.numel() == 0:
            return t
        return t.fill_(torch.nan) if t.is_floating_point() else t.fill_(torch.iinfo(t.dtype).max)

    torch.empty = lambda *a, **k: fill(real_empty(*a, **k))
    torch.empty_like = lambda *a, **k: fill(real_like(*a, **k))
    Tensor.new_empty = lambda self, *a, **k: fill(real_new(self, *a, **k))
    try:
        yield
    finally:
        torch.empty, torch.empty_like, Tensor.new_empty = real_empty, real_like, real_new
