"""Linear map by its definition."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ...reference_lib import attention, autograd


def forward(call) -> tuple[Tensor]:
    dtype = attention.accumulator(call.input)
    return (F.linear(*(None if x is None else x.to(dtype) for x in call)).to(call.input.dtype),)


backward = autograd.backward_of(forward)
