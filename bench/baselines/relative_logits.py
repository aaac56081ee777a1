"""Relative logits: one product against every displacement, then the shift (Transformer-XL) or a gather."""

from __future__ import annotations

from torch import Tensor

from ..registry import Contender
from ._common import compiled
from ._common import position_bias as skewed_bias


def eager(query, rel_key, *, key_len, rel_start=None, position_bias=None, query_offset=0) -> Tensor:
    """Writes the whole band [N, N+key_len-1], then shifts it."""
    wanted = query if position_bias is None else query + position_bias
    return skewed_bias(wanted, rel_key, key_len, query_offset - (key_len - 1), rel_start)


def _band_bytes(case, itemsize: int, backward: bool) -> float:
    s = case.shape
    return s["B"] * s["H"] * s["N"] * (s["N"] + 2 * s["S"]) * itemsize * (2 if backward else 1)


_EAGER = Contender("relative_logits", "eager", eager, peak_bytes=_band_bytes)
BASELINES = (_EAGER, compiled(_EAGER))
