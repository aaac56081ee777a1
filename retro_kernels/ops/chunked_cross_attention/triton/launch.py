"""Host side of chunked cross-attention: allocates and launches. Nothing here waits for the device."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ....compile import configs
from ....compile.target import Target
from ....core.steps import decided, derived
from ....triton_lib import attention, beyond
from ....triton_lib.launch import Scalars, launch, needed, settled, strides
from ....triton_lib.merge import merge_splits, outputs_of_splits
from ....triton_lib.sums import sum_parts
from ..call import ChunkedCrossAttention
from .backward import _cca_backward_key_kernel, _cca_backward_query_kernel
from .band import _cca_backward_band_kernel, _cca_backward_logits_kernel, _cca_backward_rel_kernel
from .forward import _cca_forward_kernel

OP = "chunked_cross_attention"
WAVES = 2  # programs per multiprocessor below which the keys are split


@dataclasses.dataclass(frozen=True)
class Span:
    """The chunks that a call's rows attend, [first, first + count). first is -1 if the first rows attend nothing.

    If batch entries have their own starts, `count` is the largest number of chunks that one of them may attend, and
    `first` is unused.
    """

    first: int
    count: int


def span(call: ChunkedCrossAttention) -> Span:
    if call.batch_start is not None:
        return Span(0, (call.query.shape[1] - 2) // call.chunk_len + 2)
    n, m = call.query.shape[1], call.chunk_len
    first = derived(call.query_start, lambda start: (start + 1) // m - 1)
    return Span(first, decided(call.query_start, lambda start: (start + n) // m - (start + 1) // m + 1))


def choose_tile(call: ChunkedCrossAttention, kernel: str, target: Target, rows: int | None = None) -> configs.Tile:
    """Return the committed tile of a kernel."""
    width = max(call.query.shape[-1], 0 if call.rel_key is None else call.rel_key.shape[-1])
    rows = min(call.chunk_len, call.query.shape[1]) if rows is None else rows
    problem = configs.TileQuery(kernel, call.query.element_size(), width, rows, call.key.shape[3], options(call))
    return configs.choose_tile(OP, problem, target)


def options(call: ChunkedCrossAttention) -> tuple[str, ...]:
    """Return the features of a call that cost a tile registers, for `configs.choose_tile`."""
    mask, gate = call.neighbour_mask is not None, call.neighbour_gate is not None
    flags = {
        "dropout": call.dropout_p > 0,
        "masked": call.dropout_p > 0 or mask or gate,
        "gated_mask": mask and gate,
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
        "stride_mr": 0,
        "MASK_TOKENS": mask is not None and mask.dim() == 4,
        **strides(mask, "m", "blk" if mask is not None and mask.dim() == 3 else "blkr"),
        "stride_batch_start": 0 if call.batch_start is None else call.batch_start.stride(0),
        "M": call.chunk_len,
        **dict(zip("LKR", call.key.shape[1:4])),
    }


def _rel_query(call: ChunkedCrossAttention) -> Tensor | None:
    return None if call.rel_key is None else call.rel_query


def splits(call: ChunkedCrossAttention, tile: configs.Tile, programs: int, target: Target) -> tuple[dict, int]:
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
    b, n, h, _ = call.query.shape
    tile = choose_tile(call, "forward", target)
    part = span(call)
    blocks = -(-min(call.chunk_len, n) // tile.block_m)
    apart, count = splits(call, tile, part.count * blocks * h * b, target)
    arguments = scalars(call) | apart | {"blocks": blocks, "EVEN_KEYS": call.key.shape[3] % tile.block_n == 0}
    main = Scalars.of_tile((part.count * blocks * h, b, count), arguments, tile)
    out, lse = call.empty_outputs()
    part_out, part_lse = outputs_of_splits(out, lse, count)
    given = tensors(call) | {"out_ptr": part_out, "lse_ptr": part_lse}
    launch(_cca_forward_kernel, given | {"query_start": call.query_start, "first_chunk": part.first}, main)
    if count > 1:
        merge_splits(part_out, part_lse, out, lse)
    return out, lse


#: Bound of the band workspace in bytes. The workspace should stay in L2 (50 MB on sm_90, 40 on sm_80) from one kernel
#: to the next, beside the stream of keys, values and their gradients.
SLAB_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class Layout:
    """Tiles of the kernels, all of core.block_m rows, and the division of the work: an item is one (batch, chunk, time
    block), a slab some items.
    """

    core: configs.Tile  # of the query kernel, which writes the keys too where `fused`
    key: configs.Tile
    band: configs.Tile
    rel: configs.Tile
    fused: bool
    blocks: int  # time blocks a chunk
    key_blocks: int
    band_keys: int  # columns of the band workspace: R, rounded up to whole blocks of every kernel
    items: int
    slab: int
    diagonals: int
    items_per_split: int

    @property
    def splits(self) -> int:
        return -(-self.slab // self.items_per_split)


def layout(call: ChunkedCrossAttention, need_keys: bool, part: Span, target: Target) -> Layout:
    b, _, heads, _ = call.query.shape
    keys, groups = call.key.shape[3:5]
    # tiles start at index 0 of the attending chunk, even if the call has few of its rows
    whole = choose_tile(call, "backward", target, rows=call.chunk_len)
    fused = need_keys and groups == heads and call.chunk_len <= whole.block_m
    core = whole if fused else choose_tile(call, "backward_query", target, rows=call.chunk_len)
    block_m = core.block_m  # of every kernel: the workspace is laid out in tiles of it
    others = (choose_tile(call, f"backward_{name}", target, rows=call.chunk_len) for name in ("key", "band", "rel"))
    key, band, rel = (dataclasses.replace(t, block_m=block_m) for t in others)
    blocks = -(-call.chunk_len // block_m)
    if blocks > 1:  # the bands of a chunk's time blocks must be whole blocks of table rows apart
        band = dataclasses.replace(band, block_n=min(band.block_n, block_m))
    rel = dataclasses.replace(rel, block_n=band.block_n)
    widest = max(t.block_n for t in (core, key, band))
    band_keys = -(-keys // widest) * widest
    items = slab = b * part.count * blocks
    if call.rel_key is not None:
        tile_bytes = heads * block_m * band_keys * call.query.element_size()
        most = max(SLAB_BYTES // tile_bytes // blocks, 1) * blocks  # whole chunks
        slab = -(-items // -(-items // most) // blocks) * blocks  # of equal size
    bands = (block_m + band.block_n - 2) // band.block_n + 1
    diagonals = (blocks - 1) * (block_m // band.block_n) + bands + band_keys // band.block_n - 1
    per_split = -(-slab // min(slab, -(-WAVES * target.multiprocessors // (diagonals * heads))))
    key_blocks = -(-keys // core.block_n)
    return Layout(core, key, band, rel, fused, blocks, key_blocks, band_keys, items, slab, diagonals, per_split)


def buffers(call: ChunkedCrossAttention, need: dict[str, bool], part: Span, cut: Layout) -> dict[str, Tensor | None]:
    """Return the tensors that kernels write, as arguments; None where a gradient is not needed."""
    dtype = call.query.dtype

    def new(wanted: bool, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return torch.empty(shape, dtype=dtype, device=call.query.device) if wanted else None

    b, n, h, d = call.query.shape
    chunks, neighbours = call.key.shape[1:3]
    has_rel, need_keys = call.rel_key is not None, need["key"] or need["value"]
    e = call.rel_key.shape[-1] if has_rel else d
    band = new(has_rel, cut.slab, h, cut.core.block_m, cut.band_keys, dtype=dtype)
    made = dict(
        dq_ptr=new(True, b, n, h, d, dtype=dtype),
        drq_ptr=new(has_rel and call.rel_query is not None, b, n, h, e, dtype=dtype),
        dk_ptr=new(need_keys, *call.key.shape, dtype=dtype),
        dv_ptr=new(need_keys, *call.key.shape, dtype=dtype),
        dgate_ptr=new(need["neighbour_gate"], b, chunks, neighbours, cut.blocks * h * cut.key_blocks),
        dcontent_ptr=new(need["content_bias"], cut.items, h, d),
        dposition_ptr=new(has_rel and need["position_bias"], cut.items, h, e),
        delta_ptr=new(need_keys and not cut.fused, b, h, n),
        band_ptr=band,
        # if the key kernel follows the query kernel, it needs the logits, so dS may not replace them
        ds_ptr=None if cut.fused or not need_keys or band is None else torch.empty_like(band),
        part_ptr=new(has_rel and need["rel_key"], cut.splits, h, cut.diagonals * cut.band.block_n, e),
    )
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
    part = span(call)
    cut = layout(call, need["key"] or need["value"], part, target)
    made = buffers(call, need, part, cut)
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    elif call.neighbour_mask is not None or call.batch_start is not None:
        grad_out = settled(grad_out, lse)
    elif beyond(grad_out, 1, call.chunk_len):  # an incoming gradient can't be refused
        grad_out = grad_out.contiguous()
    given = tensors(call) | made | {"out_ptr": out, "lse_ptr": lse, "do_ptr": grad_out, "dlse_ptr": grad_lse}
    given |= {"query_start": call.query_start, "first_chunk": part.first}
    arguments = scalars(call) | strides(grad_out, "do", "bnh") | strides(grad_lse, "dl", "bhn")
    arguments |= {"chunks": part.count, "blocks": cut.blocks, "band_keys": cut.band_keys}
    arguments |= {"items_per_split": cut.items_per_split, "WRITE_KEYS": cut.fused}
    for first in range(0, cut.items, cut.slab):
        _launch_slab(call, need, cut, given, arguments, first, min(cut.slab, cut.items - first))
    letters = {"query": "q", "key": "k", "value": "v", "rel_query": "rq"}
    input_grads = {name: made[f"d{letter}_ptr"] for name, letter in letters.items()}
    for name, pointer in {"content_bias": "dcontent_ptr", "position_bias": "dposition_ptr"}.items():
        if made[pointer] is not None:
            input_grads[name] = sum_parts(made[pointer], getattr(call, name))
    if (rel := made["part_ptr"]) is not None:
        # row x of the partials is displacement x + 1 - band_keys, row t of the table is displacement rel_start + t
        shift = call.rel_start + cut.band_keys - 1
        input_grads["rel_key"] = sum_parts(rel, call.rel_key, call.rel_key.shape[0], rel.shape[2], shift)
    if made["dgate_ptr"] is not None:
        input_grads["neighbour_gate"] = made["dgate_ptr"].sum(-1).to(out.dtype)
    return needed(call, need, input_grads)


def _launch_slab(
    call: ChunkedCrossAttention,
    need: dict[str, bool],
    cut: Layout,
    given: dict,
    arguments: dict,
    first_item: int,
    count: int,
) -> None:
    """Launch the kernels of `count` items, from `first_item` on."""
    h, (neighbours, keys, groups) = call.query.shape[2], call.key.shape[2:5]
    has_rel = call.rel_key is not None
    # where no key kernel follows the query kernel, dS has replaced the logits in the band
    with_ds = given | {"band_ptr": given["band_ptr" if given["ds_ptr"] is None else "ds_ptr"]}

    def scalars_of(grid: tuple[int, ...], tile: configs.Tile, key_blocks: int) -> Scalars:
        own = {"first_item": first_item, "key_blocks": key_blocks, "EVEN_KEYS": keys % tile.block_n == 0}
        return Scalars.of_tile(grid, arguments | own | {"last_item": first_item + count}, tile)

    each = (count * h,)
    if has_rel:
        launch(_cca_backward_logits_kernel, given, scalars_of(each, cut.band, cut.key_blocks))
    launch(_cca_backward_query_kernel, given, scalars_of(each, cut.core, cut.key_blocks))
    if (need["key"] or need["value"]) and not cut.fused:
        key_blocks = -(-keys // cut.key.block_n)
        grid = (count // cut.blocks * neighbours * key_blocks * groups,)
        launch(_cca_backward_key_kernel, given, scalars_of(grid, cut.key, key_blocks))
    if has_rel and (need["query"] or need["rel_query"] or need["position_bias"] or need["rel_key"]):
        launch(_cca_backward_band_kernel, with_ds, scalars_of(each, cut.band, cut.key_blocks))
    if given["part_ptr"] is not None:
        band_blocks = cut.band_keys // cut.band.block_n
        launch(_cca_backward_rel_kernel, with_ds, scalars_of((cut.diagonals, h, cut.splits), cut.rel, band_blocks))
