"""The feed-forward layer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class FeedForward(nn.Module):
    """Two linear maps with a GELU between them, or a SwiGLU: output(silu(gate x) * inner x).

    Args:
        d_model, d_ff: widths outside and inside.
        bias: biases in all linear maps.
        gated: SwiGLU instead of GELU.
        approximate: form of the GELU, "none" or "tanh".

    Source: Borgeaud et al., arXiv 2112.04426, section 2.4 (Ffw) and Table 2; Radford et al., 2019 (GELU); Shazeer,
    arXiv 2002.05202 (SwiGLU).
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        bias: bool = False,
        gated: bool = False,
        approximate: str = "none",
        device=None,
        dtype=None,
    ):
        super().__init__()
        options = {"bias": bias, "device": device, "dtype": dtype}
        self.d_model, self.approximate = d_model, approximate
        self.inner = nn.Linear(d_model, d_ff, **options)
        self.output = nn.Linear(d_ff, d_model, **options)
        self.gate = nn.Linear(d_model, d_ff, **options) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the update [...,d_model] of x [...,d_model]."""
        if self.gate is None:
            return self.output(F.gelu(self.inner(x), approximate=self.approximate))
        return self.output(F.silu(self.gate(x)) * self.inner(x))
