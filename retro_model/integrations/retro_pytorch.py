"""Adapter that runs another package's chunked cross-attention on our op, with its weights.

Source: retro-pytorch 0.3.9 (PyPI), which differs from arXiv 2112.04426 in positions and a learned null key and value.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retro_kernels as rk
from retro_model.retrofit.own_attend import turned

ORIGINAL = "ChunkedCrossAttention"


class RetroPytorchCCA(nn.Module):
    """Drop-in for retro-pytorch's `ChunkedCrossAttention`: the same parameters, arguments and outputs, by our op.

    Every query has one more key, the learned null key. It is merged exactly through the op's log-sum-exp: its weight is
    sigmoid(s0 - lse), where s0 is its logit. Rotary positions are applied to queries and keys before the op, as in
    retro-pytorch: only the first query of a chunk has an angle. `pos_emb=None` turns them off.

    Args:
        original: the module to replace; its parameters are shared, not copied, and keep their names.
        backend: passed to `rk.chunked_cross_attention`.
    """

    def __init__(self, original: nn.Module, *, backend: str | None = None):
        super().__init__()
        for name in ("to_q", "to_k", "to_v", "to_out", "null_k", "null_v", "heads", "scale", "dropout"):
            if not hasattr(getattr(original, "cross_attn", None), name):
                wanted = f"retro-pytorch's {ORIGINAL}, whose cross_attn has {name}"
                raise TypeError(f"original: expected {wanted}; got {type(original).__name__}")
        self.chunk_size, self.cross_attn, self.backend = original.chunk_size, original.cross_attn, backend

    def forward(self, x: Tensor, *, context: Tensor, context_mask: Tensor | None = None, pos_emb=None) -> Tensor:
        """x [B,N,F], context [B,L,K,R,F'], context_mask bool [B,L,K,R] (True = attend) -> [B,N,F].

        pos_emb: None, or angles [1,1,M,P] of the queries and [1,1,R,P] of the keys, as retro-pytorch's decoder makes.
        Raises: ValueError if x and context differ in the number of chunks.
        """
        attention, first = self.cross_attn, self.chunk_size - 1
        chunks = x.shape[1] // self.chunk_size
        if context.ndim != 5 or context.shape[:2] != (x.shape[0], chunks):
            raise ValueError(
                f"context: expected [B={x.shape[0]},L={chunks},K,R,F] for N={x.shape[1]}; got {list(context.shape)}"
            )
        if chunks == 0:
            return torch.zeros_like(x)
        attending = x[:, first:]  # earlier tokens attend nothing and get 0, without the output's bias
        query = attention.to_q(attending).unflatten(-1, (attention.heads, -1))
        parts = (attention.to_k(context), attention.to_v(context), attention.null_k, attention.null_v)
        key, value, null_key, null_value = (part.unflatten(-1, (attention.heads, -1)) for part in parts)
        if pos_emb is not None:
            query, key = _collapsed_rotary(query, key, *pos_emb, self.chunk_size)
        dropout_p = attention.dropout.p if self.training else 0.0
        options = {"chunk_len": self.chunk_size, "neighbour_mask": context_mask, "query_start": first}
        options |= {"scale": attention.scale, "dropout_p": dropout_p, "backend": self.backend}
        out, lse = rk.chunked_cross_attention(query, key, value, return_lse=True, **options)  # [B,N,H,D], [B,H,N]
        logit = attention.scale * (query * null_key).sum(-1, dtype=torch.float32)  # [B,N,H]
        share = torch.sigmoid(logit - lse.transpose(1, 2)).unsqueeze(-1)
        merged = (1 - share) * out + F.dropout(share, dropout_p) * null_value
        return F.pad(attention.to_out(merged.to(out.dtype).flatten(-2)), (0, 0, first, 0))


def _collapsed_rotary(query: Tensor, key: Tensor, query_angles: Tensor, key_angles: Tensor, chunk_size: int):
    """Rotate as retro-pytorch does: the first query of a chunk by the angle of position 2M-2, the others by 0.

    query starts at the first attending token, so its row n has index n % M in its chunk.
    """
    first = query_angles[0, 0, chunk_size - 1]
    rows = torch.zeros(query.shape[1], first.shape[-1], dtype=first.dtype, device=first.device)
    rows[::chunk_size] = first
    angles = (rows[:, None], key_angles[0, 0][:, None])
    return (turned(x, (a.cos(), a.sin())) for x, a in zip((query, key), angles))


def swap_retro_pytorch(model: nn.Module, *, backend: str | None = None) -> int:
    """Replace every chunked cross-attention of a retro-pytorch model by `RetroPytorchCCA`, in place.

    Parameters, their names and the outputs stay. Returns the number of modules replaced.
    Raises: ValueError if the model has none.
    """
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child).__name__ == ORIGINAL and type(child).__module__.startswith("retro_pytorch")
    ]
    if not places:
        got = f"{type(model).__name__} without any"
        raise ValueError(f"model: expected a retro-pytorch model with {ORIGINAL} modules; got {got}")
    for parent, name, child in places:
        setattr(parent, name, RetroPytorchCCA(child, backend=backend))
    return len(places)
