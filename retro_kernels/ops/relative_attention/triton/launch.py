"""Host side of relative attention: the launches of a call, as values. Nothing here runs or waits for the device."""

from __future__ import annotations

import dataclasses

import torch

from ....compile import configs
from ....compile.target import Target
from ....core.steps import decided
from ....triton_lib import attention
from ....triton_lib.launch import Launch, of_tile, power_of_two, settled, strided
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
from .stored import Slab
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
    if call.rel_key is None or call.batch_offset is not None:
        return call.rel_key is not None
    n, s = call.query.shape[1], call.key.shape[1]

    def beyond(offset: int) -> bool:
        smallest, largest = offset - (s - 1), offset + n - 1
        if call.causal:
            smallest = max(smallest, call.causal_gap)
        if call.window is not None:
            largest = min(largest, call.window - 1)
        if call.window_block is not None:
            largest = min(largest, 2 * call.window_block - 1)
        return call.rel_start > smallest or call.rel_start + call.rel_key.shape[1] - 1 < largest

    return decided(call.query_offset, beyond)


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
        **attention.inputs(call, "bsg", rel_query),
        **strided("mask", mask, "m", "bs"),
        **strided("query_segment", call.query_segment, "qs", "bn"),
        **strided("key_segment", call.key_segment, "ks", "bs"),
        "batch_offset_ptr": call.batch_offset,
        "stride_batch_offset": 0 if call.batch_offset is None else call.batch_offset.stride(0),
        "S": call.key.shape[1],
        "offset": call.query_offset,
        "causal_gap": call.causal_gap,
        "window": call.window or call.window_block or NO_WINDOW.value,
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
    out, lse = call.empty_outputs()
    into, merge = of_splits(out, lse, count)
    with_biases, first = biased(call)
    sizes = {"blocks": blocks, "keys_per_split": per_split, "SPLIT": split_edges(call, target)}
    arguments = inputs(with_biases) | into | sizes
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
    shared = inputs(with_biases) | strided("do", grad_out, "do", "bnh") | strided("dlse", grad_lse, "dl", "bhn")
    delta = torch.empty((b, h, n), dtype=torch.float32, device=call.query.device)
    shared |= strided("out", out, "o", "bnh") | {"lse_ptr": lse, "delta_ptr": delta}
    precision = choose_tile(call, "query", target).precision
    rows = configs.Tile(_DELTA_ROWS, 0, _DELTA_WARPS if d <= 128 else 2 * _DELTA_WARPS, 1, precision)
    launches.append(of_tile(_relative_delta_kernel, (-(-n // _DELTA_ROWS), h, b), shared, rows))
    results = {}
    if call.rel_key is not None:
        launches += _stored_launches(call, shared, need, results, target)
    else:
        if need["query"] or need["content_bias"]:
            arguments, tile = _query_arguments(call, shared, need, results, target, False)
            launches.append(_query_of(Slab(0, b, 0, arguments["blocks"], 0, h), arguments, tile))
        if need["key"] or need["value"]:
            launches.append(_keys_launch(call, shared, results, target))
    for name, part in results.items():
        if (part.shape, part.dtype) != (getattr(call, name).shape, getattr(call, name).dtype):
            results[name], total = summed(part, getattr(call, name))
            launches.append(total)
    return Plan(launches, gradients=lambda: needed(call, need, results))


def _keys_launch(call: RelativeAttention, shared: dict, results: dict, target: Target) -> Launch:
    """Return the launch of the gradients of keys and values without relative keys, which recomputes the logits."""
    b, s, groups, _ = call.key.shape
    tile = choose_tile(call, "keys", target)
    for name in ("key", "value"):
        results[name] = torch.empty(call.key.shape, dtype=call.key.dtype, device=call.key.device)
    arguments = shared | {"dk_ptr": results["key"], "dv_ptr": results["value"]}
    return of_tile(_relative_keys_kernel, (-(-s // tile.block_n) * groups, b), arguments, tile)


def _query_arguments(
    call: RelativeAttention, shared: dict, need: dict, results: dict, target: Target, whole: bool
) -> tuple[dict, configs.Tile]:
    """Return the arguments of the query kernel for the whole call, and its tile. whole: as `joint`."""
    b, n, h, d = call.query.shape
    e = 0 if call.rel_key is None else call.rel_key.shape[-1]
    apart = call.rel_query is not None or (not whole and (need["content_bias"] or need["position_bias"]))
    tile = choose_tile(call, "query", target, call.rel_key is not None and apart)
    blocks, device = -(-n // tile.block_m), call.query.device
    results["query"] = torch.empty(call.query.shape, dtype=call.query.dtype, device=device)
    if e and call.rel_query is not None:
        results["rel_query"] = torch.empty((b, n, h, e), dtype=call.query.dtype, device=device)
    sums = {}
    for name, width in (("content_bias", d), ("position_bias", e)):
        if need[name] and width:
            count = blocks * (not whole or name == "position_bias")
            count += -(-call.key.shape[1] // choose_tile(call, "keys", target).block_n) if whole else 0
            results[name] = sums[name] = torch.empty((b * count, h, width), dtype=torch.float32, device=device)
    total = sums["position_bias"][: b * blocks] if whole and need["position_bias"] else None
    grads = {"dq_ptr": results["query"], "drq_ptr": results.get("rel_query"), "dtotal_ptr": total}
    for name in ("content", "position"):
        grads[f"d{name}_ptr"] = None if whole else sums.get(f"{name}_bias")
    unstored = {"ds_ptr": None, "p_ptr": None, "span_ptr": None, "stride_ds": 0, "ring": None}
    return shared | {"blocks": blocks} | grads | unstored, tile


def _query_of(part: Slab, arguments: dict, tile: configs.Tile) -> Launch:
    grid = part.blocks * part.heads, part.batches
    slab = {name: getattr(part, name) for name in ("first_batch", "first_block", "first_head", "heads")}
    return of_tile(_relative_query_kernel, grid, arguments | slab, tile)


def _stored_launches(call: RelativeAttention, shared: dict, need: dict, results: dict, target: Target) -> list[Launch]:
    """Return the launches with relative keys: for each slab the query kernel, which stores dS and P, and the products
    with them, which add to the gradients of keys, values and table that earlier slabs have written.
    """
    b, _, h, _ = call.query.shape
    whole = joint(call, need, target)
    arguments, tile = _query_arguments(call, shared, need, results, target, whole)
    wanted = {"ds_ptr": need["key"] or need["rel_key"] or whole, "p_ptr": need["value"]}
    if not any(wanted.values()):
        return [_query_of(Slab(0, b, 0, arguments["blocks"], 0, h), arguments, tile)]
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
        steps.append(_keys_products(call, parts, arguments, "key", results, target, whole))
    if need["value"]:
        steps.append(_keys_products(call, parts, arguments, "value", results, target, False))
    if need["rel_key"]:
        steps.append(_table_products(call, parts, arguments, results, target))
    return [step for slab in zip(*steps, strict=True) for step in slab]


def _columns(
    call: RelativeAttention, part: Slab, tile: configs.Tile, x: torch.Tensor, grid: tuple, arguments: dict
) -> Launch:
    """Return the launch of the product of a slab's stored tiles with x [B,N,H,WIDTH]."""
    own = strided("x", x[part.first_batch :, :, part.first_head :], "x", "bnh")
    own["batch_offset_ptr"] = None if call.batch_offset is None else call.batch_offset[part.first_batch :]
    own |= {"WIDTH": x.shape[-1], "BLOCK": power_of_two(x.shape[-1])}
    own |= {"first_block": part.first_block, "heads": part.heads, "count": part.blocks}
    return of_tile(_relative_columns_kernel, grid, arguments | own, tile)


def _keys_products(
    call: RelativeAttention, parts: list[Slab], arguments: dict, name: str, results: dict, target: Target, whole: bool
) -> list[Launch]:
    """Return the launches of the gradient of keys or values, one for each slab. whole: of keys and the biases' sums."""
    (b, s, groups, _), (_, n, h, _) = call.key.shape, call.query.shape
    tile, per_group = choose_tile(call, "keys", target), h // groups
    blocks = -(-s // tile.block_n)
    # a slab with only some of the heads or queries that share a key writes a part of its gradient
    partial = parts[0].blocks * arguments["QUERY_BLOCK"] < n or parts[0].heads % per_group > 0
    dtype = torch.float32 if partial else call.key.dtype
    out = results[name] = torch.empty(call.key.shape, dtype=dtype, device=call.key.device)
    sums = {"dcontent_ptr": results.get("content_bias"), "dposition_ptr": results.get("position_bias")}
    if whole and sums["dposition_ptr"] is not None:
        sums["dposition_ptr"] = sums["dposition_ptr"][-b * blocks :]
    tiles, x, factor = ("ds_ptr", "q_ptr", call.scale) if name == "key" else ("p_ptr", "do_ptr", 1.0)
    launches = []
    for part in parts:
        at_once, group = min(part.heads, per_group), part.first_head // per_group
        again = int(part.first_block > 0 or part.first_head % per_group > 0)
        own = {"k_ptr": call.key[part.first_batch :, :, group:], "tile_ptr": arguments[tiles], "factor": factor}
        own |= _output(out[part.first_batch :, :, group:], first=0, second=2, row=1)
        for pointer, of in sums.items():
            own[pointer] = of[part.first_batch * blocks :, part.first_head :] if whole and of is not None else None
        own |= {"X": s, "per_first": part.heads, "per_second": at_once, "per_item": 1, "items": at_once}
        own |= {"last_item": h * b, "again": again, "SKEWED": False}
        grid = blocks, part.batches, part.heads // at_once
        launches.append(_columns(call, part, tile, arguments[x], grid, arguments | own))
    return launches


def _table_products(
    call: RelativeAttention, parts: list[Slab], arguments: dict, results: dict, target: Target
) -> list[Launch]:
    """Return the launches of the table's gradient, one for each slab."""
    tables, rows, e = call.rel_key.shape
    tile, apart = choose_tile(call, "table", target), tables > 1
    blocks = -(-rows // tile.block_n)
    of_table = [part.batches * (1 if apart else part.heads) for part in parts]
    most = min(of_table[0], -(-_WAVES * target.multiprocessors // (blocks * (parts[0].heads if apart else 1))))
    out = torch.empty((most, tables, rows, e), dtype=torch.float32, device=call.query.device)
    results["rel_key"] = out
    launches = []
    for part, items in zip(parts, of_table, strict=True):
        between = part.heads if apart else 1  # from an item of a table to the next
        again = part.first_batch or part.first_block or (part.first_head and not apart)  # an earlier slab had the table
        each = -(-items // most)
        own = _output(out[:, part.first_head if apart else 0 :], first=0, second=1, row=2)
        own |= {"tile_ptr": arguments["ds_ptr"], "dcontent_ptr": None, "dposition_ptr": None, "factor": call.scale}
        own |= {"X": rows, "per_first": each * between, "per_second": 1, "per_item": between, "items": each}
        own |= {"last_item": items, "again": int(bool(again)), "KEY_BLOCK": 1, "SKEWED": True}
        grid = blocks, most, part.heads if apart else 1
        launches.append(_columns(call, part, tile, arguments["rq_ptr"], grid, arguments | own))
    return launches


def _output(out: torch.Tensor, first: int, second: int, row: int) -> dict:
    """Return the output of a launch, with its strides along the grid's second and third dimension and between rows."""
    strides = {"stride_first": out.stride(first), "stride_second": out.stride(second), "stride_out": out.stride(row)}
    return {"out_ptr": out, **strides}
