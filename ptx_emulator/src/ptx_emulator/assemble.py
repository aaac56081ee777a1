"""Translate instructions into bytecode: the handler of emulator.cpp that executes an opcode, and its options.

Every known form is written out. Any other form is refused by name, because an opcode that is half understood computes
something else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from .parse import Constant, PtxError, Register, Statement, Symbol, Vector

COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_DIRECTED = ("rz", "rm", "rp")  # other than to nearest
_ROUNDINGS = {"rn": 0, "rni": 0, "rz": 1, "rzi": 1, "rm": 2, "rmi": 2, "rp": 3, "rpi": 3, "rna": 4}
_SHUFFLES = {"up": 0, "down": 1, "bfly": 2, "idx": 3}
_VOTES = {"ballot": 0, "any": 1, "all": 2}
LOCAL = 3
RANK_BIT = 24  # from this bit on, a shared address has the rank of its CTA; machine.h
_SPACES = {"global": 0, "const": 0, "shared": 1, "shared::cta": 1, "local": LOCAL, "shared::cluster": 4}
_FLOATS = ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2", "f32x2")
#: where a space begins among generic addresses: machine.h
GENERIC = {"local": 201 << 40, "param": 202 << 40, "const": 203 << 40}
PARAMETERS = 2  # the space of a structure's fields, whose address is computed
#: memory orders and scopes; here everyone sees an access at once
_ORDERS = {"relaxed", "acquire", "release", "acq_rel", "gpu", "cta", "cluster", "sys"}
#: bits of an access's part in the order between CTAs: traffic.h
_ACQUIRES, _RELEASES, _STRONG = 1, 2, 4
#: cache hints of a load or store, which change no value
_HINTS = _ORDERS | {"nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "volatile", "weak"}
_HINTS |= {f"L2::{hint}" for hint in ("cache_hint", "64B", "128B", "256B")}
_HINTS |= {f"L1::{hint}" for hint in ("evict_last", "evict_first", "evict_normal", "no_allocate")}


#: the number of each type in machine.h; plain bits are unsigned integers
TYPES = ("u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64", "f16", "bf16", "f32", "f64", "pred", "f16x2", "bf16x2")
TYPES += ("tf32", "f32x2", "e4m3", "e5m2", "u16x2", "s16x2")
TYPES = {name: number for number, name in enumerate(TYPES)} | {"b8": 0, "b16": 1, "b32": 2, "b64": 3}


@dataclasses.dataclass
class Instruction:
    handler: str
    type: str = "u32"
    sources: Sequence = ()
    destinations: Sequence = ()
    type2: str = "u32"
    options: tuple = ()  # numbers; the name of a type, or a label, stands for its number
    width: int | None = None  # bytes of a destination; None: as its declared register


FORMS: dict[str, Callable[[Statement, list[str]], Instruction]] = {}


def form(*roots: str):
    def register(function):
        FORMS.update({root: function for root in roots})
        return function

    return register


def decode(statement: Statement) -> Instruction:
    """Return the bytecode of one statement. Raises PtxError with the part that is not understood."""
    root, *parts = statement.opcode.split(".")
    if root not in FORMS:
        raise PtxError(f"opcode not emulated: {statement.text[:80]}")
    try:
        return FORMS[root](statement, parts)
    except (NotUnderstood, ValueError, IndexError, KeyError) as error:
        raise PtxError(f"form not emulated: {statement.text[:80]} ({type(error).__name__}: {error})") from None


class NotUnderstood(Exception):
    pass


def known(parts: list[str], *allowed: str) -> set[str]:
    """Return the modifiers before the type, all of which must be known."""
    strange = [part for part in parts if part not in allowed]
    if strange:
        raise NotUnderstood(f"modifier {'.'.join(strange)}")
    return set(parts)


#: operands that are read, where it isn't two
_READ = {
    **dict.fromkeys(("not", "neg", "abs", "popc", "clz", "brev", "ex2", "lg2", "rcp", "sqrt", "rsqrt"), (1,)),
    **dict.fromkeys(("sin", "cos", "tanh", "cvt"), (1,)),
    **dict.fromkeys(("fma", "mad", "madc", "bfe", "prmt", "shf", "selp"), (3,)),
    **dict.fromkeys(("bfi", "lop3"), (4,)),
}


def _plain(handler: str, statement: Statement, kind: str, options=(), width=None) -> Instruction:
    first, *rest = statement.operands
    root = statement.opcode.split(".")[0]
    three = root in ("min", "max") and kind == "f32"  # sm_100 has one of three
    if len(rest) not in ((2, 3) if three else _READ.get(root, (2,))):
        raise NotUnderstood(f"{len(rest)} operands")
    return Instruction(handler, kind, rest, [first], options=options, width=width)


_EXTENDED = {"add": 0, "addc": 0, "sub": 1, "subc": 1, "mad.lo": 2, "madc.lo": 2, "mad.hi": 3, "madc.hi": 3}


@form("addc", "subc", "madc")
def _extended(s, parts):
    """Arithmetic on several words: with the carry of the previous one, or for the next one (.cc)."""
    root, *_ = s.opcode.split(".")
    *modifiers, kind = parts
    half = [part for part in modifiers if part in ("lo", "hi")]
    flags = known(modifiers, "cc", *half)
    options = (_EXTENDED[".".join([root, *half])], int(root.endswith("c")), int("cc" in flags))
    return _plain("with carry", s, kind, options)


@form("add", "sub", "div", "rem", "and", "or", "xor", "not", "neg", "abs", "min", "max", "fma")
def _arithmetic(s, parts):
    root = s.opcode.split(".")[0]
    *modifiers, kind = parts
    if "cc" in modifiers:
        return _extended(s, parts)
    if root in ("add", "sub", "fma") and "f32" in modifiers and kind in ("f16", "bf16"):  # the last operand is wider
        modifiers.remove("f32")
        known(modifiers, "rn")
        return _plain("mixed", s, kind, (("add", "sub", "fma").index(root),), width=4)
    floating = kind in _FLOATS
    flags = known(
        modifiers,
        *(("rn", "ftz", "full", "approx", "NaN") if floating else ("relu",) if root in ("min", "max") else ()),
        *(_DIRECTED if kind == "f32" and root in ("add", "sub", "fma") else ()),
        *(("xorsign", "abs") if kind == "f32" and root in ("min", "max") else ()),
    )
    signs = int("NaN" in flags) + 2 * ("xorsign" in flags)
    return _plain(root, s, kind, (int("ftz" in flags), signs, int("relu" in flags), _direction(flags)))


def _direction(flags: set[str]) -> int:
    return max(_ROUNDINGS.get(flag, 0) for flag in (*flags, "rn"))


_PRODUCTS = {"mul.lo": "mul", "mul.hi": "mul.hi", "mul.wide": "wide", "mad.lo": "mad", "mad.wide": "wide"}


@form("mul", "mad")
def _product(s, parts):
    root = s.opcode.split(".")[0]
    *modifiers, kind = parts
    if "cc" in modifiers:
        return _extended(s, parts)
    if kind in _FLOATS:
        flags = known(modifiers, "rn", "ftz", *(_DIRECTED if kind == "f32" else ()))
        return _plain("mul" if root == "mul" else "fma", s, kind, (int("ftz" in flags), 0, 0, _direction(flags)))
    (which,) = modifiers
    return _plain(_PRODUCTS[f"{root}.{which}"], s, kind, width=2 * int(kind[1:]) // 8 if which == "wide" else None)


@form("shl", "shr", "bfe", "bfi", "popc", "clz", "brev", "selp", "copysign", "prmt", "lop3")
def _unmodified(s, parts):
    (kind,) = parts
    return _plain(s.opcode.split(".")[0], s, kind)


@form("shf")
def _funnel(s, parts):
    direction, mode, _ = parts
    return _plain("shf", s, "u32", (int(direction == "l"), int({"clamp": 1, "wrap": 0}[mode])))


@form("ex2", "lg2", "rcp", "sqrt", "rsqrt", "sin", "cos", "tanh")
def _special(s, parts):
    *modifiers, kind = parts
    flags = known(modifiers, "approx", "ftz", "rn")
    root = s.opcode.split(".")[0]
    halves = ("f16", "bf16", "f16x2", "bf16x2") if root in ("ex2", "tanh") else ()
    if kind not in ("f32", *(("f64",) if root in ("rcp", "sqrt", "rsqrt") else ()), *halves):
        raise NotUnderstood(kind)
    return _plain(root, s, kind, (int("ftz" in flags),))


@form("mov", "cvta")
def _move(s, parts):
    target, source = s.operands
    kind = parts[-1]  # cvta: generic addresses equal global addresses here
    if s.opcode.startswith("cvta") and "global" not in parts:
        (space,) = {"param", "local"} & set(parts)
        handler = "sub" if "to" in parts else "add"
        return Instruction(handler, kind, [source, Constant(GENERIC[space])], [target])
    return Instruction("mov", kind, values(source), values(target), options=(int(isinstance(source, Constant)),))


@form("setp")
def _compare(s, parts):
    how, *modifiers, kind = parts
    how = _UNSIGNED.get(how, how)
    known(modifiers, "ftz")
    if kind.endswith("x2") or isinstance(s.operands[0], Vector):
        raise NotUnderstood("two results")
    return _plain("setp", s, kind, (COMPARISONS.index(how),))


@form("cvt")
def _convert(s, parts):
    *modifiers, to, source = parts
    if to.endswith("x2"):
        return _pair(s, modifiers, to, source)
    known(modifiers, "ftz", "sat", *_ROUNDINGS)
    default = 0 if to.startswith(("f", "b", "t")) else 1
    rounding = next((_ROUNDINGS[part] for part in modifiers if part in _ROUNDINGS), default)
    integral = any(part in ("rni", "rzi", "rmi", "rpi") for part in modifiers)
    options = (int("ftz" in modifiers), rounding, int("sat" in modifiers), int(integral))
    return dataclasses.replace(_plain("cvt", s, to, options), type2=source)


def _pair(s, modifiers, to, source):
    """Two floats at once."""
    narrow, wide = ("e4m3x2", "e5m2x2"), ("f16x2", "bf16x2")
    if source not in ((*wide, "f32") if to in narrow else (*narrow, "f32") if to in wide else ()):
        raise NotUnderstood(f"from {source}")
    if known(modifiers, "rn", "satfinite") != ({"rn", "satfinite"} if to in narrow else {"rn"}):
        raise NotUnderstood("saturation, or none")
    target, *sources = s.operands
    if len(sources) != (2 if source == "f32" else 1):
        raise NotUnderstood("operands")
    return Instruction("cvt.pair", to.removesuffix("x2"), sources, [target], type2=source.removesuffix("x2"))


def values(operand) -> list:
    return list(operand.items) if isinstance(operand, Vector) else [operand]


def _access(s, parts, address, *, loaded=(), stored=()) -> Instruction:
    """Return a load or store outside the parameters."""
    known(parts[:-1], *_SPACES, "v2", "v4", *_HINTS)
    count = next((int(part[1:]) for part in parts if part in ("v2", "v4")), 1)
    if len(loaded or stored) != count or len(s.operands) != 2 + ("L2::cache_hint" in parts):
        raise NotUnderstood("operands")
    space = next((_SPACES[part] for part in parts if part in _SPACES), 0)
    options = (address.offset + (GENERIC["local"] if space == LOCAL else 0), space, order(parts))
    return Instruction("access", parts[-1], [address.base, *stored], loaded, options=options)


def order(parts, strong: bool = False) -> int:
    """Return the part of an access in the order between CTAs. strong: atomics are, whatever their modifiers say."""
    if "cta" in parts:
        return 0
    strong = strong or bool({"relaxed", "volatile", "acquire", "release"} & set(parts))
    acquires, releases = (bool({which, "acq_rel"} & set(parts)) for which in ("acquire", "release"))
    return strong * _STRONG + acquires * _ACQUIRES + releases * _RELEASES


@form("ld")
def _load(s, parts):
    target, address = s.operands[:2]
    if parts[0] == "param":
        if isinstance(address.base, Symbol) and not isinstance(target, Vector):
            return Instruction("mov", parts[-1], [address], [target])
        offset = address.offset + GENERIC["param"]
        return Instruction("access", parts[-1], [address.base], values(target), options=(offset, PARAMETERS))
    return _access(s, parts, address, loaded=values(target))


@form("st")
def _store(s, parts):
    address, value = s.operands[:2]
    if parts[0] == "async":
        flags = known(parts[1:-1], "weak", "shared::cluster", "mbarrier::complete_tx::bytes", "v2", "v4")
        barrier = s.operands[2]
        if not {"shared::cluster", "mbarrier::complete_tx::bytes"} <= flags or int(parts[-1][1:]) < 32:
            raise NotUnderstood(s.opcode)
        sources = [address.base, barrier.base, *values(value)]
        return Instruction("st.async", parts[-1], sources, options=(address.offset, barrier.offset))
    return _access(s, parts, address, stored=values(value))


_REDUCTIONS = ("add", "min", "max", "and", "or", "xor")
UPDATES = {name: n for n, name in enumerate((*_REDUCTIONS, "exch", "cas"))}


@form("atom", "red")
def _update(s, parts):
    *modifiers, kind = parts
    (how,) = (part for part in modifiers if part in UPDATES)
    flags = known(modifiers, how, *_SPACES, *_ORDERS, "noftz", "v2", "v4", "v8")
    floating = kind in _FLOATS
    if floating and how not in ("add", "exch") and not (how in ("min", "max") and kind.startswith(("f16", "bf16"))):
        raise NotUnderstood(f"{how} of {kind}")
    operands = list(s.operands)
    targets = values(operands.pop(0)) if s.opcode.startswith("atom") else []
    address, *sources = operands
    count = next((int(flag[1:]) for flag in flags if flag in ("v2", "v4", "v8")), 1)
    if [len(values(source)) for source in sources] != [count] * (2 if how == "cas" else 1):
        raise NotUnderstood("operands")
    space = max(_SPACES.get(flag, 0) for flag in flags)
    options = (address.offset, space, UPDATES[how], count, order(parts, strong=True))
    wanted = [] if targets == [Register("_")] else targets
    read = [address.base, *(value for source in sources for value in values(source))]
    return Instruction("atom", kind, read, wanted, options=options)


def asynchronous_copy(s, parts):
    """cp.async of single threads. The form "cp" itself is in tensor_map.py, because it has bulk copies too."""
    if parts == ["async", "commit_group"]:
        return Instruction("cp.async.commit")
    if parts in (["async", "wait_group"], ["async", "wait_all"]):
        return Instruction("cp.async.wait", options=(s.operands[0].value if s.operands else -1,))
    if parts[:3] == ["async", "mbarrier", "arrive"]:
        flags = known(parts[3:], "noinc", "shared", "shared::cta", "b64")
        if not {"shared", "shared::cta"} & flags:
            raise NotUnderstood("a generic address")
        (address,) = s.operands
        return Instruction("copies.arrive", sources=[address.base], options=(address.offset, int("noinc" in flags)))
    if parts[0] != "async" or parts[1] not in ("ca", "cg") or parts[3] != "global":
        raise NotUnderstood(s.opcode)
    known(parts[4:], "L2::cache_hint", "L2::128B", "L2::256B", "L2::64B")
    to, source, size, *rest = s.operands
    if "L2::cache_hint" in parts:
        rest.pop()  # how to cache, not what
    options = (to.offset, size.value, source.offset)
    return Instruction("cp.async", sources=[to.base, source.base, *rest], options=options)


@form("bar", "barrier")
def _barrier(s, parts):
    if parts == ["warp", "sync"]:
        return Instruction("warp.sync")
    if parts[0] == "cluster":
        flags = known(parts[2:], "aligned", *(("acquire",) if parts[1] == "wait" else ("release", "relaxed")))
        options = (int("aligned" in flags), int("relaxed" in flags))
        return Instruction({"arrive": "cluster.arrive", "wait": "cluster.wait"}[parts[1]], options=options)
    (what,) = (part for part in parts if part not in ("cta", "aligned"))
    _number, *count = s.operands
    if len(count) > 1 or (what == "arrive" and not count):
        raise NotUnderstood("operands")
    return Instruction("bar", sources=s.operands, options=(("sync", "arrive").index(what), len(count)))


@form("setmaxnreg")
def _registers(s, parts):
    (count,) = s.operands
    if parts not in (["inc", "sync", "aligned", "u32"], ["dec", "sync", "aligned", "u32"]):
        raise NotUnderstood(s.opcode)
    if not isinstance(count, Constant) or count.value % 8 or not 24 <= count.value <= 256:
        raise NotUnderstood("setmaxnreg: expected a multiple of 8 from 24 to 256")
    return Instruction("warp.sync")


@form("mapa", "getctarank")
def _rank(s, parts):
    if parts != ["shared::cluster", "u32"]:
        raise NotUnderstood("a generic address")
    target, *sources = s.operands
    if s.opcode.startswith("mapa"):
        return Instruction("mapa", sources=sources, destinations=[target])
    return Instruction("shr", sources=[*sources, Constant(RANK_BIT)], destinations=[target])


@form("membar", "fence")
def _fence(s, parts):
    if parts[:2] == ["proxy", "async"]:
        return Instruction("fence.proxy.async")
    if s.opcode.startswith("fence") and parts[0] != "mbarrier_init" and parts[:2] != ["proxy", "tensormap::generic"]:
        known(parts, "acq_rel", "sc", "cta", "cluster", "gpu", "sys")
    return Instruction("fence", options=(int(bool({"gl", "cluster", "gpu", "sys"} & set(parts))),))


#: instructions without a form of their own, in which every modifier is allowed
FORMS |= {
    "bra": lambda s, parts: Instruction("bra", options=(s.operands[0],)),
    **dict.fromkeys(("ret", "exit"), lambda s, parts: Instruction("ret")),
    "trap": lambda s, parts: Instruction("trap"),
    "griddepcontrol": lambda s, parts: Instruction("nothing"),  # a launch ends before the next one begins
    # how to cache, not what
    "createpolicy": lambda s, parts: Instruction("mov", "b64", [Constant(0)], [s.operands[0]], options=(1,)),
    "vprintf": lambda s, parts: Instruction("print", sources=s.operands[-2:], destinations=s.operands[:-2]),
    "assertfail": lambda s, parts: Instruction("assertion", sources=s.operands),
}


@form("shfl")
def _shuffle(s, parts):
    sync, mode, kind = parts
    if sync != "sync" or kind != "b32":
        raise NotUnderstood(s.opcode)
    target, *sources = s.operands
    return Instruction("shfl", "u32", sources, values(target), options=(_SHUFFLES[mode],))


@form("vote")
def _vote(s, parts):
    _sync, mode, _ = parts
    target, source, _members = s.operands
    negated = isinstance(source, tuple)
    options = (_VOTES[mode], int(negated))
    return Instruction("vote", "u32", [source[1] if negated else source], [target], options=options)


@form("redux")
def _reduce(s, parts):
    _sync, how, *modifiers, kind = parts
    flags = known(modifiers, *(("abs", "NaN") if kind == "f32" else ()))
    if kind.startswith("f") and (kind != "f32" or how not in ("min", "max")):
        raise NotUnderstood(s.opcode)
    target, source, _members = s.operands
    options = (_REDUCTIONS.index(how) + 16 * ("NaN" in flags), int("abs" in flags))
    return Instruction("redux", kind, [source], [target], options=options)
