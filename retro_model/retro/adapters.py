"""Adapters that run another package's chunked cross-attention on our op, with its weights.

    model = RETRO(...)                  # retro-pytorch, trained or not
    swap_retro_pytorch(model)           # same parameters, same state dict, same outputs, our op

Source: retro-pytorch 0.3.9 (PyPI), which differs from arXiv 2112.04426 in its positions and in its learned null key and
value.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retro_kernels as rk

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
                raise TypeError(
                    f"original: expected retro-pytorch's {ORIGINAL}, whose cross_attn has {name}; got "
                    f"{type(original).__name__}"
                )
        self.chunk_size = original.chunk_size
        self.cross_attn = original.cross_attn
        self.backend = backend

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
        key, value = (
            project(context).unflatten(-1, (attention.heads, -1)) for project in (attention.to_k, attention.to_v)
        )
        if pos_emb is not None:
            query, key = _collapsed_rotary(query, key, *pos_emb, self.chunk_size)
        dropout_p = attention.dropout.p if self.training else 0.0
        out, lse = rk.chunked_cross_attention(
            query,
            key,
            value,
            chunk_len=self.chunk_size,
            neighbour_mask=context_mask,
            scale=attention.scale,
            query_start=first,
            dropout_p=dropout_p,
            return_lse=True,
            backend=self.backend,
        )
        out = self._with_null(query, out, lse, dropout_p)
        return F.pad(attention.to_out(out.flatten(-2)), (0, 0, first, 0))

    def _with_null(self, query: Tensor, out: Tensor, lse: Tensor, dropout_p: float) -> Tensor:
        """Merge the null key and value into out [B,N,H,D] over the neighbours, by its lse [B,H,N]."""
        attention = self.cross_attn
        null_key, null_value = (p.unflatten(-1, (attention.heads, -1)) for p in (attention.null_k, attention.null_v))
        logit = attention.scale * (query * null_key).sum(-1, dtype=torch.float32)  # [B,N,H]
        share = torch.sigmoid(logit - lse.transpose(1, 2)).unsqueeze(-1)
        merged = (1 - share) * out + F.dropout(share, dropout_p) * null_value
        return merged.to(out.dtype)


def _collapsed_rotary(
    query: Tensor, key: Tensor, query_angles: Tensor, key_angles: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """Rotate as retro-pytorch does: the first query of a chunk by the angle of position 2M-2, the others by 0.

    query starts at the first attending token, so its row n has index n % M in its chunk.
    """
    first = query_angles[0, 0, chunk_size - 1]
    rows = torch.zeros(query.shape[1], first.shape[-1], dtype=first.dtype, device=first.device)
    rows[::chunk_size] = first
    return _rotate(query, rows[:, None]), _rotate(key, key_angles[0, 0][:, None])


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the first angles.shape[-1] entries of x's last dimension, halves paired; keep the others."""
    width = angles.shape[-1]
    rotated, passed = x[..., :width], x[..., width:]
    low, high = rotated.chunk(2, dim=-1)
    turned = torch.cat((-high, low), dim=-1)
    return torch.cat((rotated * angles.cos() + turned * angles.sin(), passed), dim=-1).to(x.dtype)


def swap_retro_pytorch(model: nn.Module, *, backend: str | None = None) -> int:
    """Replace every chunked cross-attention of a retro-pytorch model by `RetroPytorchCCA`, in place.

    Parameters and their names stay, so an optimiser's references stay valid. Returns the number of modules replaced.
    Raises: ValueError if the model has none.
    """
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child).__name__ == ORIGINAL and type(child).__module__.startswith("retro_pytorch")
    ]
    if not places:
        raise ValueError(
            f"model: expected a retro-pytorch model with {ORIGINAL} modules; got {type(model).__name__} without any"
        )
    for parent, name, child in places:
        setattr(parent, name, RetroPytorchCCA(child, backend=backend))
    return len(places)
