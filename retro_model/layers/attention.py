"""Multi-head attention with relative positions, and the base class of every attention here."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import retro_kernels as rk
from retro_model.base import checks

from .cache import KeyValueCache
from .positions import RelativePositions


class Attention(nn.Module):
    """Projections to queries, keys and values, and of the output. A subclass computes the attention itself."""

    #: names of parameters, besides the projections, with one row per head
    head_parameters: tuple[str, ...] = ()

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        head_dim: int,
        *,
        context_dim: int | None = None,
        num_kv_heads: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        backend: str | None = None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        checks.integer("num_heads", num_heads, low=1)
        checks.integer("num_kv_heads", kv_heads, low=1)
        checks.head_dim("head_dim", checks.integer("head_dim", head_dim))
        checks.probability("dropout", dropout)
        if num_heads % kv_heads:
            raise ValueError(f"num_kv_heads: expected a divisor of num_heads={num_heads}; got {kv_heads}")
        self.d_model, self.num_heads, self.head_dim, self.num_kv_heads = d_model, num_heads, head_dim, kv_heads
        self.context_dim = d_model if context_dim is None else context_dim
        self.dropout, self.backend = dropout, backend
        options = {"bias": bias, "device": device, "dtype": dtype}
        self.query = nn.Linear(d_model, num_heads * head_dim, **options)
        self.key, self.value = (nn.Linear(self.context_dim, kv_heads * head_dim, **options) for _ in range(2))
        self.output = nn.Linear(num_heads * head_dim, d_model, **options)

    def reset_parameters(self) -> None:
        """Set the biases of each head to 0."""
        for name in self.head_parameters:
            nn.init.zeros_(getattr(self, name))

    def heads_of(self, x: Tensor) -> Tensor:
        """Return queries [...,H,D] of x [...,d_model]."""
        return self.query(x).unflatten(-1, (self.num_heads, self.head_dim))

    def project(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [...,G,D] of a context [...,context_dim]."""
        shape = (self.num_kv_heads, self.head_dim)
        return self.key(context).unflatten(-1, shape), self.value(context).unflatten(-1, shape)

    def options(self) -> dict:
        """Return the arguments that are the same in every call of an op."""
        return {"dropout_p": self.dropout if self.training else 0.0, "backend": self.backend}

    def extra_repr(self) -> str:
        heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
        return f"{heads}, dropout={self.dropout}"


class RelativeProjections(Attention):
    """Base of attentions with Transformer-XL's relative positions: the map of their encodings, and biases u and v."""

    head_parameters = ("content_bias", "position_bias")

    def __init__(self, d_model, num_heads, head_dim, *, device=None, dtype=None, **options):
        super().__init__(d_model, num_heads, head_dim, device=device, dtype=dtype, **options)
        where = {"device": device, "dtype": dtype}
        self.positions = RelativePositions(d_model, num_heads, head_dim, **where)
        for name in self.head_parameters:
            self.register_parameter(name, nn.Parameter(torch.zeros(num_heads, head_dim, **where)))

    def options(self) -> dict:
        return super().options() | {name: local(getattr(self, name)) for name in self.head_parameters}


def local(parameter: Tensor) -> Tensor:
    """Return this process's heads of a parameter: all of them, or its shard of a DTensor."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


class RelativeAttention(RelativeProjections):
    """Multi-head attention with Transformer-XL's relative positions: causal, bidirectional, or across to a context.

        logit[i,j] = ((q_i + u)·k_j + (q_i + v)·W_R s(i + query_offset - j)) / sqrt(D)

    Example:
        layer = RelativeAttention(64, num_heads=4, head_dim=16, causal=True)
        y = x + layer(norm(x))  # x [B,N,64]

    Args:
        d_model: width of the query side and of the output; even.
        num_heads, head_dim: H, D; D a multiple of 8 from 16 to 256.
        causal: a token sees itself and the tokens before it.
        context_dim: width of the context of a cross-attention; None: d_model.
        num_kv_heads: G, divides num_heads (grouped-query attention); None: num_heads.
        bias: biases in the four projections; the projection of the positions has none.
        dropout: probability, in training, of dropping an attention weight.
        backend: of `retro_kernels`; None: the fastest that serves the call.

    Source: Dai et al., arXiv 1901.02860, section 3.3; Borgeaud et al., arXiv 2112.04426, sections 2.4 and 2.5.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        head_dim: int,
        *,
        causal: bool = False,
        context_dim: int | None = None,
        num_kv_heads: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        backend: str | None = None,
        device=None,
        dtype=None,
    ):
        sizes = {"context_dim": context_dim, "num_kv_heads": num_kv_heads, "device": device, "dtype": dtype}
        super().__init__(d_model, num_heads, head_dim, bias=bias, dropout=dropout, backend=backend, **sizes)
        self.causal = causal

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        query_offset: int | None = None,
        key_mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
        part=None,
    ) -> Tensor:
        """Return the update [B,N,d_model] of x [B,N,d_model].

        Args:
            context: [B,S,context_dim] to attend to; None: x itself.
            query_offset: position of query 0 counted from key 0; None: S-N if causal, else 0.
            key_mask: bool [B,S], True = visible. A query that sees nothing gets the output projection of zeros.
            cache: tokens before x, for a causal attention to x itself; x is added. S counts both.
            part: this process's range of a sequence, for a causal attention to x itself; see `retro_model.parallel`.

        Raises:
            ValueError, TypeError: naming the argument.
        """
        sizes: dict[str, int] = {"d_model": self.d_model, "context_dim": self.context_dim}
        checks.shape("x", x, "B,N,d_model", sizes)
        if context is not None:
            checks.shape("context", context, "B,S,context_dim", sizes)
        if cache is not None and (context is not None or not self.causal):
            raise ValueError("cache: expected None unless the attention is causal, and to x itself; got a cache")
        key, value = self.project(x if context is None else context)
        if part is not None:
            if context is not None or not self.causal or key_mask is not None:
                wanted = "None unless the attention is causal, to x itself and without key_mask"
                raise ValueError(f"part: expected {wanted}; got a part")
            return self.output(part.attend(self.heads_of(x), key, value, self.positions, **self.options()).flatten(-2))
        if cache is not None:
            key, value, position = cache.extend(key, value)
            first, rel_key = 0, cache.relative_keys(self.positions, key.shape[1])
            query_offset = position if query_offset is None else query_offset
        else:
            n, s = x.shape[1], key.shape[1]
            if query_offset is None:
                query_offset = s - n if self.causal else 0
            first = 0 if self.causal else query_offset - (s - 1)  # a causal query sees no negative displacement
            rel_key = self.positions(first, max(query_offset + n - first, 1))
        return self.attend(x, key, value, rel_key, first, query_offset=query_offset, key_mask=key_mask)

    def attend(self, x: Tensor, key: Tensor, value: Tensor, rel_key: Tensor, rel_start: int, **options) -> Tensor:
        """Return the update for keys, values [B,S,G,D] and relative keys [H,T,D] that are projected already.

        options: query_offset and key_mask, as in `forward`.
        """
        options |= {"rel_key": rel_key, "rel_start": rel_start, "causal": self.causal}
        out = rk.relative_attention(self.heads_of(x), key, value, **options, **self.options())
        return self.output(out.flatten(-2))
