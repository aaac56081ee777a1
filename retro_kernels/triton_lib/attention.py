"""Arguments of launches that both attentions derive from a call in the same way."""

from __future__ import annotations

from torch import Tensor

from . import dropout
from .launch import power_of_two, rel_table, strides


def tensors(call, rel_query: Tensor | None) -> dict[str, Tensor | None]:
    """Return the tensors that kernels of an attention read, by the names of their arguments."""
    return {
        "q_ptr": call.query,
        "k_ptr": call.key,
        "v_ptr": call.value,
        "rel_ptr": call.rel_key,
        "rq_ptr": rel_query,
        "content_ptr": call.content_bias,
        "position_ptr": None if call.rel_key is None else call.position_bias,
        "seed_ptr": call.seed if call.dropout_p > 0 else None,
    }


def scalars(call, key_letters: str, rel_query: Tensor | None) -> dict[str, int | float]:
    """Return the strides, sizes and options that kernels of an attention take.

    key_letters: letters of the leading dimensions of key and value.
    """
    (_, n, h, d), p = call.query.shape, call.dropout_p
    e = d if call.rel_key is None else call.rel_key.shape[-1]
    return {
        **strides(call.query, "q", "bnh"),
        **strides(call.key, "k", key_letters),
        **strides(call.value, "v", key_letters),
        **rel_table(call.rel_key),
        **strides(rel_query, "rq", "bnh"),
        **strides(call.content_bias, "c", "h"),
        **strides(None if call.rel_key is None else call.position_bias, "p", "h"),
        **{"N": n, "H": h, "HEADS_PER_GROUP": h // call.key.shape[-2], "rel_start": call.rel_start},
        **{"D": d, "E": e, "BLOCK_D": power_of_two(d), "BLOCK_E": power_of_two(e)},
        **{"scale": call.scale, "dropout_limit": dropout.threshold(p), "dropout_scale": 1 / (1 - p)},
    }
