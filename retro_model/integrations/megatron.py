"""Adapter that runs the chunked cross-attention of Megatron-LM's RETRO on our op, with its weights.

Source: megatron-core 0.12 to 0.14 (PyPI); later versions have no RETRO. Its cross-attention has no positions.
"""

from __future__ import annotations

import contextlib
import sys

from torch import Tensor, nn

import retro_kernels as rk

ORIGINAL = "RetroDecoderCrossAttention"


class MegatronCCA(nn.Module):
    """Core attention of Megatron's RETRO decoder: every token of a chunk attends the chunk's neighbours, by our op.

    The layer's projections, tensor parallelism, recomputation and the order of its dimensions stay Megatron's.

    Args:
        original: the core attention to replace. It has no parameters.
        config: the layer's, for dropout and scale.
        backend: passed to `rk.chunked_cross_attention`.
    """

    def __init__(self, original: nn.Module, config, *, backend: str | None = None):
        super().__init__()
        kind = getattr(config, "softmax_type", "vanilla")
        if kind != "vanilla" or any(True for _ in original.parameters()):
            raise ValueError(f"model: expected a core attention whose softmax has no parameters; got softmax {kind!r}")
        self.config, self.backend = config, backend

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **unused):
        """query [M,C,H,D] of C chunks, key and value [K*R,C,H,D] -> [M,C,H*D].

        Raises: ValueError for a mask, a bias or packed sequences, which RETRO's decoder does not pass.
        """
        for name, given in ({"attention_mask": attention_mask} | unused).items():
            if given is not None and name != "attn_mask_type":
                raise ValueError(f"{name}: expected None in RETRO's cross-attention; got a {type(given).__name__}")
        chunk_len = len(query)
        context = (x.transpose(0, 1)[:, None, None] for x in (key, value))  # [C,1,1,K*R,H,D]
        dropout_p = self.config.attention_dropout if self.training else 0.0
        # a chunk's tokens attend the chunk that ends at the first of them
        options = {"chunk_len": chunk_len, "query_start": chunk_len - 1, "backend": self.backend}
        options |= {"scale": getattr(self.config, "softmax_scale", None), "dropout_p": dropout_p}
        with _seeded_by_megatron() if dropout_p else contextlib.nullcontext():
            out = rk.chunked_cross_attention(query.transpose(0, 1), *context, **options)
        return out.transpose(0, 1).flatten(2)


def _seeded_by_megatron():
    """Context manager: random numbers differ between the processes that divide the heads."""
    return sys.modules["megatron.core.tensor_parallel"].get_cuda_rng_tracker().fork()


def swap_megatron(model: nn.Module, *, backend: str | None = None) -> int:
    """Replace the core of every chunked cross-attention of a Megatron RETRO by `MegatronCCA`, in place.

    Parameters, their names and the outputs stay. Returns the number of modules replaced.
    Raises: ValueError if the model has none.
    """
    layers = [
        module
        for module in model.modules()
        if type(module).__name__ == ORIGINAL and type(module).__module__.startswith("megatron.")
    ]
    if not layers:
        got = f"{type(model).__name__} without any"
        raise ValueError(f"model: expected a RETRO of Megatron-LM with {ORIGINAL} modules; got {got}")
    for layer in layers:
        layer.attn.core_attention = MegatronCCA(layer.attn.core_attention, layer.attn.config, backend=backend)
    return len(layers)
