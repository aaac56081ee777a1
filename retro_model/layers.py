"""The layers of RETRO as stand-alone modules: bring your own model, add these to it.

All take and give activations [B,N,d_model] and compute a residual update, without the norm before it or the addition
after it. Attention goes through `retro_kernels`; `backend` names one of its backends, None picks the fastest.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retro_kernels as rk
from retro_kernels import _validate

from .config import check_head_dim

ENCODING_BASE = 10_000.0  # longest wavelength / 2 pi of a positional encoding: Vaswani et al., arXiv 1706.03762, section 3.5


def encode_displacements(first: int, count: int, width: int, *, dtype: torch.dtype = torch.float32, device=None) -> Tensor:
    """The positional encodings s(d) = [sin(d w_0) .. sin(d w_n) | cos(d w_0) .. cos(d w_n)] of consecutive displacements.

    w_i = 10000^(-2i/width), n = width/2 - 1.

    Args:
        first: displacement of row 0, in tokens; may be negative.
        count: T, rows.
        width: even.

    Returns:
        [T,width].

    Source: Dai et al., "Transformer-XL", arXiv 1901.02860, section 3.3 and appendix B.
    """
    wide = torch.promote_types(dtype, torch.float32)
    frequency = torch.exp(torch.arange(0, width, 2, dtype=wide, device=device) * (-math.log(ENCODING_BASE) / width))
    angle = torch.arange(first, first + count, dtype=wide, device=device)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], -1).to(dtype)


class RelativePositions(nn.Module):
    """Relative keys: a bias-free linear map, its own for every layer, of the encodings of displacements.

    Example:
        positions = RelativePositions(64, num_heads=4, head_dim=16)
        rel_key = positions(-7, 15)  # [4,15,16]: displacements -7 to 7, what an attention of 8 queries and 8 keys needs

    Args:
        d_model: width of the encodings, the width of the attention's query side; even.
        num_heads, head_dim: H, D.

    Source: Borgeaud et al., arXiv 2112.04426, appendix B.1.2; Dai et al., arXiv 1901.02860, section 3.3 (W_{k,R}).
    """

    def __init__(self, d_model: int, num_heads: int, head_dim: int, *, device=None, dtype=None):
        super().__init__()
        if d_model % 2:
            raise ValueError(f"d_model: expected an even width (half of a positional encoding is sines); got {d_model}")
        self.d_model, self.num_heads, self.head_dim = d_model, num_heads, head_dim
        self.projection = nn.Linear(d_model, num_heads * head_dim, bias=False, device=device, dtype=dtype)

    def forward(self, first: int, count: int) -> Tensor:
        """rel_key [H,count,D]: row t belongs to displacement first + t."""
        weight = self.projection.weight
        encoding = encode_displacements(first, count, self.d_model, dtype=weight.dtype, device=weight.device)
        return self.projection(encoding).view(count, self.num_heads, self.head_dim).transpose(0, 1)


class _Attention(nn.Module):
    """Projections that every attention here has, and Transformer-XL's u and v."""

    def __init__(self, d_model, num_heads, head_dim, *, context_dim, num_kv_heads, bias, dropout, backend, device, dtype):
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, value in (("num_heads", num_heads), ("num_kv_heads", kv_heads)):
            _validate.integer(name, value, low=1)
        check_head_dim("head_dim", _validate.integer("head_dim", head_dim))
        if not 0 <= _validate.number("dropout", dropout) < 1:
            raise ValueError(f"dropout: expected a probability in [0, 1); got {dropout}")
        context_dim = d_model if context_dim is None else context_dim
        if num_heads % kv_heads:
            raise ValueError(f"num_kv_heads: expected a divisor of num_heads={num_heads}; got {kv_heads}")
        self.d_model, self.num_heads, self.head_dim = d_model, num_heads, head_dim
        self.context_dim, self.num_kv_heads = context_dim, kv_heads
        self.dropout, self.backend = dropout, backend
        where = {"device": device, "dtype": dtype}
        self.query = nn.Linear(d_model, num_heads * head_dim, bias=bias, **where)
        self.key = nn.Linear(context_dim, kv_heads * head_dim, bias=bias, **where)
        self.value = nn.Linear(context_dim, kv_heads * head_dim, bias=bias, **where)
        self.output = nn.Linear(num_heads * head_dim, d_model, bias=bias, **where)
        self.positions = RelativePositions(d_model, num_heads, head_dim, **where)
        self.content_bias = nn.Parameter(torch.zeros(num_heads, head_dim, **where))
        self.position_bias = nn.Parameter(torch.zeros(num_heads, head_dim, **where))

    def heads_of(self, x: Tensor) -> Tensor:
        """Queries [B,N,H,D] of x [B,N,d_model]."""
        return self.query(x).unflatten(-1, (self.num_heads, self.head_dim))

    def project(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [...,G,D] of a context [...,context_dim]."""
        shape = (self.num_kv_heads, self.head_dim)
        return self.key(context).unflatten(-1, shape), self.value(context).unflatten(-1, shape)

    def options(self) -> dict:
        return {
            "content_bias": self.content_bias,
            "position_bias": self.position_bias,
            "dropout_p": self.dropout if self.training else 0.0,
            "backend": self.backend,
        }

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, dropout={self.dropout}"


class RelativeAttention(_Attention):
    """Multi-head attention with Transformer-XL's relative positions: causal, bidirectional, or across to a context.

        logit[i,j] = ((q_i + u)·k_j + (q_i + v)·W_R s(i + query_offset - j)) / sqrt(D)

    Example:
        layer = RelativeAttention(64, num_heads=4, head_dim=16, causal=True)
        y = x + layer(norm(x))  # x [B,N,64]

    Args:
        d_model: width of the query side and of the output; even.
        num_heads, head_dim: H, D; D a multiple of 8 from 16 to 256.
        causal: a token sees itself and what came before it.
        context_dim: width of the context of a cross-attention; None: d_model.
        num_kv_heads: G, divides num_heads (grouped-query attention); None: num_heads.
        bias: biases in the four projections (never in that of the positions).
        dropout: probability, in training, of dropping an attention weight.
        backend: of `retro_kernels`; None: the fastest that serves the call.

    Source: Dai et al., arXiv 1901.02860, section 3.3; Borgeaud et al., arXiv 2112.04426, sections 2.4 and 2.5.
    """

    def __init__(
        self, d_model: int, num_heads: int, head_dim: int, *, causal: bool = False, context_dim: int | None = None,
        num_kv_heads: int | None = None, bias: bool = False, dropout: float = 0.0, backend: str | None = None, device=None, dtype=None,
    ):  # fmt: skip
        super().__init__(
            d_model, num_heads, head_dim, context_dim=context_dim, num_kv_heads=num_kv_heads, bias=bias, dropout=dropout,
            backend=backend, device=device, dtype=dtype,
        )  # fmt: skip
        self.causal = causal

    def forward(
        self, x: Tensor, context: Tensor | None = None, *, query_offset: int | None = None, key_mask: Tensor | None = None
    ) -> Tensor:
        """The update [B,N,d_model] of x [B,N,d_model].

        Args:
            context: [B,S,context_dim] to attend to; None: x itself.
            query_offset: position of query 0 counted from key 0; None: S-N if causal, else 0.
            key_mask: bool [B,S], True = visible. A query that sees nothing gets the output projection of zeros.

        Raises:
            ValueError, TypeError: naming the argument.
        """
        sizes: dict[str, int] = {"d_model": self.d_model, "context_dim": self.context_dim}
        _validate.shape("x", x, "B,N,d_model", sizes)
        if context is not None:
            _validate.shape("context", context, "B,S,context_dim", sizes)
        key, value = self.project(x if context is None else context)
        n, s = x.shape[1], key.shape[1]
        if query_offset is None:
            query_offset = s - n if self.causal else 0
        # a causal query sees no negative displacement
        first = 0 if self.causal else query_offset - (s - 1)
        rel_key = self.positions(first, max(query_offset + n - first, 1))
        return self.attend(x, key, value, rel_key, first, query_offset=query_offset, key_mask=key_mask)

    def attend(self, x: Tensor, key: Tensor, value: Tensor, rel_key: Tensor, rel_start: int, *, query_offset=None, key_mask=None) -> Tensor:
        """`forward` with the keys, values [B,S,G,D] and relative keys [H,T,D] already projected, as a cache holds them."""
        out = rk.relative_attention(
            self.heads_of(x), key, value, rel_key=rel_key, rel_start=rel_start, causal=self.causal, query_offset=query_offset,
            key_mask=key_mask, **self.options(),
        )  # fmt: skip
        return self.output(out.flatten(-2))


class ChunkedCrossAttention(_Attention):
    """Attention of every token to the encoded neighbours of the last complete chunk before it.

    The token at position p attends all K neighbours of chunk u = (p+1)//M - 1 in one softmax; as token i = (p+1) % M of its
    attending chunk it stands at displacement d(i,i') = i - i' + M - 1 from token i' of each neighbour:

        logit[i,(a,i')] = ((q_i + u)·k_{a,i'} + (q_i + v)·W_R s(i - i' + M - 1)) / sqrt(D)

    A token that attends nothing, one of the first M-1 or one all of whose neighbours are masked, gets an update of exactly 0,
    whatever biases there are.

    Example:
        layer = ChunkedCrossAttention(64, num_heads=4, head_dim=16, chunk_len=16, context_dim=32)
        y = x + layer(norm(x), encoded)  # x [B,N,64], encoded [B,N//16,K,R,32]

    Args:
        d_model: width of the tokens and of the output; even.
        num_heads, head_dim: H, D; D a multiple of 8 from 16 to 256.
        chunk_len: M.
        context_dim: width of the encoded neighbours; None: d_model.
        num_kv_heads, bias, dropout, backend: as in `RelativeAttention`.

    Source: Borgeaud et al., arXiv 2112.04426, section 2.4, Listing 1, appendix B.1.2.
    """

    def __init__(
        self, d_model: int, num_heads: int, head_dim: int, *, chunk_len: int, context_dim: int | None = None,
        num_kv_heads: int | None = None, bias: bool = False, dropout: float = 0.0, backend: str | None = None, device=None, dtype=None,
    ):  # fmt: skip
        super().__init__(
            d_model, num_heads, head_dim, context_dim=context_dim, num_kv_heads=num_kv_heads, bias=bias, dropout=dropout,
            backend=backend, device=device, dtype=dtype,
        )  # fmt: skip
        self.chunk_len = _validate.integer("chunk_len", chunk_len, low=1)

    def forward(self, x: Tensor, encoded: Tensor, *, neighbour_mask: Tensor | None = None, query_start: int = 0) -> Tensor:
        """The update [B,N,d_model] of x [B,N,d_model].

        Args:
            encoded: neighbours [B,L,K,R,context_dim], L >= (query_start+N)//M; any K and R.
            neighbour_mask: bool [B,L,K] or [B,L,K,R], True = attend.
            query_start: position of the first token, for decoding.

        Raises:
            ValueError, TypeError: naming the argument.
        """
        sizes: dict[str, int] = {"d_model": self.d_model, "context_dim": self.context_dim}
        _validate.shape("x", x, "B,N,d_model", sizes)
        _validate.shape("encoded", encoded, "B,L,K,R,context_dim", sizes)
        key, value = self.project(encoded)
        rel_key = self.relative_keys(sizes["R"])
        return self.attend(x, key, value, rel_key, neighbour_mask=neighbour_mask, query_start=query_start)

    def relative_keys(self, neighbour_len: int) -> Tensor:
        """[H,M+R-1,D] for neighbours of R tokens."""
        # the kernels' row t is i-i' = t-(R-1); the paper's displacement is M-1 further, for a neighbour starts where its chunk does
        return self.positions(self.chunk_len - neighbour_len, self.chunk_len + neighbour_len - 1)

    def attend(self, x: Tensor, key: Tensor, value: Tensor, rel_key: Tensor, *, neighbour_mask=None, query_start: int = 0) -> Tensor:
        """`forward` with the keys, values [B,L,K,R,G,D] and relative keys already projected, as a cache holds them."""
        out, lse = rk.chunked_cross_attention(
            self.heads_of(x), key, value, chunk_len=self.chunk_len, rel_key=rel_key, neighbour_mask=neighbour_mask,
            query_start=query_start, return_lse=True, **self.options(),
        )  # fmt: skip
        update = F.linear(out.flatten(-2), self.output.weight)
        if self.output.bias is None:
            return update
        attends = (lse[:, 0] != -torch.inf).unsqueeze(-1)  # [B,N,1]: no head of a token that attends nothing has a logit
        return update + attends * self.output.bias


class FeedForward(nn.Module):
    """Two matrices with a GELU between them.

    Args:
        d_model, d_ff: widths outside and inside.
        bias: biases in both.

    Source: Borgeaud et al., arXiv 2112.04426, section 2.4 (Ffw) and Table 2; Radford et al., 2019 (GELU).
    """

    def __init__(self, d_model: int, d_ff: int, *, bias: bool = False, device=None, dtype=None):
        super().__init__()
        self.d_model = d_model
        self.inner = nn.Linear(d_model, d_ff, bias=bias, device=device, dtype=dtype)
        self.output = nn.Linear(d_ff, d_model, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The update [...,d_model] of x [...,d_model]."""
        return self.output(F.gelu(self.inner(x)))


def initialise(stack: nn.Module, branches: int) -> None:
    """Initial weights of a stack of residual layers: N(0, 1/fan_in), with the matrices that write to the residual stream
    scaled by 1/sqrt(branches), so that its variance does not grow with depth; biases 0 and norms 1.

    Args:
        stack: the module that holds the layers; embeddings get N(0, 1/width).
        branches: residual updates that one activation passes.

    Source: the depth scaling is GPT-2's (Radford et al., 2019, section 2.3).
    """
    writers = {id(module.output) for module in stack.modules() if isinstance(module, (_Attention, FeedForward))}
    for module in stack.modules():
        if isinstance(module, nn.Linear):
            depth = branches if id(module) in writers else 1
            nn.init.normal_(module.weight, std=(module.in_features * depth) ** -0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, _Attention):
            nn.init.zeros_(module.content_bias)
            nn.init.zeros_(module.position_bias)
