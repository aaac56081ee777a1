"""The place in a Hugging Face decoder where retrieval comes in: the library's registry of attention functions.

A decoder whose `_attn_implementation` is "retro-sdpa" calls `_attend` in every layer. A forward pass that is given a
`retro` argument hands it down to there; any other goes to the attention that the decoder had before, with its masks.
"""

from __future__ import annotations

import functools
import sys
from typing import Protocol

from torch import Tensor, nn

ARGUMENT = "retro"  # of the decoder's forward, which hands unknown arguments down to its attention
PREFIX = "retro-"
BEFORE = ("sdpa", "eager")


class LayerPass(Protocol):
    """Forward pass whose layers call `attend`."""

    layers: dict[int, int]  # layer, from 0 -> its place among the attending layers

    def attend(
        self, place: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor | None:
        """The attention's output [B,N,H,D] of query [B,N,H,D], key and value [B,S,G,D]; None: the decoder's own."""


def _attend(before: str, module: nn.Module, query, key, value, mask, retro: LayerPass | None = None, **options):
    from transformers import AttentionInterface

    if retro is not None and module.layer_idx in retro.layers:
        token_major = (t.transpose(1, 2) for t in (query, key, value))
        scale, window = options["scaling"], options.get("sliding_window")
        out = retro.attend(retro.layers[module.layer_idx], *token_major, scale, window)
        if out is not None:
            return out, None
    # "eager" is each model's own function, not the registry's
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return AttentionInterface().get(before, eager)(module, query, key, value, mask, **options)


@functools.cache
def register() -> None:
    """Enter the attention functions in the library's registries."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for before in BEFORE:
        AttentionInterface.register(PREFIX + before, functools.partial(_attend, before))
        AttentionMaskInterface.register(PREFIX + before, AttentionMaskInterface()[before])


def hook(decoder: nn.Module) -> None:
    """Make the decoder's forward take a `LayerPass` as its argument `retro`. Without one nothing changes.

    Raises: ValueError for a decoder whose attention is neither "sdpa" nor "eager".
    """
    register()
    before = decoder.config._attn_implementation.removeprefix(PREFIX)
    if before not in BEFORE:
        raise ValueError(f"decoder: expected attn_implementation 'sdpa' or 'eager'; got {before!r}")
    decoder.config._attn_implementation = PREFIX + before
