"""What the baselines share: the skew, the materialised position bias, compiled twins, FlexAttention."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

#: finite, so that a row that sees nothing stays free of NaN; it is zeroed afterwards
HIDDEN = {torch.float16: -6e4, torch.bfloat16: -1e30, torch.float32: -1e30}


def full_table(rel_key: Tensor, rel_start: int | None, lowest: int, rows: int) -> Tensor:
    """The table cut or zero-padded to displacements lowest .. lowest+rows-1: [H or 1, rows, E]."""
    before = (lowest if rel_start is None else rel_start) - lowest
    return F.pad(rel_key, (0, 0, before, rows - before - rel_key.shape[1]))


def skewed(band: Tensor, keys: int) -> Tensor:
    """band [..., n, n+keys-1], column n-1-i+j for the pair (i, j) ->
    [..., n, keys]: Transformer-XL's shift by reshaping.
    """
    n, width = band.shape[-2:]
    if n == 1:
        return band  # one query: its columns are its keys, and there is nothing to shift
    flat = band.flatten(-2)[..., n - 1 :]
    return flat[..., : n * (width - 1)].unflatten(-1, (n, width - 1))[..., :keys]


def position_bias(rel_query: Tensor, rel_key: Tensor, keys: int, lowest: int, rel_start: int | None) -> Tensor:
    """rel_query [..., n, H, E] against every displacement i-j+const ->
    [..., H, n, keys]; pair (i, j) has displacement lowest+keys-1+i-j.
    """
    n, h = rel_query.shape[-3:-1]
    table = full_table(rel_key, rel_start, lowest, n + keys - 1).flip(1).expand(h, -1, -1)
    return skewed(torch.einsum("...nhe,hte->...hnt", rel_query, table), keys)


def repeat_groups(tensor: Tensor, heads: int) -> Tensor:
    """[..., G, D] -> [..., H, D]."""
    groups = tensor.shape[-2]
    return tensor if groups == heads else tensor.repeat_interleave(heads // groups, dim=-2)


def attend(logits: Tensor, visible: Tensor | None, value: Tensor, equation: str) -> Tensor:
    """Softmax over the visible keys in the tensors' own type; a row that sees nothing gives 0."""
    if visible is None:
        return torch.einsum(equation, logits.softmax(-1), value)
    probabilities = logits.masked_fill(~visible, HIDDEN[logits.dtype]).softmax(-1)
    return torch.einsum(equation, probabilities * visible.any(-1, keepdim=True), value)


class CompiledTwin:
    """The same function under `torch.compile`: compiled at its first call, and again for every new shape; the runner
    resets the compiler between cases.
    """

    def __init__(self, function):
        self.function = function

    @functools.cached_property
    def compiled(self):
        return torch.compile(self.function, dynamic=False)

    def __call__(self, **arguments):
        return self.compiled(**arguments)


@functools.cache
def flex_attention():
    """FlexAttention, compiled (uncompiled it materialises the scores)."""
    from torch.nn.attention import flex_attention as flex

    return torch.compile(flex.flex_attention, dynamic=False)
