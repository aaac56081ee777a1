"""Bulk copies by tensor map (TMA), and the making of maps in kernels, as far as Triton uses them."""

from __future__ import annotations

from .assemble import UPDATES, Instruction, NotUnderstood, asynchronous_copy, form, known
from .parse import Constant, Register

#: field of tensormap.replace: (byte of TensorMap, bytes of an element, whether it has an index, the number to add)
_FIELDS = {
    "global_address": (0, 8, False, 0),
    "rank": (8, 4, False, 1),
    "elemtype": (12, 4, False, 0),
    "global_dim": (16, 8, True, 0),
    "global_stride": (64, 8, True, 0),  # the stride of dimension 0 is the element's size
    "box_dim": (96, 4, True, 0),
    "swizzle_mode": (116, 4, False, 0),
    "fill_mode": (120, 4, False, 0),
}


@form("cp")
def _copy(s, parts):
    if "bulk" in parts:  # cp.async.bulk, cp.reduce.async.bulk
        return _bulk(s, parts[parts.index("bulk") + 1 :])
    return asynchronous_copy(s, parts)


def _bulk(s, parts):
    """cp.async.bulk..., cp.reduce.async.bulk...; `parts` begin behind them."""
    if parts == ["commit_group"]:
        return Instruction("bulk.commit")
    if parts in (["wait_group"], ["wait_group", "read"]):
        return Instruction("bulk.wait", options=(s.operands[0].value,))
    if parts[0] != "tensor":
        raise NotUnderstood("a bulk copy without a tensor map")
    gathers = {"tile::gather4", "tile::scatter4"} & set(parts)
    loads = "mbarrier::complete_tx::bytes" in parts
    (how,) = [part for part in parts if part in UPDATES] or [None]
    ends = "mbarrier::complete_tx::bytes" if loads else "bulk_group"
    own = ("multicast::cluster", "cta_group::1", "cta_group::2") if loads else [how] if how else []
    flags = known(parts[2:], "shared::cta", "shared::cluster", "global", "tile", ends, *gathers, *own, "L2::cache_hint")
    operands = s.operands[: -1 if "L2::cache_hint" in flags else None]  # how to cache, not what
    mask, sources, offset = [], [], 0
    if loads:
        to, source, barrier, *mask = operands
        sources, offset = [barrier.base], barrier.offset
    else:
        source, to = operands
    if len(mask) != ("multicast::cluster" in flags):
        raise NotUnderstood("operands")
    reach = 2 + ("cta_group::2" in flags) if mask else int("shared::cluster" in flags)
    update = -1 if how is None else UPDATES[how]
    options = (to.offset, source.offset, len(source.coordinates), offset, update, int(bool(gathers)), reach)
    sources = [to.base, source.base, *sources, *source.coordinates, *mask]
    return Instruction("bulk.load" if loads else "bulk.store", sources=sources, options=options)


@form("tensormap")
def _tensormap(s, parts):
    what, *modifiers = parts
    if what == "cp_fenceproxy":
        to, source, size = s.operands
        if size != Constant(128):
            raise NotUnderstood("another size")
        return Instruction("tensormap.copy", sources=[to.base, source.base], options=(to.offset, source.offset))
    if what != "replace" or modifiers[0] != "tile" or "shared::cta" not in modifiers:
        raise NotUnderstood(s.opcode)
    address, *values = s.operands
    if modifiers[1] in ("element_stride", "interleave_layout"):
        if values[-1] not in (Constant(0), Constant(1)) and not isinstance(values[-1], Register):
            raise NotUnderstood(modifiers[1])
        return Instruction("nothing")  # elements side by side, no interleaving
    byte, size, indexed, more = _FIELDS[modifiers[1]]
    if indexed:
        byte += size * values.pop(0).value
    options = (address.offset, byte, size, more)
    return Instruction("tensormap.replace", sources=[address.base, *values], options=options)
