"""Arguments of launches that the two attentions make from a call alike."""

from __future__ import annotations

from torch import Tensor

from ..compile.configs import Tile
from . import dropout
from .launch import power_of_two, strides


def inputs(call, key_letters: str, rel_query: Tensor | None, mask: Tensor | None) -> dict:
    """Return the arguments of every kernel of an attention: tensors, their strides, sizes and options.

    key_letters: letters of the leading dimensions of key and value.
    """
    h, rel = call.query.shape[2], call.rel_key
    position_bias = None if rel is None else call.position_bias
    rel_strides = strides(rel, "r", "ht")
    if rel is not None and rel.shape[0] == 1:
        rel_strides["stride_rh"] = 0  # one table for all heads
    return {
        "q_ptr": call.query,
        "k_ptr": call.key,
        "v_ptr": call.value,
        "rel_ptr": rel,
        "rq_ptr": rel_query,
        "content_ptr": call.content_bias,
        "position_ptr": position_bias,
        "mask_ptr": mask,
        "seed_ptr": call.seed if call.dropout_p > 0 else None,
        "N": call.query.shape[1],
        "T": 0 if rel is None else rel.shape[1],
        "H": h,
        "HEADS_PER_GROUP": h // call.key.shape[-2],
        "rel_start": call.rel_start,
        "scale": call.scale,
        "dropout_limit": dropout.threshold(call.dropout_p),
        "dropout_scale": 1 / (1 - call.dropout_p),
        **strides(call.query, "q", "bnh"),
        **strides(call.key, "k", key_letters),
        **strides(call.value, "v", key_letters),
        **rel_strides,
        **strides(rel_query, "rq", "bnh"),
        **strides(call.content_bias, "c", "h"),
        **strides(position_bias, "p", "h"),
    }


def constants(call, tile: Tile) -> dict:
    """Return the constants of every kernel of an attention: widths and the tile."""
    d = call.query.shape[-1]
    e = d if call.rel_key is None else call.rel_key.shape[-1]
    return {
        "D": d,
        "E": e,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": power_of_two(d),
        "BLOCK_E": power_of_two(e),
        "PRECISION": tile.precision,
    }
