"""Host side of the backward of chunked cross-attention: launches, slab by slab, and the final sums. Waits for nothing."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ... import configs
from ..._problem import ChunkedCrossAttention
from ..._target import Target
from ..common.launch import Launch, settled, strides
from ..common.plan import Plan
from .backward import _cca_backward_key_kernel, _cca_backward_query_kernel
from .band import _cca_backward_band_kernel, _cca_backward_logits_kernel, _cca_backward_rel_kernel
from .plan import WAVES, constants, inputs, span, tile

#: bound of the band workspace: it should stay in the second-level cache (50 MB on sm_90) from one kernel to the next
SLAB_BYTES = 48 << 20


def backward(call: ChunkedCrossAttention, outputs, grads, needs, target: Target) -> Plan:
    """The launches of the gradients `needs`, slab by slab."""
    made = Backward(call, outputs, grads, needs, target)
    return Plan(made.launches, gradients=made.gradients)


class Backward:
    """`launches` fill the buffers; `gradients()` then sums partials, by torch's own reductions (fixed order, no atomics)."""

    def __init__(
        self, call: ChunkedCrossAttention, outputs: tuple[Tensor, Tensor], grads: tuple[Tensor | None, ...], needs: tuple[bool, ...],
        target: Target,
    ):  # fmt: skip
        self.call, self.target = call, target
        self.need = dict(zip(call.DIFFERENTIABLE, needs, strict=True))
        self.need_keys = self.need["key"] or self.need["value"]
        self.span = span(call)
        self._tiles()
        self._buffers()
        self.launches: list[Launch] = []
        out, lse = outputs
        grad_out, grad_lse = grads
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        elif call.neighbour_mask is not None or call.batch_start is not None:
            grad_out = settled(grad_out, lse)
        arguments = {
            **inputs(call), **constants(call, self.core), **vars(self.buffers), "out_ptr": out, "lse_ptr": lse,
            "do_ptr": grad_out, **strides(grad_out, "do", "bnh"), "dlse_ptr": grad_lse, **strides(grad_lse, "dl", "bhn"),
            "first_chunk": self.span.first, "chunks": self.span.count, "blocks": self.blocks,
            "key_blocks": self.key_blocks, "band_keys": self.band_keys, "items_per_split": self.items_per_split, "WRITE_KEYS": self.fused,
        }  # fmt: skip
        for first in range(0, self.items, self.slab):
            self._slab({**arguments, "first_item": first}, min(self.slab, self.items - first))

    def _tiles(self) -> None:
        call, target = self.call, self.target
        b, _, self.heads, _ = call.query.shape
        keys, groups = call.key.shape[3:5]
        # tiles start at index 0 of the attending chunk, however few of its rows this call brings
        whole = tile(call, "backward", target, rows=call.chunk_len)
        self.fused = self.need_keys and groups == self.heads and call.chunk_len <= whole.block_m
        self.core = whole if self.fused else tile(call, "backward_query", target, rows=call.chunk_len)
        block_m = self.core.block_m  # of every kernel: the workspace is laid out in tiles of it
        others = {name: tile(call, f"backward_{name}", target, rows=call.chunk_len) for name in ("key", "band", "rel")}
        self.key, self.band, self.rel = (dataclasses.replace(t, block_m=block_m) for t in others.values())
        self.blocks = -(-call.chunk_len // block_m)
        if self.blocks > 1:  # the bands of a chunk's time blocks must meet the table in whole blocks of rows
            self.band = dataclasses.replace(self.band, block_n=min(self.band.block_n, block_m))
        self.rel = dataclasses.replace(self.rel, block_n=self.band.block_n)
        self.key_blocks = -(-keys // self.core.block_n)
        widest = max(t.block_n for t in (self.core, self.key, self.band))
        self.band_keys = -(-keys // widest) * widest
        self.items = b * self.span.count * self.blocks
        self.slab = self.items
        if call.rel_key is not None:
            tile_bytes = self.heads * block_m * self.band_keys * call.query.element_size()
            slab = max(SLAB_BYTES // tile_bytes // self.blocks, 1) * self.blocks  # whole chunks
            slabs = -(-self.items // slab)
            self.slab = -(-self.items // slabs // self.blocks) * self.blocks  # of equal size
        band_blocks, bands = self.band_keys // self.band.block_n, (block_m + self.band.block_n - 2) // self.band.block_n + 1
        self.diagonals = (self.blocks - 1) * (block_m // self.band.block_n) + bands + band_blocks - 1
        want = -(-WAVES * target.multiprocessors // (self.diagonals * self.heads))
        self.items_per_split = -(-self.slab // min(self.slab, want))

    def _buffers(self) -> None:
        call, need, dtype, device = self.call, self.need, self.call.query.dtype, self.call.query.device

        def new(wanted: bool, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
            return torch.empty(shape, dtype=dtype, device=device) if wanted else None

        b, n, h, d = call.query.shape
        chunks, neighbours = call.key.shape[1:3]
        has_rel = call.rel_key is not None
        e = call.rel_key.shape[-1] if has_rel else d
        splits = -(-self.slab // self.items_per_split)
        gate_parts = self.blocks * h * self.key_blocks
        band = new(has_rel, self.slab, h, self.core.block_m, self.band_keys, dtype=dtype)
        self.buffers = _Buffers(
            dq_ptr=new(True, b, n, h, d, dtype=dtype),
            drq_ptr=new(has_rel and call.rel_query is not None, b, n, h, e, dtype=dtype),
            dk_ptr=new(self.need_keys, *call.key.shape, dtype=dtype),
            dv_ptr=new(self.need_keys, *call.key.shape, dtype=dtype),
            dgate_ptr=new(need["neighbour_gate"], b, chunks, neighbours, gate_parts),
            dcontent_ptr=new(need["content_bias"], self.items, h, d),
            dposition_ptr=new(has_rel and need["position_bias"], self.items, h, e),
            delta_ptr=new(self.need_keys and not self.fused, b, h, n),
            band_ptr=band,
            # the key kernel comes after the query kernel and still needs the logits: then dS may not replace them
            ds_ptr=None if self.fused or not self.need_keys or band is None else torch.empty_like(band),
            part_ptr=new(has_rel and need["rel_key"], splits, h, self.diagonals * self.band.block_n, e),
        )
        first, last = max(self.span.first, 0), self.span.first + self.span.count
        if call.batch_start is not None:
            first = last = chunks  # any chunk may be one that nothing attends
        for grad in (self.buffers.dk_ptr, self.buffers.dv_ptr, self.buffers.dgate_ptr):
            if grad is not None:  # chunks that nothing attends
                grad[:, :first].zero_()
                grad[:, last:].zero_()

    def _slab(self, arguments: dict, count: int) -> None:
        h, (neighbours, keys, groups) = self.heads, self.call.key.shape[2:5]
        has_rel = self.call.rel_key is not None
        ds = self.buffers.band_ptr if self.buffers.ds_ptr is None else self.buffers.ds_ptr
        if has_rel:
            self._add(_cca_backward_logits_kernel, (count * h,), arguments, self.band)
        self._add(_cca_backward_query_kernel, (count * h,), arguments, self.core)
        if self.need_keys and not self.fused:
            key_blocks = -(-keys // self.key.block_n)
            even = keys % self.key.block_n == 0
            grid = (count // self.blocks * neighbours * key_blocks * groups,)
            self._add(_cca_backward_key_kernel, grid, {**arguments, "key_blocks": key_blocks, "EVEN_KEYS": even}, self.key)
        if has_rel and (self.need["query"] or self.need["rel_query"] or self.need["position_bias"] or self.need["rel_key"]):
            self._add(_cca_backward_band_kernel, (count * h,), {**arguments, "band_ptr": ds}, self.band)
        if self.buffers.part_ptr is not None:
            splits = self.buffers.part_ptr.shape[0]
            last, band_blocks = arguments["first_item"] + count, self.band_keys // self.band.block_n
            given = {**arguments, "band_ptr": ds, "last_item": last, "key_blocks": band_blocks}
            self._add(_cca_backward_rel_kernel, (self.diagonals, h, splits), given, self.rel)

    def _add(self, kernel, grid: tuple[int, ...], arguments: dict, tile: configs.Tile) -> None:
        blocks = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "PRECISION": tile.precision}
        given = {name: value for name, value in {**arguments, **blocks}.items() if name in kernel.arg_names}
        self.launches.append(Launch(kernel, grid, given, tile.num_warps, tile.num_stages))

    def gradients(self) -> list[Tensor | None]:
        """In the order of DIFFERENTIABLE, None where not needed; an input that the call makes no use of has a zero gradient."""
        made = self.buffers
        found = {
            "query": made.dq_ptr, "key": made.dk_ptr, "value": made.dv_ptr, "rel_query": made.drq_ptr,
            "rel_key": None if made.part_ptr is None else self._rel_key(),
            "content_bias": None if made.dcontent_ptr is None else made.dcontent_ptr.sum(0),
            "position_bias": None if made.dposition_ptr is None else made.dposition_ptr.sum(0),
            "neighbour_gate": None if made.dgate_ptr is None else made.dgate_ptr.sum(-1),
        }  # fmt: skip
        return [
            None if not needed else torch.zeros_like(getattr(self.call, name)) if found[name] is None else found[name].to(made.dq_ptr.dtype)
            for name, needed in self.need.items()
        ]

    def _rel_key(self) -> Tensor:
        """[H or 1,T,E]: partials summed over splits (and heads, where they share a table) and moved to the table's rows."""
        rel, part = self.call.rel_key, self.buffers.part_ptr
        total = part.sum((0, 1)).unsqueeze(0) if rel.shape[0] == 1 else part.sum(0)
        # row x of the sum is displacement x + 1 - band_keys, row t of the table is displacement rel_start + t
        shift = 1 - self.band_keys - self.call.rel_start
        first, last = max(shift, 0), min(shift + total.shape[1], rel.shape[1])
        if first == 0 and last == rel.shape[1]:
            return total[:, -shift : last - shift]
        grad = torch.zeros(rel.shape, dtype=torch.float32, device=rel.device)
        if first < last:
            grad[:, first:last] = total[:, first - shift : last - shift]
        return grad


@dataclasses.dataclass
class _Buffers:
    """What kernels write, under the kernels' own argument names; None where nobody needs it."""

    dq_ptr: Tensor
    drq_ptr: Tensor | None
    dk_ptr: Tensor | None
    dv_ptr: Tensor | None
    dgate_ptr: Tensor | None
    dcontent_ptr: Tensor | None
    dposition_ptr: Tensor | None
    delta_ptr: Tensor | None
    band_ptr: Tensor | None
    ds_ptr: Tensor | None
    part_ptr: Tensor | None
