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
    return Instruction("elect", destinations=values(s.operands[0]))


@form("mbarrier")
def _mbarrier(s, parts):
    what, *modifiers = parts
    counts = what in ("arrive", "arrive_drop", "expect_tx")
    own = ["parity"] if what in ("test_wait", "try_wait") else ["shared::cluster"] if counts else []
    own += ["expect_tx", "noComplete"] if counts and what != "expect_tx" else []
    known(modifiers, "shared", "shared::cta", "b64", "acquire", "release", "relaxed", "cta", "cluster", *own)
    if not {"shared", "shared::cta", "shared::cluster"} & set(modifiers):
        raise NotUnderstood("a generic address")
    if what in ("init", "inval"):
        address, *count = s.operands
        return Instruction(f"mbarrier.{what}", sources=[address.base, *count], options=(address.offset,))
    if counts:
        state, address, *count = s.operands if what != "expect_tx" else [Register("_"), *s.operands]
        if "expect_tx" in parts:  # the count is of bytes
            arrivals = [Constant(int(what != "expect_tx")), *count]
        else:
            arrivals = [*(count or [Constant(1)]), Constant(0)]
        targets = [] if state == Register("_") else [state]
        options = (address.offset, int("shared::cluster" in modifiers), int(what == "arrive_drop"))
        return Instruction("mbarrier.arrive", "u64", [address.base, *arrivals], targets, options=options)
    if what not in ("test_wait", "try_wait"):
        raise NotUnderstood(s.opcode)
    done, address, phase, *_hint = s.operands  # a state is the phase that it was given in
    options = (address.offset, int(what == "test_wait"))
    return Instruction("mbarrier.try_wait", "u32", [address.base, phase], [done], options=options)


@form("tcgen05")
def _tcgen05(s, parts):
    what, *modifiers = parts
    if what in ("ld", "st"):
        return _transfer(s, what, modifiers)
    if what in ("wait::ld", "wait::st"):
        known(modifiers, "sync", "aligned")
        return Instruction("tcgen05.wait", options=(int(what == "wait::ld"),))
    (group,) = (part for part in modifiers if part in ("cta_group::1", "cta_group::2"))
    modifiers.remove(group)
    if what == "mma":
        return _mma(s, modifiers, int(group[-1]))
    if what == "dealloc":
        known(modifiers, "sync", "aligned", "b32")
        address, columns = s.operands
        return Instruction("tcgen05.dealloc", sources=[address], options=(_constant(columns),))
    if what == "relinquish_alloc_permit":
        known(modifiers, "sync", "aligned")
        return Instruction("tcgen05.relinquish")
    allowed, place = _ADDRESSED[what]
    if place not in (flags := known(modifiers, *allowed, place)) and what != "commit":  # Triton 3.6 leaves it out
        raise NotUnderstood("a generic address")
    address, *rest = s.operands
    if what == "alloc":
        return Instruction("tcgen05.alloc", sources=[address.base], options=(address.offset, *map(_constant, rest)))
    if len(rest) != ("multicast::cluster" in flags):
        raise NotUnderstood("operands")
    return Instruction("tcgen05.commit", sources=[address.base, *rest], options=(address.offset, len(rest)))


#: modifiers of the instructions with an address in shared memory, and how they name that space
_ADDRESSED = {
    "alloc": (("sync", "aligned", "b32"), "shared::cta"),
    "commit": (("mbarrier::arrive::one", "multicast::cluster", "b64"), "shared::cluster"),
}
#: shape -> (its number in tensor_memory.h, registers a repetition)
_SHAPES = {"16x32bx2": (0, 1), "32x32b": (1, 1), "16x256b": (2, 4)}


def _transfer(s, what, modifiers):
    (shape,) = (part for part in modifiers if part in _SHAPES)
    pattern, each = _SHAPES[shape]
    operands = list(s.operands)
    moved = values(operands.pop(0 if what == "ld" else -1))
    address, *split = operands
    known(modifiers, "sync", "aligned", shape, "b32", f"x{len(moved) // each}")
    if len(split) != (shape == "16x32bx2") or len(moved) % each:
        raise NotUnderstood("operands")
    options = (address.offset, _constant(split[0]) if split else 0, pattern)
    loaded, stored = (moved, []) if what == "ld" else ([], moved)
    return Instruction("tcgen05.transfer", "u32", [address.base, *stored], loaded, options=options)


def _mma(s, modifiers, ctas):
    (kind,) = modifiers
    d, a, b, description, adds = s.operands
    if kind not in ("kind::f16", "kind::tf32") or isinstance(b, (Memory, Vector)) or not isinstance(adds, Register):
        raise NotUnderstood(s.opcode)
    from_tensor = isinstance(a, Memory)
    options = (d.offset, int(from_tensor), a.offset if from_tensor else 0, ctas)
    sources = [d.base, a.base if from_tensor else a, b, description, adds]
    return Instruction("tcgen05.mma", kind.removeprefix("kind::"), sources, options=options)
