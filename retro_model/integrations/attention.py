"""Attention of published Hugging Face models by `retro_kernels`, in one line:

    use_retro_kernels(model)  # GPT-NeoX, Llama, T5, mT5, umT5, Wav2Vec2-Conformer and models with the same attention

Causal masks, bidirectional masks and padding become arguments of `relative_attention`. T5's bias becomes a table of one
number for each displacement, Wav2Vec2-Conformer's Transformer-XL positions become relative keys. No matrix [N, S] of
position logits is written to memory, except for the zeros of T5's first cross-attention.
"""

from __future__ import annotations

import functools
import types

import torch
from torch import Tensor, nn

from retro_kernels import relative_attention

from . import megatron, retro_pytorch

NAME = "retro_kernels"  # in the library's registry of attention functions
#: Model types whose `position_bias` depends on the displacement alone.
BIASED = ("t5", "mt5", "umt5")


def use_retro_kernels(model: nn.Module) -> nn.Module:
    """Make every attention of a Hugging Face model call `retro_kernels.relative_attention`, or the chunked
    cross-attention of a RETRO of retro-pytorch or Megatron-LM call `retro_kernels.chunked_cross_attention`.

    Args:
        model: a `PreTrainedModel` whose attention goes through the library's `AttentionInterface`; or a model for
            `swap_retro_pytorch` or `swap_megatron`.

    Returns:
        The same model. `model.set_attn_implementation("sdpa")` undoes the change of a `PreTrainedModel`, except for
        Wav2Vec2-Conformer.

    Raises:
        TypeError: `model` is none of these.
        ValueError: its attention does not use the interface. A forward pass raises it for a mask or a bias that the op
            does not have (sliding windows, packed sequences, two-dimensional biases).
    """
    for swap, package in ((retro_pytorch.swap_retro_pytorch, "retro_pytorch."), (megatron.swap_megatron, "megatron.")):
        if isinstance(model, nn.Module) and any(type(m).__module__.startswith(package) for m in model.modules()):
            swap(model)
            return model
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        wanted = "a transformers.PreTrainedModel, or a RETRO of retro-pytorch or Megatron-LM"
        raise TypeError(f"model: expected {wanted}; got {type(model).__name__}")
    _register()
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise ValueError(f"model: {type(model).__name__} does not call attention through the AttentionInterface")
    for module in model.modules():
        if getattr(module, "position_embeddings_type", None) == "relative" and hasattr(module, "pos_bias_u"):
            module.forward = types.MethodType(_conformer_forward, module)
        # T5's attention computes its bias before it calls the registered function, so that alone cannot avoid the bias
        if getattr(module, "has_relative_attention_bias", False) and hasattr(type(module), "compute_bias"):
            module.compute_bias = types.MethodType(_compute_table, module)
    return model


@functools.cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _key_mask)


def _key_mask(
    batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None, attention_mask=None, **options
):
    """Return the mask of the keys, bool [B,S], or None. Causality is an argument of the op."""
    from transformers import masking_utils

    known = (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function)
    if mask_function is not None and mask_function not in known:
        got = "a sliding window, packed or custom one"
        raise ValueError(f"attention_mask: expected a causal or bidirectional mask; got {got}")
    if kv_offset or not isinstance(q_offset, int) or (q_offset + q_length < kv_length and mask_function is known[0]):
        got = "a cache of fixed capacity or a sliding one"
        raise ValueError(f"cache (past_key_values before transformers 5.24): expected a DynamicCache; got {got}")
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2:
        raise ValueError(f"attention_mask: expected [B,S]; got shape {list(attention_mask.shape)}")
    return attention_mask[:, -kv_length:].bool()


def _attend(
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, position_bias=None, is_causal=None, **options
) -> tuple[Tensor, None]:
    """Return [B,N,H,D] of query [B,H,N,D], key and value [B,G,S,D], and attention_mask bool [B,S]."""
    if options.get("sliding_window") is not None or options.get("softcap") is not None:
        raise ValueError(f"model: {type(module).__name__} has a sliding window or a softcap; not served yet")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    positions = {} if position_bias is None else _displacements(module, query, position_bias, scale)
    positions |= {"causal": module.is_causal if is_causal is None else is_causal, "key_mask": attention_mask}
    token_major = (t.transpose(1, 2) for t in (query, key, value))
    dropout_p = dropout if module.training else 0.0
    return relative_attention(*token_major, scale=scale, dropout_p=dropout_p, **positions), None


def _compute_table(self, query_length: int, key_length: int, device=None, past_seen_tokens=0) -> Tensor:
    """Return T5's bias as a table [1,H,N+S-1], smallest displacement first; [1,H,N,S] for another attention."""
    compute = type(self).compute_bias
    if self.config._attn_implementation != NAME:
        return compute(self, query_length, key_length, device=device, past_seen_tokens=past_seen_tokens)
    # the last query's row, with keys to its right, has every displacement
    last, keys = past_seen_tokens + query_length - 1, query_length + key_length - 1
    return compute(self, 1, keys, device=device, past_seen_tokens=last)[:, :, 0].flip(-1)


def _displacements(module: nn.Module, query: Tensor, bias: Tensor, scale: float) -> dict[str, Tensor]:
    """Return relative keys of width 1 for a table [1,H,N+S-1], or for a bias [1,H,N,S] with constant diagonals, from
    its first row and column.
    """
    kind = module.config.model_type
    if kind not in BIASED:
        raise ValueError(f"model: position_bias of {kind!r} is not known to depend on the displacement alone")
    # [H, N+S-1], smallest displacement first
    table = bias[0] if bias.dim() == 3 else torch.cat([bias[0, :, 0].flip(-1), bias[0, :, 1:, 0]], -1)
    ones = query.new_full((1, 1, 1, 1), 1 / scale).expand(query.shape[0], query.shape[2], query.shape[1], 1)
    return {"rel_key": table.unsqueeze(-1).to(query.dtype), "rel_query": ones}


def _conformer_forward(self, hidden_states, attention_mask=None, relative_position_embeddings=None, **options):
    """Compute Transformer-XL's attention with u and v. Encodings [1,2N-1,d] begin at the largest displacement."""
    projected = [project(hidden_states) for project in (self.linear_q, self.linear_k, self.linear_v)]
    projected.append(self.linear_pos(relative_position_embeddings)[0])
    *seen, encodings = (x.unflatten(-1, (self.num_heads, self.head_size)) for x in projected)
    options = {"content_bias": self.pos_bias_u, "position_bias": self.pos_bias_v, "key_mask": attention_mask}
    options["dropout_p"] = self.dropout.p if self.training else 0.0
    out = relative_attention(*seen, rel_key=encodings.flip(0).transpose(0, 1), **options)
    return self.linear_out(out.flatten(2)), None
