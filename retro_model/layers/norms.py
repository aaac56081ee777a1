"""Root-mean-square norms in one pass over memory."""

from __future__ import annotations

from torch import Tensor, nn

import retro_kernels as rk


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` of a width by `retro_kernels.rms_norm`: same parameters, names, initial weights and hooks.

    Without a weight, or over several dimensions, it is torch's.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x / rms(x) * weight, as x [...,d]."""
        if self.weight is None or len(self.normalized_shape) > 1:
            return super().forward(x)
        return rk.rms_norm(x, self.weight, self.eps)
