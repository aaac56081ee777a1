"""Host side of chunked cross-attention: allocates and launches. Nothing here waits for the device."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ....compile import tiles
from ....compile.target import Target
from ....core import layouts
from ....triton_lib import attention, beyond
from ....triton_lib.launch import Scalars, launch, needed, strides
from ....triton_lib.merge import merge_splits, outputs_of_splits
from ....triton_lib.sums import Parts, sum_parts
from ..call import ChunkedCrossAttention
from .backward import _cca_backward_key_kernel, _cca_backward_query_kernel, _cca_backward_table_kernel
from .forward import _cca_forward_kernel

OP = "chunked_cross_attention"
WAVES = 2  # programs per multiprocessor below which the keys are split
FEW = 2  # most neighbours whose dS is summed in a half type, which takes half the registers
TABLE_WAVES = 4  # programs per multiprocessor of the kernel of dR


@dataclasses.dataclass(frozen=True)
class Span:
    """The chunks that a call's rows attend, [first, first + count). first is -1 if the first rows attend nothing.

    If batch entries have their own starts, `count` is the largest number of chunks that one of them may attend, and
    `first` is unused.
    """

    first: int
    count: int


def span(call: ChunkedCrossAttention) -> Span:
    numbers, count = call.place(call.query_start)
    return Span(numbers["first_chunk"], count)


def choose_tile(call: ChunkedCrossAttention, kernel: str, target: Target, rows: int | None = None) -> tiles.Tile:
    """Return the committed tile of a kernel."""
    width = max(call.query.shape[-1], 0 if call.rel_key is None else call.rel_key.shape[-1])
    rows = min(call.chunk_len, call.query.shape[1]) if rows is None else rows
    query = tiles.TileQuery(kernel, call.query.element_size(), width, rows, call.key.shape[3], options(call))
    return tiles.choose_tile(OP, query, target)


def options(call: ChunkedCrossAttention) -> tuple[str, ...]:
    """Return the features of a call that cost a tile registers, for `tiles.choose_tile`."""
    mask, gate = call.neighbour_mask is not None, call.neighbour_gate is not None
    flags = {
        "dropout": call.dropout_p > 0,
        "masked": call.dropout_p > 0 or mask or gate,
        "gated_mask": mask and gate,
        "many": call.rel_key is not None and call.key.shape[2] > FEW,
        "plain": call.rel_key is None,
        "narrow": call.rel_key is not None and call.rel_key.shape[-1] < call.query.shape[-1],
    }
    return tuple(name for name, present in flags.items() if present)


def tensors(call: ChunkedCrossAttention) -> dict[str, Tensor | None]:
    """Return the tensors that kernels read, by the names of their arguments."""
    mask = None if call.neighbour_mask is None else call.neighbour_mask.view(torch.uint8)  # the same memory
    others = {"gate_ptr": call.neighbour_gate, "mask_ptr": mask, "batch_start_ptr": call.batch_start}
    return attention.tensors(call, _rel_query(call)) | others


def scalars(call: ChunkedCrossAttention) -> dict:
    """Return the strides and sizes that kernels take."""
    mask = call.neighbour_mask
    return {
        **attention.scalars(call, "blkrg", _rel_query(call)),
        **strides(call.neighbour_gate, "g", "blk"),
        "MASK_TOKENS": mask is not None and mask.dim() == 4,
        **strides(mask, "m", "blkr"),
        "stride_batch_start": 0 if call.batch_start is None else call.batch_start.stride(0),
        "M": call.chunk_len,
        **dict(zip("LKR", call.key.shape[1:4])),
    }


def _rel_query(call: ChunkedCrossAttention) -> Tensor | None:
    return None if call.rel_key is None else call.rel_query


def splits(call: ChunkedCrossAttention, tile: tiles.Tile, programs: int, target: Target) -> tuple[dict, int]:
    """Return the kernel's arguments that tell the splits, and their number: one split if the programs fill the device.

    Keys are split before neighbours, because the neighbours of a key block share its position logits.
    """
    neighbours, keys = call.key.shape[2:4]
    want = -(-WAVES * target.multiprocessors // programs) if programs < target.multiprocessors else 1
    blocks = -(-keys // tile.block_n)
    per_split = -(-blocks // min(blocks, want)) * tile.block_n
    key_splits = -(-keys // per_split)
    neighbours_each = -(-neighbours // min(neighbours, -(-want // key_splits)))
    count = -(-neighbours // neighbours_each)
    arguments = {"keys_per_split": per_split, "neighbours_per_split": neighbours_each, "neighbour_splits": count}
    return arguments, key_splits * count


def forward(call: ChunkedCrossAttention, target: Target) -> tuple[Tensor, Tensor]:
    """Return out and lse."""
    main, count = layouts.current().once("forward", lambda: _forward_scalars(call, target))
    out, lse = call.empty_outputs()
    part_out, part_lse = outputs_of_splits(out, lse, count)
    given = tensors(call) | {"out_ptr": part_out, "lse_ptr": part_lse} | call.place(call.query_start)[0]
    launch(_cca_forward_kernel, given, main)
    if count > 1:
        merge_splits(part_out, part_lse, out, lse)
    return out, lse


def _forward_scalars(call: ChunkedCrossAttention, target: Target) -> tuple[Scalars, int]:
    """Return the scalars of the forward kernel, and the number of splits of the keys."""
    b, n, h, _ = call.query.shape
    tile = choose_tile(call, "forward", target)
    part = span(call)
    blocks = -(-min(call.chunk_len, n) // tile.block_m)
    apart, count = splits(call, tile, part.count * blocks * h * b, target)
    arguments = scalars(call) | apart | {"blocks": blocks, "EVEN_KEYS": call.key.shape[3] % tile.block_n == 0}
    return Scalars.of_tile((part.count * blocks * h, b, count), arguments, tile), count


@dataclasses.dataclass(frozen=True)
class Division:
    """How the backward pass divides its work into items, one per (batch, chunk, time block), and the tiles of its
    kernels, which all have core.block_m rows.
    """

    core: tiles.Tile  # for the query kernel, which also writes the keys if `fused`
    key: tiles.Tile
    table: tiles.Tile
    fused: bool
    blocks: int  # time blocks per chunk
    key_blocks: int
    band_keys: int  # R, rounded up to whole blocks of every kernel
    items: int
    diagonals: int  # blocks of table rows that a band reaches
    items_per_split: int

    @property
    def splits(self) -> int:
        return -(-self.items // self.items_per_split)


def divide(call: ChunkedCrossAttention, need_keys: bool, part: Span, target: Target) -> Division:
    b, _, heads, _ = call.query.shape
    keys, groups = call.key.shape[3:5]
    # tiles start at index 0 of the attending chunk, even if the call has few of its rows
    whole = choose_tile(call, "backward", target, rows=call.chunk_len)
    fused = need_keys and groups == heads and call.chunk_len <= whole.block_m
    core = whole if fused else choose_tile(call, "backward_query", target, rows=call.chunk_len)
    others = (choose_tile(call, f"backward_{name}", target, rows=call.chunk_len) for name in ("key", "table"))
    key, table = (dataclasses.replace(tile, block_m=core.block_m) for tile in others)
    blocks = -(-call.chunk_len // core.block_m)
    widest = max(core.block_m, core.block_n, key.block_n)
    band_keys = -(-keys // widest) * widest
    items = b * part.count * blocks
    diagonals = blocks + band_keys // core.block_m
    per_split = -(-items // min(items, -(-TABLE_WAVES * target.multiprocessors // (diagonals * heads))))
    key_blocks = -(-keys // core.block_n)
    return Division(core, key, table, fused, blocks, key_blocks, band_keys, items, diagonals, per_split)


def buffers(call: ChunkedCrossAttention, need: dict[str, bool], part: Span, cut: Division) -> dict[str, Tensor | None]:
    """Return the tensors that kernels write, as arguments; None where a gradient is not needed."""
    dtype = call.query.dtype

    def new(wanted: bool, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return call.query.new_empty(shape, dtype=dtype) if wanted else None

    def new_like(wanted: bool, x: Tensor | None) -> Tensor | None:
        return torch.empty_like(x, memory_format=torch.contiguous_format) if wanted else None

    b, n, h, d = call.query.shape
    chunks, neighbours = call.key.shape[1:3]
    has_rel, need_keys = call.rel_key is not None, need["key"] or need["value"]
    e = call.rel_key.shape[-1] if has_rel else d
    band = cut.items, h, cut.core.block_m, cut.band_keys + cut.core.block_m
    made = dict(
        dq_ptr=new_like(True, call.query),
        drq_ptr=new_like(has_rel and call.rel_query is not None, call.rel_query),
        dk_ptr=new_like(need_keys, call.key),
        dv_ptr=new_like(need_keys, call.key),
        dgate_ptr=new(need["neighbour_gate"], b, chunks, neighbours, cut.blocks * h * cut.key_blocks),
        dcontent_ptr=new(need["content_bias"], cut.items, h, d),
        dposition_ptr=new(has_rel and need["position_bias"], cut.items, h, e),
        delta_ptr=new(need_keys and not cut.fused, b, h, n),
        band_ptr=new(has_rel, *band, dtype=dtype),
        span_ptr=new(has_rel and need_keys and not cut.fused and dtype != torch.float32, *band[:2], 2 * band[2]),
        # if the key kernel follows the query kernel, it needs the logits, so dS may not replace them
        ds_ptr=new(has_rel and need_keys and not cut.fused, *band, dtype=dtype),
        part_ptr=new(has_rel and need["rel_key"], cut.splits, h, cut.diagonals * cut.core.block_m, e),
    )
    if made["ds_ptr"] is not None:
        made["ds_ptr"].zero_()  # the query kernel stores only the elements that have a key
    # chunks that no row attends; with starts for each batch entry, any chunk may be one
    first, last = (chunks, chunks) if call.batch_start is not None else (max(part.first, 0), part.first + part.count)
    for grad in filter(torch.is_tensor, (made["dk_ptr"], made["dv_ptr"], made["dgate_ptr"])):
        if first > 0:
            grad[:, :first].zero_()
        if last < chunks:
            grad[:, last:].zero_()
    return made


def backward(call: ChunkedCrossAttention, outputs, grads, needs, target: Target) -> list[Tensor | None]:
    """Return the gradients that `needs` selects."""
    need = dict(zip(call.DIFFERENTIABLE, needs, strict=True))
    (out, lse), (grad_out, grad_lse) = outputs, grads
    h, (neighbours, keys, groups) = call.query.shape[2], call.key.shape[2:5]
    part = span(call)
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    elif beyond(grad_out, 1, call.chunk_len):  # an incoming gradient can't be refused
        grad_out = grad_out.contiguous()
    known = layouts.current()
    cut = known.once("division", lambda: divide(call, need["key"] or need["value"], part, target))
    made = buffers(call, need, part, cut)
    given = tensors(call) | made | {"out_ptr": out, "lse_ptr": lse, "do_ptr": grad_out, "dlse_ptr": grad_lse}
    given |= {"query_start": call.query_start, "first_chunk": part.first}

    def arguments() -> dict:
        sizes = {"chunks": part.count, "blocks": cut.blocks, "BAND_KEYS": cut.band_keys, "items": cut.items}
        sizes |= {"items_per_split": cut.items_per_split, "WRITE_KEYS": cut.fused, "EVEN_BAND": cut.band_keys == keys}
        sizes |= {"FEW_NEIGHBOURS": neighbours <= FEW}
        return scalars(call) | strides(grad_out, "do", "bnh") | strides(grad_lse, "dl", "bhn") | sizes

    shared = known.once("arguments", arguments)

    def run(kernel, grid: tuple[int, ...], tile: tiles.Tile, given: dict = given) -> None:
        def made() -> Scalars:
            own = {"key_blocks": -(-keys // tile.block_n), "EVEN_KEYS": keys % tile.block_n == 0}
            return Scalars.of_tile(grid, shared | own, tile)

        launch(kernel, given, known.once(kernel, made))

    run(_cca_backward_query_kernel, (cut.items * h,), cut.core)
    if made["delta_ptr"] is not None:
        key_blocks = -(-keys // cut.key.block_n)
        grid = (cut.items // cut.blocks * neighbours * key_blocks * groups,)
        run(_cca_backward_key_kernel, grid, cut.key)
    letters = {"query": "q", "key": "k", "value": "v", "rel_query": "rq"}
    input_grads = {name: made[f"d{letter}_ptr"] for name, letter in letters.items()}
    parts = {}
    for name, pointer in {"content_bias": "dcontent_ptr", "position_bias": "dposition_ptr"}.items():
        if made[pointer] is not None:
            parts[name] = Parts(made[pointer], getattr(call, name))
    if (rel := made["part_ptr"]) is not None:
        ds = made["band_ptr"] if made["ds_ptr"] is None else made["ds_ptr"]
        run(_cca_backward_table_kernel, (cut.diagonals, h, cut.splits), cut.table, given | {"band_ptr": ds})
        # row x of the partials is displacement x + 1 - band_keys, row t of the table is displacement rel_start + t
        shift = call.rel_start + cut.band_keys - 1
        parts["rel_key"] = Parts(rel, call.rel_key, call.rel_key.shape[0], rel.shape[2], shift)
    input_grads |= sum_parts(parts)
    if made["dgate_ptr"] is not None:
        input_grads["neighbour_gate"] = made["dgate_ptr"].sum(-1).to(out.dtype)
    return needed(call, need, input_grads)
