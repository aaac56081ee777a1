"""Builders of random inputs, one for each op. The tests and the harness use no others.

>>> kw = leaky(seed=1, N=8)
>>> retro_kernels.leaky_average(**kw).shape
torch.Size([2, 8, 3, 5])
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..core.call import resolve

#: device of a builder's tensors without a `Draw`; tests of a GPU's backend set it to "cuda"
DEVICE = "cpu"
BIASES = ("content_bias", "position_bias")
#: options of `_positions`
POSITIONS = ("E", "rel", "heads", "rel_start", "T", "biases", "bias_scale")


class Draw:
    """Stream of random tensors. Numbers are drawn in `drawn_in` and rounded to `dtype`, so a seed gives every type the
    same numbers.

    Args:
        seed: seed of the random stream.
        dtype: type of the tensors.
        device: device of the stream and the tensors.
        drawn_in: type in which numbers are drawn; float32 takes less memory for large tensors.
    """

    def __init__(self, seed: int, dtype: torch.dtype, device: str = "cpu", drawn_in: torch.dtype = torch.float64):
        self.dtype, self.drawn_in, self.device = dtype, drawn_in, device
        self.generator = torch.Generator(device=device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(*shape, generator=self.generator, device=self.device, dtype=self.drawn_in)
        return (drawn * scale if scale != 1.0 else drawn).to(self.dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        drawn = torch.rand(*shape, generator=self.generator, device=self.device, dtype=self.drawn_in)
        return (low + (high - low) * drawn).to(self.dtype)

    def kept(self, *shape: int, share: float) -> Tensor:
        """bool, True for about `share` of the entries."""
        return torch.rand(*shape, generator=self.generator, device=self.device) < share

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=self.device)


class Shapes(Draw):
    """Tensors of the shapes and types of a `Draw`, without memory. torch's own samplers take 10 ms each for them."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device="meta")

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return self.normal(*shape)

    def kept(self, *shape: int, share: float) -> Tensor:
        return torch.empty(shape, dtype=torch.bool, device="meta")

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device="meta")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(g: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)


def randint(seed: int, low: int, high: int, *shape: int) -> Tensor:
    """Return random integers of their own stream, on DEVICE."""
    return torch.randint(low, high, shape, generator=generator(seed)).to(DEVICE)


def _seeded(build: Callable[..., dict]) -> Callable[..., dict]:
    """Let a builder be called with a seed and a type, or with a `Draw`."""

    @functools.wraps(build)
    def seeded(seed: int = 0, *, dtype: torch.dtype = torch.float32, draw: Draw | None = None, **options) -> dict:
        kw = build(draw or Draw(seed, dtype), **options)
        return kw if draw else {name: v.to(DEVICE) if isinstance(v, Tensor) else v for name, v in kw.items()}

    return seeded


@_seeded
def cross_attention(
    g,
    *,
    B=2,
    N=19,
    M=4,
    K=2,
    R=6,
    H=4,
    G=None,
    D=16,
    query_start=0,
    extra_chunks=0,
    gate=False,
    gate_low=0.0,
    mask=None,
    share=0.6,
    dropout_p=0.0,
    **positions,
):
    """Keyword arguments of `chunked_cross_attention`.

    positions: options of `_positions`; mask: None, "neighbour" [B,L,K] or "token" [B,L,K,R], of which `share` is True.
    """
    G = H if G is None else G
    L = (query_start + N) // M + extra_chunks
    kw = {"query": g.normal(B, N, H, D), "key": g.normal(B, L, K, R, G, D), "value": g.normal(B, L, K, R, G, D)}
    kw |= {"chunk_len": M, "query_start": query_start, "dropout_p": dropout_p}
    _positions(g, kw, M + R - 1, **positions)
    if gate:
        kw["neighbour_gate"] = g.uniform(B, L, K, low=gate_low)
    if mask:
        kw["neighbour_mask"] = g.kept(B, L, K, *([R] if mask == "token" else []), share=share)
    return kw


@_seeded
def self_attention(g, *, B=2, N=13, S=None, H=4, G=None, D=16, key_mask=False, share=0.7, segments=False, **options):
    """Keyword arguments of `relative_attention`; options: options of `_positions`, and the op's own."""
    G, S = H if G is None else G, N if S is None else S
    positions = {name: options.pop(name) for name in POSITIONS if name in options}
    kw = {"query": g.normal(B, N, H, D), "key": g.normal(B, S, G, D), "value": g.normal(B, S, G, D), **options}
    _positions(g, kw, N + S - 1, **positions)
    if key_mask:
        kw["key_mask"] = g.kept(B, S, share=share)
    if segments:
        kw["query_segment"] = g.integers(0, 3, B, N).sort(1).values
        kw["key_segment"] = g.integers(0, 3, B, S).sort(1).values
    return kw


def _positions(
    g, kw, displacements, *, E=None, rel="all", heads="each", rel_start=None, T=None, biases=True, bias_scale=1.0
):
    """Draw the relative keys and biases of an attention into `kw`.

    rel: None, "all" (a row for each of the displacements) or "bounded" (T rows from rel_start); heads: "each" or
    "shared" relative keys; E: width of a relative query of its own; biases: True, False or names.
    """
    names = BIASES if biases is True else biases or ()
    *tokens, H, D = kw["query"].shape
    width = D if E is None else E
    if rel is not None:
        kw["rel_key"] = g.normal(H if heads == "each" else 1, displacements if rel == "all" else T, width)
        if E is not None:
            kw["rel_query"] = g.normal(*tokens, H, E)
        if "position_bias" in names:
            kw["position_bias"] = g.normal(H, width, scale=bias_scale)
        kw["rel_start"] = rel_start if rel == "bounded" else None
    if "content_bias" in names:
        kw["content_bias"] = g.normal(H, D, scale=bias_scale)


@_seeded
def relative_logits(g, *, B=2, N=7, H=3, E=16, key_len=9, heads="each", biases=True, bias_scale=1.0, T=None, **options):
    """Keyword arguments of `relative_logits`; T only with rel_start in `options`."""
    kw = {"query": g.normal(B, N, H, E), "key_len": key_len, **options}
    kw["rel_key"] = g.normal(H if heads == "each" else 1, N + key_len - 1 if T is None else T, E)
    if biases is True or "position_bias" in (biases or ()):
        kw["position_bias"] = g.normal(H, E, scale=bias_scale)
    return kw


@_seeded
def topk(g, *, B=2, Q=7, S=23, D=16, k=4, shared=False, docs=0, mask=False, integers=False, **options):
    """Keyword arguments of `topk_chunks`. docs: number of documents (True: 4; 0: none). integers: draw integers, whose
    scores are exact, so that ties are ties in every type.
    """
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
    return kw


@_seeded
def leaky(g, *, B=2, N=37, H=3, D=5, decay=None, initial=True, segments=0):
    """Keyword arguments of `leaky_average`. decay: a list of H values, the (low, high) of random ones, or None for 0 to
    1. segments: about how many; 0: none.
    """
    low, high = decay if isinstance(decay, tuple) else (0.0, 1.0)
    drawn = g.uniform(H, low=low, high=high) if decay is None or isinstance(decay, tuple) else None
    kw = {"x": g.normal(B, N, H, D)}
    kw["decay"] = torch.tensor(decay, dtype=torch.float64).to(g.dtype) if drawn is None else drawn
    if initial:
        kw["initial"] = g.normal(B, H, D)
    if segments:
        kw["segment"] = g.integers(0, segments, B, N).sort(1).values
    return kw


@_seeded
def merged(g, *, P=3, B=2, N=5, H=2, D=16, dead=False):
    """Keyword arguments of `merge_attention`, stacked. dead: some parts have lse -inf and out NaN, and in one row all
    parts have.
    """
    kw = {"outs": g.normal(P, B, N, H, D)}
    kw["lses"] = g.normal(P, B, H, N).to(torch.promote_types(g.dtype, torch.float32))
    if dead:
        kw["lses"][0, :, :, ::2] = kw["lses"][:, 0, 0, 1 % N] = -torch.inf
        kw["outs"] = kw["outs"].masked_fill((kw["lses"] == -torch.inf).transpose(-1, -2).unsqueeze(-1), torch.nan)
    return kw


@_seeded
def rms(g, *, B=2, N=19, D=16, eps=1e-5):
    """Keyword arguments of `rms_norm`."""
    return {"input": g.normal(B, N, D), "weight": g.normal(D), "eps": eps}


@_seeded
def entropy(g, *, N=19, V=33):
    """Keyword arguments of `cross_entropy` without a reduction."""
    return {"input": g.normal(N, V, scale=4.0), "target": g.integers(0, V, N), "reduction": "none"}


def shapes_of(op: type, build: Callable[..., dict], dtype: torch.dtype, **options):
    """Return a checked call of the class `op` on the meta device, from a builder and its options."""
    kw = build(dtype=dtype, draw=Shapes(dtype), **options)
    return resolve(op(**dict.fromkeys(op._fields) | kw))


def cast(kw: dict, dtype: torch.dtype) -> dict:
    """Return the inputs with their floating tensors in `dtype`."""
    types = {name: torch.promote_types(dtype, torch.float32) if name == "lses" else dtype for name in kw}
    return {n: v.to(types[n]) if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in kw.items()}


def differentiable(kw: dict) -> dict:
    """Return the inputs with every floating tensor as a new leaf that requires grad."""
    return {
        name: v.detach().clone().requires_grad_() if isinstance(v, Tensor) and v.is_floating_point() else v
        for name, v in kw.items()
    }
