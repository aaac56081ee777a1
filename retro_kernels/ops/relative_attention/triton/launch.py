"""Host side of relative attention: the launches of a call, as values. Nothing here runs or waits for the device."""

from __future__ import annotations

import dataclasses

import torch

from ....compile import configs
from ....compile.target import Target
from ....core.steps import decided
from ....triton_lib import attention
from ....triton_lib.launch import Launch, of_tile, power_of_two, settled, strides
from ....triton_lib.merge import of_splits
from ....triton_lib.plan import Plan, needed
from ....triton_lib.sums import summed
from ..call import RelativeAttention
from . import stored
from .backward_columns import _relative_columns_kernel
from .backward_keys import _relative_keys_kernel
from .backward_query import _relative_query_kernel
from .biases import biased
from .forward import _relative_forward_kernel
from .gradient import _relative_delta_kernel
from .tile import NO_WINDOW, TALL

OP = "relative_attention"
_WAVES = 2  # programs per multiprocessor that the keys, or the items of a table, are split into
_DELTA_ROWS, _DELTA_WARPS = 32, 4


def choose_tile(call: RelativeAttention, kernel: str, target: Target, apart: bool = False) -> configs.Tile:
    """Return the committed tile of `<kernel>_<rel|plain>`. apart: content and position gradients are separate sums."""
    width = max(call.query.shape[-1], 0 if call.rel_key is None else call.rel_key.shape[-1])
    kernel += "_plain" if call.rel_key is None else "_rel"
    sizes = call.query.element_size(), power_of_two(width), call.query.shape[1], call.key.shape[1]
    names = options(call)
    if apart:
        names += ("apart",)
    tile = configs.choose(OP, configs.Problem(kernel, *sizes, names), target)
    if call.rel_key is None:
        return tile
    # upper blocks of the band that a walk keeps: at most two in the forward pass, one backward, none in tall tiles
    least = tile.block_m // 2 if kernel.startswith("forward") else tile.block_m if tile.block_m < TALL.value else 16
    return dataclasses.replace(tile, block_n=max(tile.block_n, least, 16))


def options(call: RelativeAttention) -> tuple[str, ...]:
    """Return the features of a call that cost a tile registers, for `configs.choose`."""
    windowed = call.window is not None or call.window_block is not None
    edges = windowed and not call.causal  # two more comparisons for each element, which cost as much as a mask
    flags = {
        "dropout": call.dropout_p > 0,
        "edges": edges,
        "masked": edges or call.key_mask is not None or call.query_segment is not None,
        "window": windowed,
        "narrow": call.rel_key is not None and call.rel_key.shape[-1] < call.query.shape[-1],
        "padded": call.query.shape[-1] != power_of_two(call.query.shape[-1]),
    }
    return tuple(name for name, present in flags.items() if present)


def joint(call: RelativeAttention, need: dict[str, bool], target: Target) -> bool:
    """Whether the query kernel sums the content and position gradients in one accumulator although the biases need them
    apart. The keys' product then sums the content part, and the difference is the position part.

    Tall tiles that store probabilities have registers for one accumulator only.
    """
    if not (need["content_bias"] or need["position_bias"]) or not (need["key"] or need["value"]):
        return False
    if call.rel_key is None or call.rel_query is not None or call.rel_key.shape[-1] != call.query.shape[-1]:
        return False
    tile = choose_tile(call, "query", target)
    return tile.block_m >= TALL.value and tile.precision != "tf32x3"


def bounded(call: RelativeAttention) -> bool:
    """Whether a visible pair may be outside the table: then tiles outside it are walked without position logits."""
    if call.rel_key is None:
        return False
    if call.batch_offset is not None:
        return True
    return decided(call.query_offset, lambda offset: _beyond_the_table(call, offset))


def _beyond_the_table(call: RelativeAttention, offset: int) -> bool:
    n, s = call.query.shape[1], call.key.shape[1]
    smallest, largest = offset - (s - 1), offset + n - 1
    if call.causal:
        smallest = max(smallest, call.causal_gap)
    if call.window is not None:
        largest = min(largest, call.window - 1)
    if call.window_block is not None:
        largest = min(largest, 2 * call.window_block - 1)
    return call.rel_start > smallest or call.rel_start + call.rel_key.shape[1] - 1 < largest


def may_see_nothing(call: RelativeAttention) -> bool:
    """Whether some query may see no key."""
    if call.key_mask is not None or call.query_segment is not None or call.batch_offset is not None:
        return True
    n, s, window, block = call.query.shape[1], call.key.shape[1], call.window, call.window_block
    # early: the first query sees only keys before the first; late: the last query sees only keys after the last
    early = call.causal and call.query_offset < call.causal_gap
    late = window is not None and (call.query_offset + n - s >= window or (call.causal and call.causal_gap >= window))
    if block is not None:
        late = ((call.query_offset + n - 1) // block - 1) * block >= s or (call.causal and call.causal_gap > block)
    return early or late


def inputs(call: RelativeAttention) -> dict:
    """Return the arguments of all kernels: tensors, their strides, sizes and options."""
    rel_query = None if call.rel_key is None else call.query if call.rel_query is None else call.rel_query
    mask = None if call.key_mask is None else call.key_mask.view(torch.uint8)  # the same memory
    return {
        **attention.inputs(call, "bsg", rel_query, mask),
        "query_segment_ptr": call.query_segment,
        "key_segment_ptr": call.key_segment,
        "batch_offset_ptr": call.batch_offset,
        "stride_batch_offset": 0 if call.batch_offset is None else call.batch_offset.stride(0),
        **strides(mask, "m", "bs"),
        **strides(call.query_segment, "qs", "bn"),
        **strides(call.key_segment, "ks", "bs"),
        "S": call.key.shape[1],
        "offset": call.query_offset,
        "causal_gap": call.causal_gap,
        "window": call.window or call.window_block or NO_WINDOW.value,
    }


def constants(call: RelativeAttention, tile: configs.Tile) -> dict:
    return {
        **attention.constants(call, tile),
        "CAUSAL": call.causal,
        "WINDOW": "sliding" if call.window is not None else "blocks" if call.window_block is not None else "none",
        "BOUNDED": bounded(call),
    }


def splits(call: RelativeAttention, tile: configs.Tile, programs: int, target: Target) -> tuple[int, int]:
    """Return (keys per split, splits): one split unless the queries leave most of the device idle, as in decoding."""
    want = -(-_WAVES * target.multiprocessors // programs) if 2 * programs < target.multiprocessors else 1
    key_blocks = -(-call.key.shape[1] // tile.block_n)
    per_split = -(-key_blocks // min(key_blocks, want)) * tile.block_n
    return per_split, -(-call.key.shape[1] // per_split)


def split_edges(call: RelativeAttention, target: Target) -> bool:
    """Whether the forward pass first walks, without masks, over the keys that all queries of a block see.

    Two loops take more registers than one. Tiles of half types have enough of them; with positions only tiles of rows
    up to 64 on sm_90.
    """
    if not call.causal or call.dropout_p > 0 or "masked" in options(call) or "window" in options(call) or bounded(call):
        return False
    half = call.query.element_size() == 2
    wide = max(call.query.shape[-1], 0 if call.rel_key is None else call.rel_key.shape[-1]) > 64
    return half and (call.rel_key is None or (target.arch == 90 and not wide))


def forward(call: RelativeAttention, target: Target) -> Plan:
    """Plan out and lse."""
    b, n, h, _ = call.query.shape
    tile = choose_tile(call, "forward", target)
    blocks = -(-n // tile.block_m)
    per_split, count = splits(call, tile, blocks * h * b, target)
    out = torch.empty(call.query.shape, dtype=call.query.dtype, device=call.query.device)
    lse = torch.empty((b, h, n), dtype=torch.float32, device=out.device)
    into, merge = of_splits(out, lse, count)
    with_biases, first = biased(call)
    arguments = {**inputs(with_biases), **into, "blocks": blocks, "keys_per_split": per_split, **constants(call, tile)}
    arguments["SPLIT"] = split_edges(call, target)
    main = of_tile(_relative_forward_kernel, (blocks * h, b, count), arguments, tile)
    return Plan([*first, main, *merge], (out, lse))


def backward(call: RelativeAttention, outputs, grads, needs, target: Target) -> Plan:
    """Plan the gradients that `needs` selects."""
    need = dict(zip(call.DIFFERENTIABLE, needs, strict=True))
    (out, lse), (grad_out, grad_lse) = outputs, grads
    b, n, h, d = call.query.shape
    if grad_out is None:
        grad_out = torch.zeros(call.query.shape, dtype=call.query.dtype, device=call.query.device)
    elif may_see_nothing(call):
        grad_out = settled(grad_out, lse)
    with_biases, launches = biased(call, 0)
    shared = {
        **inputs(with_biases),
        "do_ptr": grad_out,
        **strides(grad_out, "do", "bnh"),
        "lse_ptr": lse,
        "delta_ptr": torch.empty((b, h, n), dtype=torch.float32, device=call.query.device),
        "out_ptr": out,
        **strides(out, "o", "bnh"),
        "dlse_ptr": grad_lse,
        **strides(grad_lse, "dl", "bhn"),
    }
    rows = configs.Tile(_DELTA_ROWS, 0, _DELTA_WARPS if d <= 128 else 2 * _DELTA_WARPS, 1)
    sizes = {
        "D": d,
        "BLOCK_D": power_of_two(d),
        "BLOCK_M": rows.block_m,
        "PRECISION": choose_tile(call, "query", target).precision,
    }
    launches.append(of_tile(_relative_delta_kernel, (-(-n // rows.block_m), h, b), {**shared, **sizes}, rows))
    input_grads = {}
    if call.rel_key is not None:
        launches += _stored_launches(call, shared, need, input_grads, target)
    else:
        if need["query"] or need["content_bias"]:
            arguments, tile = _query_arguments(call, shared, need, input_grads, target, False)
            launches.append(_query_of(stored.Slab(0, b, 0, arguments["blocks"], 0, h), arguments, tile))
        if need["key"] or need["value"]:
            launches.append(_keys_launch(call, shared, input_grads, target))
    for name, part in input_grads.items():
        if (part.shape, part.dtype) != (getattr(call, name).shape, getattr(call, name).dtype):
            input_grads[name], total = summed(part, getattr(call, name))
            launches.append(total)

    return Plan(launches, gradients=lambda: needed(call, need, input_grads))


def _keys_launch(call: RelativeAttention, shared: dict, input_grads: dict, target: Target) -> Launch:
    """Return the launch of the gradients of keys and values without relative keys, which recomputes the logits."""
    b, s, groups, _ = call.key.shape
    tile = choose_tile(call, "keys", target)
    for name in ("key", "value"):
        input_grads[name] = torch.empty(call.key.shape, dtype=call.key.dtype, device=call.key.device)
    own = {"dk_ptr": input_grads["key"], "dv_ptr": input_grads["value"], **constants(call, tile)}
    return of_tile(_relative_keys_kernel, (-(-s // tile.block_n) * groups, b), {**shared, **own}, tile)


def _query_arguments(
    call: RelativeAttention, shared: dict, need: dict, input_grads: dict, target: Target, whole: bool
) -> tuple[dict, configs.Tile]:
    """Return the arguments of the query kernel for the whole call, and its tile. whole: as `joint`."""
    b, n, h, d = call.query.shape
    e = 0 if call.rel_key is None else call.rel_key.shape[-1]
    apart = call.rel_query is not None or (not whole and (need["content_bias"] or need["position_bias"]))
    tile = choose_tile(call, "query", target, call.rel_key is not None and apart)
    blocks, device = -(-n // tile.block_m), call.query.device
    input_grads["query"] = torch.empty(call.query.shape, dtype=call.query.dtype, device=device)
    if e and call.rel_query is not None:
        input_grads["rel_query"] = torch.empty((b, n, h, e), dtype=call.query.dtype, device=device)
    sums = {}
    for name, width in (("content_bias", d), ("position_bias", e)):
        if need[name] and width:
            count = blocks * (not whole or name == "position_bias")
            count += -(-call.key.shape[1] // choose_tile(call, "keys", target).block_n) if whole else 0
            input_grads[name] = sums[name] = torch.empty((b * count, h, width), dtype=torch.float32, device=device)
    return {
        **shared,
        "blocks": blocks,
        "dq_ptr": input_grads["query"],
        "drq_ptr": input_grads.get("rel_query"),
        "dcontent_ptr": None if whole else sums.get("content_bias"),
        "dposition_ptr": None if whole else sums.get("position_bias"),
        "dtotal_ptr": sums["position_bias"][: b * blocks] if whole and need["position_bias"] else None,
        "ds_ptr": None,
        "p_ptr": None,
        "span_ptr": None,
        "stride_ds": 0,
        "ring": None,
        **constants(call, tile),
    }, tile


def _query_of(part: stored.Slab, arguments: dict, tile: configs.Tile) -> Launch:
    grid = part.blocks * part.heads, part.batches
    return of_tile(_relative_query_kernel, grid, {**arguments, **part.arguments()}, tile)


def _stored_launches(
    call: RelativeAttention, shared: dict, need: dict, input_grads: dict, target: Target
) -> list[Launch]:
    """Return the launches with relative keys: for each slab the query kernel, which stores dS and P, and the products
    with them, which add to the gradients of keys, values and table that earlier slabs have written.
    """
    b, _, h, _ = call.query.shape
    whole = joint(call, need, target)
    arguments, tile = _query_arguments(call, shared, need, input_grads, target, whole)
    wanted = {"ds_ptr": need["key"] or need["rel_key"] or whole, "p_ptr": need["value"]}
    if not any(wanted.values()):
        return [_query_of(stored.Slab(0, b, 0, arguments["blocks"], 0, h), arguments, tile)]
    columns, ring = stored.width(call, tile.block_m, tile.block_n)
    parts = list(stored.slabs(call, columns, tile.block_m, sum(wanted.values())))
    held = parts[0].batches * parts[0].heads * parts[0].blocks  # the first is the largest
    device = call.query.device
    for name in (name for name, stores in wanted.items() if stores):
        arguments[name] = torch.empty((held, tile.block_m, columns), dtype=call.query.dtype, device=device)
    if call.key_mask is not None or call.key_segment is not None:
        arguments["span_ptr"] = torch.empty((held, 2), dtype=torch.int32, device=device)
    arguments |= {"stride_ds": columns, "ring": ring}
    steps = [[_query_of(part, arguments, tile) for part in parts]]
    arguments |= {"QUERY_BLOCK": tile.block_m, "KEY_BLOCK": tile.block_n}
    if need["key"] or whole:
        steps.append(_keys_products(call, parts, arguments, "key", input_grads, target, whole))
    if need["value"]:
        steps.append(_keys_products(call, parts, arguments, "value", input_grads, target))
    if need["rel_key"]:
        steps.append(_table_products(call, parts, arguments, input_grads, target))
    return [step for slab in zip(*steps, strict=True) for step in slab]


def _columns(
    call: RelativeAttention, part: stored.Slab, tile: configs.Tile, x: torch.Tensor, grid: tuple, arguments: dict
) -> Launch:
    """Return the launch of the product of a slab's stored tiles with x [B,N,H,WIDTH]."""
    own = {
        "x_ptr": x[part.first_batch :, :, part.first_head :],
        **strides(x, "x", "bnh"),
        "WIDTH": x.shape[-1],
        "BLOCK": power_of_two(x.shape[-1]),
        "batch_offset_ptr": None if call.batch_offset is None else call.batch_offset[part.first_batch :],
        "first_block": part.first_block,
        "heads": part.heads,
        "count": part.blocks,
    }
    return of_tile(_relative_columns_kernel, grid, {**arguments, **constants(call, tile), **own}, tile)


def _keys_products(
    call: RelativeAttention,
    parts: list[stored.Slab],
    arguments: dict,
    name: str,
    input_grads: dict,
    target: Target,
    whole: bool = False,
) -> list[Launch]:
    """Return the launches of the gradient of keys or values, one for each slab. whole: of keys and the biases' sums."""
    (b, s, groups, _), (_, n, h, _) = call.key.shape, call.query.shape
    tile, per_group = choose_tile(call, "keys", target), h // groups
    blocks = -(-s // tile.block_n)
    # a slab with only some of the heads or queries that share a key writes a part of its gradient
    partial = parts[0].blocks * arguments["QUERY_BLOCK"] < n or parts[0].heads % per_group > 0
    dtype = torch.float32 if partial else call.key.dtype
    out = input_grads[name] = torch.empty(call.key.shape, dtype=dtype, device=call.key.device)
    sums = {"dcontent_ptr": input_grads.get("content_bias"), "dposition_ptr": input_grads.get("position_bias")}
    if whole and sums["dposition_ptr"] is not None:
        sums["dposition_ptr"] = sums["dposition_ptr"][-b * blocks :]
    launches = []
    for part in parts:
        at_once, group = min(part.heads, per_group), part.first_head // per_group
        own = {
            "tile_ptr": arguments["ds_ptr" if name == "key" else "p_ptr"],
            "k_ptr": call.key[part.first_batch :, :, group:],
            "out_ptr": out[part.first_batch :, :, group:],
            **_strides(out, batch=0, group=2, row=1),
            **{
                key: of[part.first_batch * blocks :, part.first_head :] if whole and of is not None else None
                for key, of in sums.items()
            },
            "X": s,
            "per_first": part.heads,
            "per_second": at_once,
            "per_item": 1,
            "items": at_once,
            "last_item": h * b,
            "again": int(part.first_block > 0 or part.first_head % per_group > 0),
            "factor": call.scale if name == "key" else 1.0,
            "SKEWED": False,
        }
        grid = blocks, part.batches, part.heads // at_once
        x = arguments["q_ptr" if name == "key" else "do_ptr"]
        launches.append(_columns(call, part, tile, x, grid, {**arguments, **own}))
    return launches


def _table_products(
    call: RelativeAttention, parts: list[stored.Slab], arguments: dict, input_grads: dict, target: Target
) -> list[Launch]:
    """Return the launches of the table's gradient, one for each slab."""
    tables, rows, e = call.rel_key.shape
    tile, apart = choose_tile(call, "table", target), tables > 1
    blocks = -(-rows // tile.block_n)
    of_table = [part.batches * (1 if apart else part.heads) for part in parts]
    most = min(of_table[0], -(-_WAVES * target.multiprocessors // (blocks * (parts[0].heads if apart else 1))))
    out = torch.empty((most, tables, rows, e), dtype=torch.float32, device=call.query.device)
    input_grads["rel_key"] = out
    launches = []
    for part, items in zip(parts, of_table, strict=True):
        between = part.heads if apart else 1  # from an item of a table to the next
        own = {
            "tile_ptr": arguments["ds_ptr"],
            "out_ptr": out[:, part.first_head if apart else 0 :],
            **_strides(out, batch=0, group=1, row=2),
            "dcontent_ptr": None,
            "dposition_ptr": None,
            "X": rows,
            "per_first": -(-items // most) * between,
            "per_second": 1,
            "per_item": between,
            "items": -(-items // most),
            "last_item": items,
            "again": int(part.again(apart)),
            "factor": call.scale,
            "KEY_BLOCK": 1,
            "SKEWED": True,
        }
        grid = blocks, most, part.heads if apart else 1
        launches.append(_columns(call, part, tile, arguments["rq_ptr"], grid, {**arguments, **own}))
    return launches


def _strides(out: torch.Tensor, batch: int, group: int, row: int) -> dict[str, int]:
    """Return the strides of a launch's output along the grid's second and third dimension, and between rows."""
    return {"stride_first": out.stride(batch), "stride_second": out.stride(group), "stride_out": out.stride(row)}
