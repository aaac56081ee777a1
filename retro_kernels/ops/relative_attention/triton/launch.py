"""Host side of relative attention: allocates and launches. Nothing here waits for the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ....compile import tiles
from ....compile.target import Target
from ....core import layouts
from ....triton_lib import attention
from ....triton_lib.launch import Scalars, launch, needed, power_of_two, settled, strides
from ....triton_lib.merge import merge_splits, outputs_of_splits
from ....triton_lib.sums import Parts, sum_parts
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


def choose_tile(call: RelativeAttention, kernel: str, target: Target, apart: bool = False) -> tiles.Tile:
    """Return the committed tile of `<kernel>_<rel|plain>`. apart: content and position gradients are separate sums."""
    width = max(call.query.shape[-1], 0 if call.rel_key is None else call.rel_key.shape[-1])
    kernel += "_plain" if call.rel_key is None else "_rel"
    sizes = call.query.element_size(), power_of_two(width), call.query.shape[1], call.key.shape[1]
    names = options(call)
    if apart:
        names += ("apart",)
    tile = tiles.choose_tile(OP, tiles.TileQuery(kernel, *sizes, names), target)
    if call.rel_key is None:
        return tile
    # upper blocks of the band that a walk keeps: at most two in the forward pass, one backward, none in tall tiles
    least = tile.block_m // 2 if kernel.startswith("forward") else tile.block_m if tile.block_m < TALL.value else 16
    return dataclasses.replace(tile, block_n=max(tile.block_n, least, 16))


def options(call: RelativeAttention) -> tuple[str, ...]:
    """Return the features of a call that cost a tile registers, for `tiles.choose_tile`."""
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
    """Whether the query kernel sums the content and position gradients in one accumulator, although the gradients of
    the biases need separate sums. The keys' product then also sums the content part. The position part is the
    difference.

    Tall tiles that store probabilities have registers for one accumulator only.
    """
    if not (need["content_bias"] or need["position_bias"]) or not (need["key"] or need["value"]):
        return False
    if call.rel_key is None or call.rel_query is not None or call.rel_key.shape[-1] != call.query.shape[-1]:
        return False
    tile = choose_tile(call, "query", target)
    return tile.block_m >= TALL.value and tile.precision != "tf32x3"


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


def tensors(call: RelativeAttention) -> dict[str, Tensor | None]:
    """Return the tensors that kernels read, by the names of their arguments."""
    mask = None if call.key_mask is None else call.key_mask.view(torch.uint8)  # the same memory
    others = {"mask_ptr": mask, "query_segment_ptr": call.query_segment, "key_segment_ptr": call.key_segment}
    return attention.tensors(call, _rel_query(call)) | others | {"batch_offset_ptr": call.batch_offset}


def scalars(call: RelativeAttention) -> dict:
    """Return the strides, sizes and options that kernels take, without the position."""
    return {
        **attention.scalars(call, "bsg", _rel_query(call)),
        **strides(call.key_mask, "m", "bs"),
        **strides(call.query_segment, "query_segment", "bn"),
        **strides(call.key_segment, "key_segment", "bs"),
        "stride_batch_offset": 0 if call.batch_offset is None else call.batch_offset.stride(0),
        "S": call.key.shape[1],
        "causal_gap": call.causal_gap,
        "window": call.window or call.window_block or NO_WINDOW.value,
        "CAUSAL": call.causal,
        "WINDOW": "sliding" if call.window is not None else "blocks" if call.window_block is not None else "none",
        "BOUNDED": call.bounded(call.query_offset),
    }


def _rel_query(call: RelativeAttention) -> Tensor | None:
    return None if call.rel_key is None else call.query if call.rel_query is None else call.rel_query


def splits(call: RelativeAttention, tile: tiles.Tile, programs: int, target: Target) -> tuple[int, int]:
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
    if (
        not call.causal
        or call.dropout_p > 0
        or "masked" in options(call)
        or "window" in options(call)
        or call.bounded(call.query_offset)
    ):
        return False
    half = call.query.element_size() == 2
    wide = max(call.query.shape[-1], 0 if call.rel_key is None else call.rel_key.shape[-1]) > 64
    return half and (call.rel_key is None or (target.arch == 90 and not wide))


def forward(call: RelativeAttention, target: Target) -> tuple[Tensor, Tensor]:
    """Return out and lse."""
    with_biases = biased(call)

    def made() -> tuple[Scalars, int]:
        b, n, h, _ = call.query.shape
        tile = choose_tile(call, "forward", target)
        blocks = -(-n // tile.block_m)
        per_split, count = splits(call, tile, blocks * h * b, target)
        sizes = {"blocks": blocks, "keys_per_split": per_split, "SPLIT": split_edges(call, target)}
        return Scalars.of_tile((blocks * h, b, count), scalars(with_biases) | sizes, tile), count

    main, count = layouts.current().once("forward", made)
    out, lse = call.empty_outputs()
    part_out, part_lse = outputs_of_splits(out, lse, count)
    given = tensors(with_biases) | {"out_ptr": part_out, "lse_ptr": part_lse, "offset": call.query_offset}
    launch(_relative_forward_kernel, given, main)
    if count > 1:
        merge_splits(part_out, part_lse, out, lse)
    return out, lse


def backward(call: RelativeAttention, outputs, grads, needs, target: Target) -> list[Tensor | None]:
    """Return the gradients that `needs` selects."""
    need = dict(zip(call.DIFFERENTIABLE, needs, strict=True))
    (out, lse), (grad_out, grad_lse) = outputs, grads
    (b, n, h, d), settles = call.query.shape, False
    if grad_out is None:
        grad_out = torch.zeros(call.query.shape, dtype=call.query.dtype, device=call.query.device)
    elif settles := may_see_nothing(call):
        grad_out = settled(grad_out, lse)
    with_biases = biased(call, 0)
    delta = torch.empty_like(lse, memory_format=torch.contiguous_format)
    given = tensors(with_biases) | {"out_ptr": out, "lse_ptr": lse, "delta_ptr": delta}
    given |= {"do_ptr": grad_out, "dlse_ptr": grad_lse, "offset": call.query_offset}
    known = layouts.current().once(settles, layouts.Known)  # depends on the position, and the copy has own strides

    def shared() -> dict:
        gradients = strides(grad_out, "do", "bnh") | strides(grad_lse, "dl", "bhn")
        return scalars(with_biases) | strides(out, "o", "bnh") | gradients

    arguments = known.once("arguments", shared)

    def made() -> Scalars:
        precision = choose_tile(call, "query", target).precision
        rows = tiles.Tile(_DELTA_ROWS, 0, _DELTA_WARPS if d <= 128 else 2 * _DELTA_WARPS, 1, precision)
        return Scalars.of_tile((-(-n // _DELTA_ROWS), h, b), arguments, rows)

    launch(_relative_delta_kernel, given, known.once("delta", made))
    work = _Work(call, need, target, given, arguments, known)
    results = _stored(work) if call.rel_key is not None else _unstored(work)
    parts = {}
    for name, part in results.items():
        like = getattr(call, name)
        if part.shape != like.shape or part.dtype != like.dtype:
            parts[name] = Parts(part, like)
    return needed(call, need, results | sum_parts(parts))


class _Work(NamedTuple):
    """A backward pass. given: tensors and the position that all kernels share; arguments: scalars that they share;
    known: the values that the layout determines.
    """

    call: RelativeAttention
    need: dict[str, bool]
    target: Target
    given: dict
    arguments: dict
    known: layouts.Known


def _unstored(work: _Work) -> dict[str, Tensor]:
    """Return the gradients without relative keys, or their parts. Both kernels compute the logits again."""
    call, need, _, given, arguments, known = work
    b, _, h, _ = call.query.shape
    results = {}
    if need["query"] or need["content_bias"]:
        query = _query_pass(work, False)
        results |= query.results
        _launch_query(work, Slab(0, b, 0, query.blocks, 0, h), query)
    if need["key"] or need["value"]:
        _, s, groups, _ = call.key.shape
        for name in ("key", "value"):
            results[name] = torch.empty_like(call.key, memory_format=torch.contiguous_format)

        def made() -> Scalars:
            tile = choose_tile(call, "keys", work.target)
            return Scalars.of_tile((-(-s // tile.block_n) * groups, b), arguments, tile)

        tensors = given | {"dk_ptr": results["key"], "dv_ptr": results["value"]}
        launch(_relative_keys_kernel, tensors, known.once("keys", made))
    return results


class _QueryPass(NamedTuple):
    """Shared by the launches of the query kernel: its tile, the number of query blocks, and its outputs.
    `results` has the gradients among these tensors, or their parts.
    """

    tile: tiles.Tile
    blocks: int
    given: dict[str, Tensor | None]
    results: dict[str, Tensor]


def _query_pass(work: _Work, whole: bool) -> _QueryPass:
    """Allocate the outputs of the query kernel for the whole call. whole: as `joint`."""
    call, need, target = work.call, work.need, work.target
    b, n, h, d = call.query.shape
    e = 0 if call.rel_key is None else call.rel_key.shape[-1]
    apart = call.rel_query is not None or (not whole and (need["content_bias"] or need["position_bias"]))
    tile = work.known.once("query tile", lambda: choose_tile(call, "query", target, call.rel_key is not None and apart))
    blocks = -(-n // tile.block_m)
    results = {"query": torch.empty_like(call.query, memory_format=torch.contiguous_format)}
    if e and call.rel_query is not None:
        results["rel_query"] = torch.empty_like(call.rel_query, memory_format=torch.contiguous_format)
    sums = {}
    for name, width in (("content_bias", d), ("position_bias", e)):
        if need[name] and width:
            count = blocks * (not whole or name == "position_bias")
            count += -(-call.key.shape[1] // _keys_tile(work).block_n) if whole else 0
            results[name] = sums[name] = call.query.new_empty((b * count, h, width), dtype=torch.float32)
    total = sums["position_bias"][: b * blocks] if whole and need["position_bias"] else None
    given = {"dq_ptr": results["query"], "drq_ptr": results.get("rel_query"), "dtotal_ptr": total}
    for name in ("content", "position"):
        given[f"d{name}_ptr"] = None if whole else sums.get(f"{name}_bias")
    return _QueryPass(tile, blocks, given, results)


def _keys_tile(work: _Work) -> tiles.Tile:
    return work.known.once("keys tile", lambda: choose_tile(work.call, "keys", work.target))


def _launch_query(work: _Work, part: Slab, query: _QueryPass) -> None:
    """Launch the query kernel for a slab. It stores P and dS where `work.given` has memory for them."""

    def made() -> Scalars:
        slab = {name: getattr(part, name) for name in ("first_batch", "first_block", "first_head", "heads")}
        arguments = {"blocks": query.blocks, "stride_ds": 0, "ring": None, **work.arguments, **slab}
        return Scalars.of_tile((part.blocks * part.heads, part.batches), arguments, query.tile)

    tensors = {"ds_ptr": None, "p_ptr": None, "span_ptr": None} | work.given | query.given
    launch(_relative_query_kernel, tensors, work.known.once(("query", part), made))


def _stored(work: _Work) -> dict[str, Tensor]:
    """Return the gradients with relative keys, or their parts.

    For each slab the query kernel stores dS and P. Then the products with them add to the gradients of keys, values and
    table that earlier slabs have written.
    """
    call, need, target, given, arguments, known = work
    b, _, h, _ = call.query.shape
    whole = known.once("whole", lambda: joint(call, need, target))
    query = _query_pass(work, whole)
    results = query.results
    wanted = {"ds_ptr": need["key"] or need["rel_key"] or whole, "p_ptr": need["value"]}
    if not any(wanted.values()):
        _launch_query(work, Slab(0, b, 0, query.blocks, 0, h), query)
        return results
    tile = query.tile

    def sizes() -> tuple[list[Slab], tuple[int, int, int], torch.dtype, dict]:
        columns, ring = stored.width(call, tile.block_m, tile.block_n)
        slabs = list(stored.slabs(call, columns, tile.block_m, sum(wanted.values())))
        first = slabs[0]  # the largest
        # one float32 part where a slab has only some of the heads or queries that share a key
        partial = first.blocks * tile.block_m < call.query.shape[1] or first.heads % (h // call.key.shape[2]) > 0
        shape = first.batches * first.heads * first.blocks, tile.block_m, columns
        own = {"stride_ds": columns, "ring": ring, "QUERY_BLOCK": tile.block_m, "KEY_BLOCK": tile.block_n}
        return slabs, shape, torch.float32 if partial else call.key.dtype, arguments | own

    parts, shape, dtype, arguments = known.once("slabs", sizes)
    scratch = {"ds_ptr": None, "p_ptr": None, "span_ptr": None}
    for name in (name for name, stores in wanted.items() if stores):
        scratch[name] = call.query.new_empty(shape)
    if call.key_mask is not None or call.key_segment is not None:
        scratch["span_ptr"] = call.query.new_empty((shape[0], 2), dtype=torch.int32)
    work = work._replace(given=given | scratch, arguments=arguments)
    for name in ("key", "value"):
        if need[name] or (name == "key" and whole):
            results[name] = torch.empty_like(call.key, dtype=dtype, memory_format=torch.contiguous_format)
    table = known.once("table", lambda: _Table.of(call, parts[0], target)) if need["rel_key"] else None
    if table is not None:
        results["rel_key"] = call.query.new_empty(table.shape, dtype=torch.float32)
    for part in parts:
        _launch_query(work, part, query)
        for name in ("key", "value"):
            if name in results:
                _launch_keys_product(work, part, name, results, whole and name == "key")
        if table is not None:
            _launch_table_product(work, part, table, results["rel_key"])
    return results


def _launch_columns(
    work: _Work, part: Slab, tile: tiles.Tile, x: Tensor, grid: tuple, given: dict, name: str, arguments: Callable
) -> None:
    """Launch the product of a slab's stored tiles with x [B,N,H,WIDTH], for the gradient `name`. arguments: returns
    the scalars that only this product has.
    """
    x = _from(x, part.first_batch, part.first_head)
    offsets = work.call.batch_offset
    offsets = None if offsets is None else offsets[part.first_batch :]

    def made() -> Scalars:
        own = strides(x, "x", "bnh") | {"WIDTH": x.shape[-1], "BLOCK": power_of_two(x.shape[-1])}
        own |= {"first_block": part.first_block, "heads": part.heads, "count": part.blocks}
        return Scalars.of_tile(grid, work.arguments | own | arguments(), tile)

    tensors = work.given | {"x_ptr": x, "batch_offset_ptr": offsets} | given
    launch(_relative_columns_kernel, tensors, work.known.once((name, part), made))


def _launch_keys_product(work: _Work, part: Slab, name: str, results: dict[str, Tensor], whole: bool) -> None:
    """Launch a slab's product for the gradient of keys or values. whole: the product
    is the keys', and also sums the gradients of the biases."""
    call = work.call
    (b, s, groups, _), h = call.key.shape, call.query.shape[2]
    tile, per_group = _keys_tile(work), h // groups
    blocks = -(-s // tile.block_n)
    at_once, group = min(part.heads, per_group), part.first_head // per_group
    read, x, factor = ("ds_ptr", "q_ptr", call.scale) if name == "key" else ("p_ptr", "do_ptr", 1.0)
    out, keys = (_from(x, part.first_batch, group) for x in (results[name], call.key))
    given = {"k_ptr": keys, "tile_ptr": work.given[read], "out_ptr": out}
    for bias in ("content", "position"):
        of = results.get(f"{bias}_bias") if whole else None
        if of is not None:
            of = of[-b * blocks :][part.first_batch * blocks :, part.first_head :]
        given[f"d{bias}_ptr"] = of

    def own() -> dict:
        again = int(part.first_block > 0 or part.first_head % per_group > 0)
        sizes = {"X": s, "per_first": part.heads, "per_second": at_once, "per_item": 1, "items": at_once}
        sizes |= {"last_item": h * b, "factor": factor, "SKEWED": False, "again": again}
        return _output_strides(out, first=0, second=2, row=1) | sizes

    grid = blocks, part.batches, part.heads // at_once
    _launch_columns(work, part, tile, work.given[x], grid, given, name, own)


def _from(x: Tensor, batch: int, head: int) -> Tensor:
    """Return x [B,N,H,..] from a batch entry and a head on. Most calls have one slab, which begins at the first."""
    return x[batch:, :, head:] if batch or head else x


class _Table(NamedTuple):
    """Division of the gradient of the relative keys into parts [most, H or 1, T, E], which are summed afterwards."""

    tile: tiles.Tile
    blocks: int
    most: int
    apart: bool  # each head has a table of its own
    shape: tuple[int, int, int, int]

    @classmethod
    def of(cls, call: RelativeAttention, largest: Slab, target: Target) -> _Table:
        tables, rows, e = call.rel_key.shape
        tile, apart = choose_tile(call, "table", target), tables > 1
        blocks = -(-rows // tile.block_n)
        items = largest.batches * (1 if apart else largest.heads)
        most = min(items, -(-_WAVES * target.multiprocessors // (blocks * (largest.heads if apart else 1))))
        return cls(tile, blocks, most, apart, (most, tables, rows, e))


def _launch_table_product(work: _Work, part: Slab, table: _Table, out: Tensor) -> None:
    """Launch a slab's product for the gradient of the relative keys."""
    items = part.batches * (1 if table.apart else part.heads)
    between = part.heads if table.apart else 1  # from an item of a table to the next
    # whether an earlier slab had the table
    again = part.first_batch or part.first_block or (part.first_head and not table.apart)
    each = -(-items // table.most)
    if table.apart and part.first_head:
        out = out[:, part.first_head :]
    given = {"tile_ptr": work.given["ds_ptr"], "out_ptr": out, "dcontent_ptr": None, "dposition_ptr": None}

    def own() -> dict:
        sizes = {"X": table.shape[2], "per_first": each * between, "per_second": 1, "per_item": between}
        sizes |= {"items": each, "last_item": items, "again": int(bool(again)), "factor": work.call.scale}
        return _output_strides(out, first=0, second=1, row=2) | sizes | {"KEY_BLOCK": 1, "SKEWED": True}

    grid = table.blocks, table.most, part.heads if table.apart else 1
    _launch_columns(work, part, table.tile, work.given["rq_ptr"], grid, given, "rel_key", own)


def _output_strides(out: Tensor, first: int, second: int, row: int) -> dict[str, int]:
    """Return the strides of an output along the grid's second and third dimension and between rows."""
    return {"stride_first": out.stride(first), "stride_second": out.stride(second), "stride_out": out.stride(row)}
