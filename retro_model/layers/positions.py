"""Relative positions: sinusoids of displacements, mapped to relative keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

#: Longest wavelength / 2 pi of a positional encoding. Source: Vaswani et al., arXiv 1706.03762, section 3.5.
ENCODING_BASE = 10_000.0


def encode_displacements(
    first: int, count: int, width: int, *, dtype: torch.dtype = torch.float32, device=None
) -> Tensor:
    """Return positional encodings of consecutive displacements d.

        s(d) = [sin(d w_0) .. sin(d w_n) | cos(d w_0) .. cos(d w_n)],   w_i = 10000^(-2i/width), n = width/2 - 1

    Args:
        first: displacement of row 0, in tokens; may be negative.
        count: T, rows.
        width: even.

    Returns:
        [T,width].

    Source: Dai et al., "Transformer-XL", arXiv 1901.02860, section 3.3 and appendix B.
    """
    acc_dtype = torch.promote_types(dtype, torch.float32)
    even = torch.arange(0, width, 2, dtype=acc_dtype, device=device)
    frequency = torch.exp(even * (-math.log(ENCODING_BASE) / width))
    angle = torch.arange(first, first + count, dtype=acc_dtype, device=device)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], -1).to(dtype)


class RelativePositions(nn.Module):
    """Relative keys: a linear map without bias of the encodings of displacements. Every layer has its own.

    Example:
        positions = RelativePositions(64, num_heads=4, head_dim=16)
        rel_key = positions(-7, 15)  # [4,15,16]: displacements -7 to 7, for 8 queries and 8 keys

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
        """Return relative keys [H,count,D]; row t belongs to displacement first + t."""
        weight = self.projection.weight
        encoding = encode_displacements(first, count, self.d_model, dtype=weight.dtype, device=weight.device)
        return self.projection(encoding).view(count, self.num_heads, self.head_dim).transpose(0, 1)
