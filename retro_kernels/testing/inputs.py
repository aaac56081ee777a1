"""Random inputs of every op. One builder an op: the tests and the harness draw from these alone.

>>> kw = leaky(seed=1, N=8)
>>> retro_kernels.leaky_average(**kw).shape
torch.Size([2, 8, 3, 5])
"""

from __future__ import annotations

import torch
from torch import Tensor

#: where the builders put their tensors unless a `Draw` says; the
#: tests set it to "cuda" for a backend that runs on a GPU
DEVICE = "cpu"
BIASES = ("content_bias", "position_bias")


class Draw:
    """A stream of random tensors. Numbers are drawn in `drawn_in` and rounded to `dtype`: one seed gives all types the
    same.

    Args:
        seed: of the stream.
        dtype: of the tensors.
        device: where the stream lives and draws.
        drawn_in: the type that numbers are drawn in; float32 spares memory where tensors are large.
    """

    def __init__(self, seed: int, dtype: torch.dtype, device: str = "cpu", drawn_in: torch.dtype = torch.float64):
        self.dtype, self.drawn_in, self.device = dtype, drawn_in, device
        self.generator = torch.Generator(device=device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(*shape, generator=self.generator, device=self.device, dtype=self.drawn_in)
        return (drawn * scale if scale != 1.0 else drawn).to(self.dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return (
            low + (high - low) * torch.rand(*shape, generator=self.generator, device=self.device, dtype=self.drawn_in)
        ).to(self.dtype)

    def kept(self, *shape: int, share: float) -> Tensor:
        """bool, True for about `share` of the entries."""
        return torch.rand(*shape, generator=self.generator, device=self.device) < share

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=self.device)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(g: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)


def randint(seed: int, low: int, high: int, *shape: int) -> Tensor:
    """Integers of a stream of their own, on DEVICE."""
    return torch.randint(low, high, shape, generator=generator(seed)).to(DEVICE)


def _placed(kw: dict, draw: Draw | None) -> dict:
    return kw if draw else {name: v.to(DEVICE) if isinstance(v, Tensor) else v for name, v in kw.items()}


def _names_of(biases: bool | tuple[str, ...]) -> tuple[str, ...]:
    return BIASES if biases is True else biases or ()


def cross_attention(
    seed: int = 0,
    *,
    dtype=torch.float32,
    B=2,
    N=19,
    M=4,
    K=2,
    R=6,
    H=4,
    G=None,
    D=16,
    E=None,
    query_start=0,
    extra_chunks=0,
    rel="all",
    heads="each",
    rel_start=None,
    T=None,
    biases=True,
    bias_scale=1.0,
    gate=False,
    gate_low=0.0,
    mask=None,
    share=0.6,
    dropout_p=0.0,
    draw=None,
):
    """Keyword arguments of `chunked_cross_attention`.

    rel: None, "all" (every displacement) or "bounded" (T rows from rel_start); heads: "each" or "shared" relative keys;
    biases: True, False or names; mask: None, "neighbour" [B,L,K] or "token" [B,L,K,R], of which `share` is True; E
    given means a relative query of its own; draw: a `Draw` in place of seed and dtype.
    """
    g = draw or Draw(seed, dtype)
    G = H if G is None else G
    L = (query_start + N) // M + extra_chunks
    kw = {
        "query": g.normal(B, N, H, D),
        "key": g.normal(B, L, K, R, G, D),
        "value": g.normal(B, L, K, R, G, D),
        "chunk_len": M,
        "query_start": query_start,
        "dropout_p": dropout_p,
    }
    if rel is not None:
        _relative(g, kw, (B, N, H), D, E, heads, M + R - 1 if rel == "all" else T, biases, bias_scale)
        kw["rel_start"] = rel_start if rel == "bounded" else None
    if "content_bias" in _names_of(biases):
        kw["content_bias"] = g.normal(H, D, scale=bias_scale)
    if gate:
        kw["neighbour_gate"] = g.uniform(B, L, K, low=gate_low)
    if mask:
        kw["neighbour_mask"] = g.kept(B, L, K, *([R] if mask == "token" else []), share=share)
    return _placed(kw, draw)


def self_attention(
    seed: int = 0,
    *,
    dtype=torch.float32,
    B=2,
    N=13,
    S=None,
    H=4,
    G=None,
    D=16,
    E=None,
    rel="all",
    heads="each",
    rel_start=None,
    T=None,
    biases=True,
    bias_scale=1.0,
    key_mask=False,
    share=0.7,
    segments=False,
    draw=None,
    **options,
):
    """Keyword arguments of `relative_attention`, as above; `options` go through (causal, causal_gap, window,
    window_block, query_offset, ...).
    """
    g = draw or Draw(seed, dtype)
    G, S = H if G is None else G, N if S is None else S
    kw = {
        "query": g.normal(B, N, H, D),
        "key": g.normal(B, S, G, D),
        "value": g.normal(B, S, G, D),
        **options,
    }
    if rel is not None:
        _relative(g, kw, (B, N, H), D, E, heads, N + S - 1 if rel == "all" else T, biases, bias_scale)
        kw["rel_start"] = rel_start if rel == "bounded" else None
    if "content_bias" in _names_of(biases):
        kw["content_bias"] = g.normal(H, D, scale=bias_scale)
    if key_mask:
        kw["key_mask"] = g.kept(B, S, share=share)
    if segments:
        kw["query_segment"] = g.integers(0, 3, B, N).sort(1).values
        kw["key_segment"] = g.integers(0, 3, B, S).sort(1).values
    return _placed(kw, draw)


def _relative(g: Draw, kw: dict, tokens: tuple[int, int, int], D, E, heads, rows, biases, bias_scale) -> None:
    H, width = tokens[2], D if E is None else E
    kw["rel_key"] = g.normal(H if heads == "each" else 1, rows, width)
    if E is not None:
        kw["rel_query"] = g.normal(*tokens, E)
    if "position_bias" in _names_of(biases):
        kw["position_bias"] = g.normal(H, width, scale=bias_scale)


def relative_logits(
    seed: int = 0,
    *,
    dtype=torch.float32,
    B=2,
    N=7,
    H=3,
    E=16,
    key_len=9,
    heads="each",
    biases=True,
    bias_scale=1.0,
    T=None,
    draw=None,
    **options,
):
    """Keyword arguments of `relative_logits`; T only with rel_start in `options`."""
    g = draw or Draw(seed, dtype)
    kw = {"query": g.normal(B, N, H, E), "key_len": key_len, **options}
    kw["rel_key"] = g.normal(H if heads == "each" else 1, N + key_len - 1 if T is None else T, E)
    if "position_bias" in _names_of(biases):
        kw["position_bias"] = g.normal(H, E, scale=bias_scale)
    return _placed(kw, draw)


def topk(
    seed: int = 0,
    *,
    dtype=torch.float32,
    B=2,
    Q=7,
    S=23,
    D=16,
    k=4,
    shared=False,
    docs=0,
    mask=False,
    integers=False,
    draw=None,
    **options,
):
    """Keyword arguments of `topk_chunks`; docs: how many documents there are (True: 4), 0 for a call without them.

    `integers` makes scores exact, so that ties are exact in every type.
    """
    g = draw or Draw(seed, dtype)
    keys = 1 if shared else B
    if integers:
        query, key = g.integers(-3, 4, B, Q, D).to(g.dtype), g.integers(-3, 4, keys, S, D).to(g.dtype)
    else:
        query, key = g.normal(B, Q, D), g.normal(keys, S, D)
    kw = {"query": query, "key": key, "k": k, **options}
    if docs:
        count = 4 if docs is True else docs
        kw["query_doc"], kw["key_doc"] = g.integers(0, count, B, Q), g.integers(0, count, keys, S)
    if mask:
        kw["key_mask"] = g.kept(keys, S, share=0.7)
    return _placed(kw, draw)


def leaky(seed: int = 0, *, dtype=torch.float32, B=2, N=37, H=3, D=5, decay=None, initial=True, segments=0, draw=None):
    """Keyword arguments of `leaky_average`; decay: a list of H values, the (low, high) of random ones, or None for 0 to
    1.

    segments: about how many, 0: none given.
    """
    g = draw or Draw(seed, dtype)
    low, high = decay if isinstance(decay, tuple) else (0.0, 1.0)
    drawn = g.uniform(H, low=low, high=high) if decay is None or isinstance(decay, tuple) else None
    kw = {"x": g.normal(B, N, H, D)}
    kw["decay"] = torch.tensor(decay, dtype=torch.float64).to(g.dtype) if drawn is None else drawn
    if initial:
        kw["initial"] = g.normal(B, H, D)
    if segments:
        kw["segment"] = g.integers(0, segments, B, N).sort(1).values
    return _placed(kw, draw)


def merged(seed: int = 0, *, dtype=torch.float32, P=3, B=2, N=5, H=2, D=16, dead=False, draw=None):
    """Keyword arguments of `merge_attention`, the parts side by side.

    dead: some parts have lse -inf and NaN in place of their out, and one row has no part that counts.
    """
    g = draw or Draw(seed, dtype)
    kw = {"outs": g.normal(P, B, N, H, D), "lses": g.normal(P, B, H, N).to(_statistics(g.dtype))}
    if dead:
        kw["lses"][0, :, :, ::2] = kw["lses"][:, 0, 0, 1] = -torch.inf
        kw["outs"] = kw["outs"].masked_fill((kw["lses"] == -torch.inf).transpose(-1, -2).unsqueeze(-1), torch.nan)
    return _placed(kw, draw)


def linear(seed: int = 0, *, dtype=torch.float32, B=2, N=19, I=16, J=24, bias=True, draw=None):
    """Keyword arguments of `linear`."""
    g = draw or Draw(seed, dtype)
    kw = {"input": g.normal(B, N, I), "weight": g.normal(J, I, scale=I**-0.5)}
    return _placed(kw | ({"bias": g.normal(J)} if bias else {}), draw)


def rms(seed: int = 0, *, dtype=torch.float32, B=2, N=19, D=16, eps=1e-5, draw=None):
    """Keyword arguments of `rms_norm`."""
    g = draw or Draw(seed, dtype)
    return _placed({"input": g.normal(B, N, D), "weight": g.normal(D), "eps": eps}, draw)


def entropy(seed: int = 0, *, dtype=torch.float32, N=19, V=33, draw=None):
    """Keyword arguments of `cross_entropy`, whose losses are not summed."""
    g = draw or Draw(seed, dtype)
    return _placed({"input": g.normal(N, V, scale=4.0), "target": g.integers(0, V, N), "reduction": "none"}, draw)


def _statistics(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def cast(kw: dict, dtype: torch.dtype) -> dict:
    """The same inputs, floating tensors in `dtype`."""
    types = {name: _statistics(dtype) if name == "lses" else dtype for name in kw}
    return {n: v.to(types[n]) if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in kw.items()}


def differentiable(kw: dict) -> dict:
    """Fresh leaves that require grad, for every floating tensor."""
    return {
        name: v.detach().clone().requires_grad_() if isinstance(v, Tensor) and v.is_floating_point() else v
        for name, v in kw.items()
    }
