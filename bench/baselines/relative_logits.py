"""Relative logits: one product against every displacement, then the shift (Transformer-XL) or a gather."""

from __future__ import annotations

from torch import Tensor

from ._common import CompiledTwin
from ._common import position_bias as skewed_bias


def eager(query, rel_key, *, key_len, rel_start=None, position_bias=None, query_offset=0) -> Tensor:
    """Writes the whole band [N, N+key_len-1], then shifts it."""
    wanted = query if position_bias is None else query + position_bias
    return skewed_bias(wanted, rel_key, key_len, query_offset - (key_len - 1), rel_start)


eager_compiled = CompiledTwin(eager)
