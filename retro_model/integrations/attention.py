"""Attention of published Hugging Face models by `retro_kernels`, in one line:

    use_retro_kernels(model)  # GPT-NeoX, Llama, T5, mT5, umT5, Wav2Vec2-Conformer and models with the same attention

Causal masks, bidirectional masks, padding and packed rows become arguments of `relative_attention`. T5's bias becomes a
table of one number for each displacement, Wav2Vec2-Conformer's Transformer-XL positions become relative keys. No matrix
[N, S] of position logits is written to memory, except for the zeros of T5's first cross-attention.
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
#: Result of `_key_mask` for packed rows, instead of a mask: `_attend` has their positions.
PACKED = "packed rows"
MIXED = "of_a_model_with_modalities"  # attribute of the attentions of a model with several modalities


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
            does not have (sliding windows, custom masks, two-dimensional biases).
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
    mixed = model.config.get_text_config() is not model.config
    for module in model.modules():
        if hasattr(module, "is_causal"):
            setattr(module, MIXED, mixed)
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
    """Return the mask of the keys, bool [B,S], PACKED, or None. Causality is an argument of the op."""
    from transformers import masking_utils

    causal = masking_utils.causal_mask_function
    if _is_packed(mask_function, options):
        return PACKED
    if mask_function is not None and mask_function not in (causal, masking_utils.bidirectional_mask_function):
        got = "a sliding window, a custom mask or one of blocks"
        raise ValueError(f"attention_mask: expected a causal or bidirectional mask; got {got}")
    if kv_offset or isinstance(q_offset, Tensor) or (q_offset + q_length < kv_length and mask_function is causal):
        got = "a cache of fixed capacity or a sliding one"
        raise ValueError(f"cache (past_key_values before transformers 5.24): expected a DynamicCache; got {got}")
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2:
        raise ValueError(f"attention_mask: expected [B,S]; got shape {list(attention_mask.shape)}")
    return attention_mask[:, -kv_length:].bool()


def _is_packed(mask_function, options: dict) -> bool:
    """Whether a mask function is the library's causal mask of packed rows and nothing else.

    The library wraps the causal mask of a call without an attention mask and a cache: while tracing always, else if
    positions do not ascend by one. The wrapper is a closure, so it is identified by its name and by the variables that
    it captures.
    """
    from transformers import masking_utils

    if mask_function is None or mask_function.__qualname__ != "and_masks.<locals>.and_mask":
        return False
    if options.get("use_vmap", True) or options.get("local_size") is not None:  # a custom mask or a window
        return False
    if torch.compiler.is_dynamo_compiling():
        return True  # Dynamo does not show what closures capture; `_attend` refuses models with masks of blocks
    parts = _captured(mask_function)["mask_functions"]
    names = [part.__qualname__.partition(".")[0] for part in parts]
    if names[0] == "remap_positions_for_packed_sequence":
        parts = (_captured(parts[0])["mask_function"], *parts[1:])
    return parts[0] is masking_utils.causal_mask_function and names[1:] == ["packed_sequence_mask_function"]


def _captured(function) -> dict:
    """Return the variables that a closure captures, by name."""
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    return dict(zip(function.__code__.co_freevars, cells))


def _segments(module: nn.Module, query: Tensor, positions: Tensor | None) -> dict[str, Tensor]:
    """Return the op's segments of packed rows: a text begins where positions [B or 1,N] do not ascend by one."""
    kind = type(module).__name__
    if getattr(module, MIXED, False) and torch.compiler.is_dynamo_compiling():
        wanted = "one while a model of several modalities, whose texts may have masks of blocks, is compiled"
        raise ValueError(f"attention_mask: expected {wanted}; got None")
    if positions is None or positions.dim() != 2:
        raise ValueError(f"position_ids: expected [B,N] for packed rows in {kind}; got another shape or none")
    step = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    segment = (step != 1).cumsum(-1).expand(query.shape[0], -1)
    return {"query_segment": segment, "key_segment": segment}


def _attend(
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, position_bias=None, is_causal=None, **options
) -> tuple[Tensor, None]:
    """Return [B,N,H,D] of query [B,H,N,D], key and value [B,G,S,D], and attention_mask bool [B,S], PACKED or None."""
    if options.get("sliding_window") is not None or options.get("softcap") is not None:
        raise ValueError(f"model: {type(module).__name__} has a sliding window or a softcap; not served yet")
    positions = {} if position_bias is None else _displacements(module, query, position_bias, scaling)
    packed = isinstance(attention_mask, str)
    positions |= _segments(module, query, options.get("position_ids")) if packed else {"key_mask": attention_mask}
    positions["causal"] = module.is_causal if is_causal is None else is_causal
    token_major = (t.transpose(1, 2) for t in (query, key, value))
    dropout_p = dropout if module.training else 0.0
    return relative_attention(*token_major, scale=scaling, dropout_p=dropout_p, **positions), None


def _compute_table(self, query_length: int, key_length: int, device=None, past_seen_tokens=0) -> Tensor:
    """Return T5's bias as a table [1,H,N+S-1], smallest displacement first; [1,H,N,S] for another attention."""
    compute = type(self).compute_bias
    if self.config._attn_implementation != NAME:
        return compute(self, query_length, key_length, device=device, past_seen_tokens=past_seen_tokens)
    # the last query's row, with keys to its right, has every displacement
    last, keys = past_seen_tokens + query_length - 1, query_length + key_length - 1
    return compute(self, 1, keys, device=device, past_seen_tokens=last)[:, :, 0].flip(-1)


def _displacements(module: nn.Module, query: Tensor, bias: Tensor, scale: float | None) -> dict[str, Tensor]:
    """Return relative keys of width 1 for a table [1,H,N+S-1], or for a bias [1,H,N,S] with constant diagonals, from
    its first row and column.
    """
    kind = module.config.model_type
    if kind not in BIASED:
        raise ValueError(f"model: position_bias of {kind!r} is not known to depend on the displacement alone")
    # [H, N+S-1], smallest displacement first
    table = bias[0] if bias.dim() == 3 else torch.cat([bias[0, :, 0].flip(-1), bias[0, :, 1:, 0]], -1)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
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
