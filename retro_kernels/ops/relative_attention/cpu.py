"""Relative attention on the CPU (csrc/cpu/relative_attention_*.cpp).

A thread packs the keys, values and relative keys that its task sees, of one key head at a time, into scratch memory of
O((N+S)*(D+E)), never N*S. One or two queries read their keys in place.
"""

from __future__ import annotations

import functools

from ...cpu_lib import attention
from ...cpu_lib import unsupported as unsupported

forward = functools.partial(attention.forward, "relative_attention")
backward = functools.partial(attention.backward, "relative_attention")
