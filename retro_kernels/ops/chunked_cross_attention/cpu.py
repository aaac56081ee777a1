"""Chunked cross-attention on the CPU (csrc/cpu/chunked_cross_attention_*.cpp).

Each thread uses scratch memory (about 1 MiB at RETRO's sizes). No input is copied as a whole.
"""

from __future__ import annotations

import functools

from ...cpu_lib import attention
from ...cpu_lib import unsupported as unsupported

forward = functools.partial(attention.forward, "chunked_cross_attention")
backward = functools.partial(attention.backward, "chunked_cross_attention")
