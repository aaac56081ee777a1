"""The feed-forward layer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .products import Linear


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
        self.inner = Linear(d_model, d_ff, bias=bias, device=device, dtype=dtype)
        self.output = Linear(d_ff, d_model, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The update [...,d_model] of x [...,d_model]."""
        return self.output(F.gelu(self.inner(x)))
