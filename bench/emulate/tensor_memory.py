"""Instructions of sm_100 that Triton uses: tensor memory, its products, and the mbarriers that end them."""

from __future__ import annotations

from .assemble import Instruction, NotUnderstood, form, known, values
from .parse import Constant, Memory, Register, Vector


def _constant(operand) -> int:
    if not isinstance(operand, Constant):
        raise NotUnderstood("a number that is not written out")
    return operand.value


@form("elect")
def _elect(s, parts):
    if parts != ["sync"] or s.operands[1:] != [Constant(-1)]:
        raise NotUnderstood("of part of a warp")
    return Instruction("elect", "u32", [], values(s.operands[0]))


@form("mbarrier")
def _mbarrier(s, parts):
    what, *modifiers = parts
    known(modifiers, "shared", "shared::cta", "b64", {"try_wait": "parity", "arrive": "expect_tx"}.get(what, "b64"))
    if not {"shared", "shared::cta"} & set(modifiers):
        raise NotUnderstood("a generic address")
    if what in ("init", "inval"):
        address, *count = s.operands
        options = (address.offset, *map(_constant, count))
        return Instruction(f"mbarrier.{what}", "u32", [address.base], [], options=options)
    if what == "arrive":
        state, address, *count = s.operands
        if state != Register("_"):
            raise NotUnderstood("the state that an arrival gives")
        if "expect_tx" in modifiers:
            options = (address.offset, 1, _constant(*count))
        else:
            options = (address.offset, *(map(_constant, count) if count else [1]))
        return Instruction("mbarrier.arrive", "u32", [address.base], [], options=options)
    if what != "try_wait" or "parity" not in modifiers or len(s.operands) != 3:
        raise NotUnderstood(s.opcode)
    done, address, parity = s.operands
    return Instruction("mbarrier.try_wait", "u32", [address.base, parity], [done], options=(address.offset,))


@form("tcgen05")
def _tcgen05(s, parts):
    what, *modifiers = parts
    if what in ("ld", "st"):
        return _transfer(s, what, modifiers)
    if what in ("wait::ld", "wait::st"):
        known(modifiers, "sync", "aligned")
        return Instruction("tcgen05.wait", "u32", [], [], options=(int(what == "wait::ld"),))
    if "cta_group::1" not in modifiers:
        raise NotUnderstood("of other than one CTA")
    return _ONE_CTA[what](s, [part for part in modifiers if part != "cta_group::1"])


#: shape -> (its number in tensor_memory.h, registers a repetition)
_SHAPES = {"16x32bx2": (0, 1), "32x32b": (1, 1), "16x256b": (2, 4)}


def _transfer(s, what, modifiers):
    (shape,) = (part for part in modifiers if part in _SHAPES)
    pattern, each = _SHAPES[shape]
    first, second, *rest = s.operands
    address, moved = (second, first) if what == "ld" else (first, (rest or [second])[-1])
    split = rest[0] if what == "ld" and rest else second if what == "st" and rest else None
    if (split is not None) != (shape == "16x32bx2"):
        raise NotUnderstood("operands")
    moved = values(moved)
    known(modifiers, "sync", "aligned", shape, "b32", f"x{len(moved) // each}")
    if len(moved) % each:
        raise NotUnderstood("operands")
    options = (address.offset, 0 if split is None else _constant(split), pattern)
    if what == "ld":
        return Instruction("tcgen05.ld", "u32", [address.base], moved, options=options)
    return Instruction("tcgen05.st", "u32", [address.base, *moved], [], options=options)


def _alloc(s, modifiers):
    known(modifiers, "sync", "aligned", "shared::cta", "b32")
    if "shared::cta" not in modifiers:
        raise NotUnderstood("a generic address")
    address, columns = s.operands
    return Instruction("tcgen05.alloc", "u32", [address.base], [], options=(address.offset, _constant(columns)))


def _dealloc(s, modifiers):
    known(modifiers, "sync", "aligned", "b32")
    address, columns = s.operands
    return Instruction("tcgen05.dealloc", "u32", [address], [], options=(_constant(columns),))


def _relinquish(s, modifiers):
    known(modifiers, "sync", "aligned")
    return Instruction("tcgen05.relinquish", "u32", [], [])


def _commit(s, modifiers):
    known(modifiers, "mbarrier::arrive::one", "shared::cluster", "b64")
    if "shared::cluster" not in modifiers:
        raise NotUnderstood("a generic address")
    (address,) = s.operands
    return Instruction("tcgen05.commit", "u32", [address.base], [], options=(address.offset,))


def _mma(s, modifiers):
    (kind,) = modifiers
    d, a, b, description, adds = s.operands
    if kind not in ("kind::f16", "kind::tf32") or isinstance(b, (Memory, Vector)) or not isinstance(adds, Register):
        raise NotUnderstood(s.opcode)
    from_tensor = isinstance(a, Memory)
    options = (d.offset, int(from_tensor), a.offset if from_tensor else 0)
    sources = [d.base, a.base if from_tensor else a, b, description, adds]
    return Instruction("tcgen05.mma", "f16" if kind == "kind::f16" else "tf32", sources, [], options=options)


_ONE_CTA = {
    "alloc": _alloc,
    "dealloc": _dealloc,
    "relinquish_alloc_permit": _relinquish,
    "commit": _commit,
    "mma": _mma,
}
