"""Root-mean-square norm by its definition."""

from __future__ import annotations

from torch import Tensor

from ...reference_lib import attention, autograd


def forward(call) -> tuple[Tensor, Tensor]:
    x = call.input.to(attention.accumulator(call.input))
    rstd = (x.square().mean(-1) + call.eps).rsqrt()
    return (x * rstd.unsqueeze(-1) * call.weight.to(x.dtype)).to(call.input.dtype), rstd


backward = autograd.backward_of(forward)
