"""Constants of a softmax in base 2."""

from __future__ import annotations

import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)  # log2(e): the hardware's exponential has base 2
LN2 = tl.constexpr(0.6931471805599453)
