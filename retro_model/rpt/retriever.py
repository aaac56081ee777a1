"""Self-retriever: scores the chunks of a sequence against earlier ones by the decoder's own states."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retro_kernels as rk
from retro_model.base import checks
from retro_model.layers import RotaryAttention, rotation

from .config import OWN
from .layers import norm


class SelfRetriever(nn.Module):
    """Retriever of earlier chunks of a sequence for each of its chunks.

        e_i = H_i + BiAttn(norm H_i)    c_i = mean over the chunk of e_i
        s(i, j) = scale * (W_Q c_i)·(W_K c_j),  j <= i - w

    Example:
        retriever = SelfRetriever(512, num_heads=8, chunk_len=64, excluded_chunks=32)
        states = retriever.encode(hidden)            # hidden [B,N,512] -> [B,N//64,64,512]
        query, key = retriever.project(states)       # [B,N//64,512] each
        index = retriever.search(query, key, k=2)    # [B,N//64,2]; -1: none
        scores = retriever.scores(query, key)        # [B,N//64,N//64], for the loss; -inf: not retrievable

    Args:
        d_model, num_heads: d, H of the chunk attention.
        chunk_len: m.
        excluded_chunks: w, chunk i retrieves chunks j <= i - w.
        score_scale: multiplies q·k.
        query_norm, key_norm: RMSNorm before W_Q, before W_K.
        null_slot, dropout, backend: as in `RotaryAttention`.

    Source: Rubin and Berant, arXiv 2306.13421, section 3.1.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        chunk_len: int = 64,
        excluded_chunks: int = 32,
        score_scale: float = 1.0,
        query_norm: bool = False,
        key_norm: bool = False,
        null_slot: bool = False,
        dropout: float = 0.0,
        backend: str | None = None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        self.chunk_len, self.excluded_chunks, self.score_scale = chunk_len, excluded_chunks, score_scale
        self.dropout, self.backend, where = dropout, backend, {"device": device, "dtype": dtype}
        self.norm = norm(d_model, **where)
        options = {"null_slot": null_slot, "dropout": dropout, "backend": backend, **where}
        self.attention = RotaryAttention(d_model, num_heads, **options)
        self.query_norm = norm(d_model, **where) if query_norm else None
        self.key_norm = norm(d_model, **where) if key_norm else None
        self.query, self.key = (nn.Linear(d_model, d_model, bias=False, **where) for _ in range(2))

    def encode(self, hidden: Tensor) -> Tensor:
        """Return e [B,L,m,d] of the complete chunks of hidden states [B,N,d]."""
        checks.shape("hidden", hidden, "B,N,d_model", {"d_model": self.attention.d_model})
        chunks = in_chunks(hidden, self.chunk_len)
        x = chunks.flatten(0, 1)
        turn = rotation(torch.arange(self.chunk_len, device=x.device), self.attention.head_dim, x.dtype)
        x = x + F.dropout(self.attention(self.norm(x), turn), self.dropout, self.training)
        return x.view(chunks.shape)

    def project(self, states: Tensor, trunk_share: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return q and k [B,L,d] of e [B,L,m,d]. trunk_share scales the gradient of e; 0: only W_Q and W_K learn."""
        checks.shape("states", states, "B,L,m,d_model", {"d_model": self.attention.d_model})
        pooled = states.mean(-2)
        if trunk_share != 1.0:
            pooled = pooled.detach().lerp(pooled, trunk_share) if trunk_share else pooled.detach()
        as_query, as_key = (pooled if n is None else n(pooled) for n in (self.query_norm, self.key_norm))
        return self.query(as_query) * self.score_scale, self.key(as_key)

    @torch.no_grad()
    def search(self, query: Tensor, key: Tensor, k: int) -> Tensor:
        """Return the k chunks of the highest score for each query, int64 [B,L,k], best first; -1: fewer retrievable."""
        if not query.shape[1]:
            return torch.empty(*query.shape[:2], k, dtype=torch.int64, device=query.device)
        options = {"causal_gap": self.excluded_chunks, "backend": self.backend}
        return rk.topk_chunks(query.detach(), key.detach(), k, **options)[1]

    def select(self, query: Tensor, key: Tensor, k: int, index: Tensor | None) -> Tensor:
        """Return `index` with `OWN` replaced by the retriever's choice. None: the k best for every chunk."""
        readable = index is not None and index.device.type == "cpu" and not torch.compiler.is_compiling()
        if readable and not bool((index == OWN).any()):  # on a GPU the host would wait, so the search always runs
            return index
        own = self.search(query, key, k if index is None else index.shape[-1])
        return own if index is None else torch.where(index == OWN, own, index)

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """Return s [B,L,L], differentiable; -inf if chunk i may not retrieve chunk j."""
        with torch.autocast(query.device.type, enabled=False):  # half precision would lose ranks and margins
            acc_dtype = torch.promote_types(query.dtype, torch.float32)
            scores = query.to(acc_dtype) @ key.to(acc_dtype).transpose(-1, -2)
        chunk = torch.arange(scores.shape[-1], device=scores.device)
        return scores.masked_fill(chunk > chunk[:, None] - self.excluded_chunks, -torch.inf)


def in_chunks(x: Tensor, chunk_len: int) -> Tensor:
    """Return the complete chunks [B,L,m,d] of x [B,N,d]."""
    if x.shape[1] < chunk_len:
        return x.new_zeros(x.shape[0], 0, chunk_len, x.shape[2])
    return x[:, : x.shape[1] // chunk_len * chunk_len].unflatten(1, (-1, chunk_len))
