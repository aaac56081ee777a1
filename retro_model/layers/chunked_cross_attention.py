"""Chunked cross-attention: tokens attend the neighbours of the last complete chunk before them."""

from __future__ import annotations

import torch
from torch import Tensor

import retro_kernels as rk
from retro_model.base import checks

from .attention import RelativeProjections


class ChunkedCrossAttention(RelativeProjections):
    """Attention of every token to the encoded neighbours of the last complete chunk before it.

    The token at position p attends all K neighbours of chunk c = (p+1)//M - 1 in one softmax. It is token
    i = (p+1) % M of its attending chunk; its displacement from token i' of each neighbour is i - i' + M - 1:

        logit[i,(a,i')] = ((q_i + u)·k_{a,i'} + (q_i + v)·W_R s(i - i' + M - 1)) / sqrt(D)

    The first M-1 tokens attend nothing, nor does a token whose neighbours are all masked. Their update is exactly 0,
    also with biases.

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
        self,
        d_model: int,
        num_heads: int,
        head_dim: int,
        *,
        chunk_len: int,
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
        self.chunk_len = checks.integer("chunk_len", chunk_len, low=1)

    def forward(
        self, x: Tensor, encoded: Tensor, *, neighbour_mask: Tensor | None = None, query_start: int = 0
    ) -> Tensor:
        """Return the update [B,N,d_model] of x [B,N,d_model].

        Args:
            encoded: neighbours [B,L,K,R,context_dim], L >= (query_start+N)//M; any K and R.
            neighbour_mask: bool [B,L,K] or [B,L,K,R], True = attend.
            query_start: position of the first token, for decoding.

        Raises:
            ValueError, TypeError: naming the argument.
        """
        sizes: dict[str, int] = {"d_model": self.d_model, "context_dim": self.context_dim}
        checks.shape("x", x, "B,N,d_model", sizes)
        checks.shape("encoded", encoded, "B,L,K,R,context_dim", sizes)
        key, value = self.project(encoded)
        rel_key = self.relative_keys(sizes["R"])
        return self.attend(x, key, value, rel_key, neighbour_mask=neighbour_mask, query_start=query_start)

    def relative_keys(self, neighbour_len: int) -> Tensor:
        """Return relative keys [H,M+R-1,D] for neighbours of R tokens."""
        # row t of the op's table is i-i' = t-(R-1); the paper's displacement is M-1 more: a neighbour holds its chunk
        return self.positions(self.chunk_len - neighbour_len, self.chunk_len + neighbour_len - 1)

    def attend(self, x: Tensor, key: Tensor, value: Tensor, rel_key: Tensor, **options) -> Tensor:
        """Return the update for keys, values [B,L,K,R,G,D] and relative keys that are projected already.

        options: neighbour_mask and query_start, as in `forward`.
        """
        options |= {"chunk_len": self.chunk_len, "rel_key": rel_key, "return_lse": True}
        out, lse = rk.chunked_cross_attention(self.heads_of(x), key, value, **options, **self.options())
        update = self.output(out.flatten(-2))
        if self.output.bias is None:
            return update
        # [B,N,1]; head 0 stands for all: a token that attends nothing has a logit in no head
        attends = (lse[:, 0] != -torch.inf).unsqueeze(-1)
        return torch.where(attends, update, 0)
