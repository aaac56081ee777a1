"""Instructions -> bytecode: which handler of emulator.cpp executes an opcode, and with which options.

Every form is written out; one that is not is refused by name, for an opcode half understood computes something else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from .parse import Constant, Kernel, PtxError, Statement, Symbol, Vector

COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_JOINS = {"and": 1, "or": 2, "xor": 3}
_ROUNDINGS = {"rn": 0, "rni": 0, "rz": 1, "rzi": 1, "rm": 2, "rmi": 2, "rp": 3, "rpi": 3, "rna": 4}
_SHUFFLES = {"up": 0, "down": 1, "bfly": 2, "idx": 3}
_VOTES = {"ballot": 0, "any": 1, "all": 2}
_REDUCTIONS = {"min": 0, "max": 1, "add": 2, "and": 3, "or": 4, "xor": 5}
_SPACES = {"global": 0, "shared": 1, "shared::cta": 1}
PARAMETERS = 2  # the space of a structure's fields, whose address is computed
#: of a load or store; they say how to cache, not what
_HINTS = {
    "nc",
    "ca",
    "cg",
    "cs",
    "lu",
    "cv",
    "wb",
    "wt",
    "volatile",
    "relaxed",
    "gpu",
    "cta",
    "sys",
    "weak",
    "L1::evict_last",
    "L1::evict_first",
    "L1::no_allocate",
    "L1::evict_normal",
    "L2::128B",
    "L2::256B",
    "L2::64B",
}


@dataclasses.dataclass
class Instruction:
    handler: str
    type: str
    sources: list
    destinations: list
    type2: str = "u32"
    options: tuple[int, ...] = ()
    width: int | None = None  # bytes of a destination; None: as its register was declared


_FORMS: dict[str, Callable[[Statement, list[str]], Instruction]] = {}


def _form(*roots: str):
    def register(function):
        _FORMS.update({root: function for root in roots})
        return function

    return register


def decode(statement: Statement) -> Instruction:
    """The bytecode of one statement; PtxError names what is not understood."""
    root, *parts = statement.opcode.split(".")
    if root not in _FORMS:
        raise PtxError(f"opcode not emulated: {statement.text[:80]}")
    try:
        return _FORMS[root](statement, parts)
    except (_NotUnderstood, ValueError, IndexError, KeyError) as error:
        raise PtxError(f"form not emulated: {statement.text[:80]} ({type(error).__name__}: {error})") from None


class _NotUnderstood(Exception):
    pass


def _known(parts: list[str], *allowed: str) -> set[str]:
    """The modifiers before the type, all of which must be known."""
    strange = [part for part in parts if part not in allowed]
    if strange:
        raise _NotUnderstood(f"modifier {'.'.join(strange)}")
    return set(parts)


def _plain(handler: str, statement: Statement, kind: str, options=(), width=None) -> Instruction:
    first, *rest = statement.operands
    return Instruction(handler, kind, rest, [first], options=options, width=width)


@_form("add", "sub", "div", "rem", "and", "or", "xor", "not", "neg", "abs", "min", "max", "fma")
def _arithmetic(s, parts):
    root = s.opcode.split(".")[0]
    *modifiers, kind = parts
    floating = kind in ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2")
    flags = _known(
        modifiers,
        *(("rn", "ftz", "full", "approx", "NaN") if floating else ("relu",) if root in ("min", "max") else ()),
    )
    return _plain(root, s, kind, (int("ftz" in flags), int("NaN" in flags), int("relu" in flags)))


@_form("mul", "mad")
def _product(s, parts):
    root = s.opcode.split(".")[0]
    *modifiers, kind = parts
    if kind in ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2"):
        flags = _known(modifiers, "rn", "ftz")
        return _plain("mul" if root == "mul" else "fma", s, kind, (int("ftz" in flags),))
    (which,) = modifiers
    if which == "wide":
        return _plain("wide", s, kind, width=2 * int(kind[1:]) // 8)
    if which == "hi" and root == "mul":
        return _plain("mul.hi", s, kind)
    if which != "lo":
        raise _NotUnderstood(which)
    return _plain(root, s, kind)


@_form("shl", "shr", "bfe", "bfi", "popc", "clz", "brev")
def _bits(s, parts):
    (kind,) = parts
    return _plain(s.opcode.split(".")[0], s, kind)


@_form("prmt", "lop3")
def _bytes(s, parts):
    _known(parts, "b32")
    return _plain(s.opcode.split(".")[0], s, "u32")


@_form("shf")
def _funnel(s, parts):
    direction, mode, _ = parts
    return _plain("shf", s, "u32", (int(direction == "l"), int({"clamp": 1, "wrap": 0}[mode])))


@_form("ex2", "lg2", "rcp", "sqrt", "rsqrt")
def _special(s, parts):
    *modifiers, kind = parts
    flags = _known(modifiers, "approx", "ftz", "rn")
    if kind != "f32":
        raise _NotUnderstood(kind)
    return _plain(s.opcode.split(".")[0], s, kind, (int("ftz" in flags),))


@_form("mov", "cvta")
def _move(s, parts):
    target, source = s.operands
    kind = parts[-1]  # cvta: generic addresses are those of global memory here
    if s.opcode.startswith("cvta") and "global" not in parts:
        raise _NotUnderstood("an address space other than global")
    targets = list(target.items) if isinstance(target, Vector) else [target]
    sources = list(source.items) if isinstance(source, Vector) else [source]
    return Instruction("mov", kind, sources, targets, options=(int(isinstance(source, Constant)),))


@_form("selp")
def _select(s, parts):
    (kind,) = parts
    return _plain("selp", s, kind)


@_form("setp")
def _compare(s, parts):
    how, *modifiers, kind = parts
    how = _UNSIGNED.get(how, how)
    joins = [part for part in modifiers if part in _JOINS]
    _known(modifiers, "ftz", *_JOINS)
    if kind.endswith("x2"):
        raise _NotUnderstood(kind)
    target, *sources = s.operands
    negated = len(sources) > 2 and isinstance(sources[2], tuple)
    if negated:
        sources[2] = sources[2][1]
    if bool(joins) != (len(sources) > 2):
        raise _NotUnderstood("a comparison joined with nothing")
    targets = list(target.items) if isinstance(target, Vector) else [target]
    options = (COMPARISONS.index(how), _JOINS[joins[0]] if joins else 0, int(negated))
    return Instruction("setp", kind, sources, targets, options=options)


@_form("cvt")
def _convert(s, parts):
    *modifiers, to, source = parts
    _known(modifiers, "ftz", "sat", "satfinite", *_ROUNDINGS)
    if "satfinite" in modifiers:
        raise _NotUnderstood("satfinite")
    rounding = [_ROUNDINGS[part] for part in modifiers if part in _ROUNDINGS]
    if to in ("bf16x2", "f16x2") and source != "f32":
        raise _NotUnderstood(f"from {source}")
    integral = any(part in ("rni", "rzi", "rmi", "rpi") for part in modifiers)
    default = 0 if to.startswith(("f", "b", "t")) else 1
    options = (int("ftz" in modifiers), rounding[0] if rounding else default, int("sat" in modifiers), int(integral))
    fields = _plain("cvt", s, to, options)
    fields.type2 = source
    return fields


def _space(parts: list[str]) -> tuple[int, str, int]:
    """(space, type, elements) of a load or store."""
    spaces = [part for part in parts if part in _SPACES]
    counts = [int(part[1:]) for part in parts if part in ("v2", "v4")]
    _known(parts[:-1], *_SPACES, "v2", "v4", *_HINTS)
    return _SPACES[spaces[0]] if spaces else 0, parts[-1], counts[0] if counts else 1


def _values(operand) -> list:
    return list(operand.items) if isinstance(operand, Vector) else [operand]


@_form("ld")
def _load(s, parts):
    target, address = s.operands[:2]
    if parts[0] == "param":
        if isinstance(address.base, Symbol) and not isinstance(target, Vector):
            return Instruction("mov", parts[-1], [address], [target])
        return Instruction("ld", parts[-1], [address.base], _values(target), options=(address.offset, PARAMETERS))
    space, kind, count = _space(parts)
    targets = _values(target)
    if len(targets) != count or len(s.operands) > 2:
        raise _NotUnderstood("operands")
    return Instruction("ld", kind, [address.base], targets, options=(address.offset, space))


@_form("st")
def _store(s, parts):
    address, value = s.operands[:2]
    space, kind, count = _space(parts)
    values = _values(value)
    if len(values) != count or len(s.operands) > 2:
        raise _NotUnderstood("operands")
    return Instruction("st", kind, [address.base, *values], [], options=(address.offset, space))


@_form("cp")
def _copy(s, parts):
    if parts[:2] == ["async", "commit_group"]:
        return Instruction("cp.async.commit", "u32", [], [])
    if parts[:2] == ["async", "wait_group"]:
        return Instruction("cp.async.wait", "u32", [], [], options=(s.operands[0].value,))
    if parts[:2] == ["async", "wait_all"]:
        return Instruction("cp.async.wait", "u32", [], [], options=(-1,))
    if parts[0] != "async" or parts[1] not in ("ca", "cg") or "bulk" in parts or parts[3] != "global":
        raise _NotUnderstood(s.opcode)
    to, source, size, *rest = s.operands
    return Instruction(
        "cp.async", "u32", [to.base, source.base, *rest], [], options=(to.offset, size.value, source.offset)
    )


@_form("bar", "barrier")
def _barrier(s, parts):
    if parts == ["warp", "sync"]:
        return Instruction("warp.sync", "u32", [], [])
    if parts not in (["sync"], ["sync", "aligned"], ["cta", "sync"], ["cta", "sync", "aligned"]) or s.operands != [
        Constant(0)
    ]:
        raise _NotUnderstood("a barrier other than that of the whole CTA")
    return Instruction("bar", "u32", [], [])


@_form("membar")
def _memory_barrier(s, parts):
    return Instruction("fence", "u32", [], [])


@_form("fence")
def _fence(s, parts):
    if parts[:2] == ["proxy", "async"]:
        return Instruction("fence.proxy.async", "u32", [], [])
    _known(parts, "acq_rel", "sc", "cta", "gpu")
    return Instruction("fence", "u32", [], [])


@_form("bra")
def _branch(s, parts):
    _known(parts, "uni")
    return Instruction("bra", "u32", [], [], options=(s.operands[0],))


@_form("ret", "exit")
def _return(s, parts):
    return Instruction("ret", "u32", [], [])


@_form("trap")
def _trap(s, parts):
    return Instruction("trap", "u32", [], [])


@_form("shfl")
def _shuffle(s, parts):
    sync, mode, kind = parts
    if sync != "sync" or kind != "b32":
        raise _NotUnderstood(s.opcode)
    target, *sources = s.operands
    return Instruction("shfl", "u32", sources, _values(target), options=(_SHUFFLES[mode],))


@_form("vote")
def _vote(s, parts):
    _sync, mode, _ = parts
    target, source, _members = s.operands
    negated = isinstance(source, tuple)
    return Instruction(
        "vote", "u32", [source[1] if negated else source], [target], options=(_VOTES[mode], int(negated))
    )


@_form("redux")
def _reduce(s, parts):
    _sync, how, kind = parts
    target, source, _members = s.operands
    return Instruction("redux", kind, [source], [target], options=(_REDUCTIONS[how],))


@_form("ldmatrix", "stmatrix")
def _matrices(s, parts):
    loads = s.opcode.startswith("ld")
    flags = _known(parts, "sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16")
    first, second = s.operands
    address, values = (second, _values(first)) if loads else (first, _values(second))
    if f"x{len(values)}" not in flags:
        raise _NotUnderstood("operands")
    options = (address.offset, int("trans" in flags))
    if loads:
        return Instruction("ldmatrix", "u32", [address.base], values, options=options)
    return Instruction("stmatrix", "u32", [address.base, *values], [], options=options)


@_form("mma")
def _mma(s, parts):
    _sync, _aligned, shape, row, column, out, a, b, add = parts
    if (row, column, out, add) != ("row", "col", "f32", "f32") or a != b:
        raise _NotUnderstood(s.opcode)
    k = {"m16n8k16": 16, "m16n8k8": 8}[shape]
    if a not in ("f16", "bf16", "tf32") or (a == "tf32" and k != 8):
        raise _NotUnderstood(s.opcode)
    d, *sources = s.operands
    return Instruction("mma", a, [v for operand in sources for v in _values(operand)], _values(d), options=(k,))


@_form("wgmma")
def _wgmma(s, parts):
    if parts[0] in ("fence", "commit_group", "wait_group"):
        handler = {"fence": "wgmma.fence", "commit_group": "wgmma.commit", "wait_group": "wgmma.wait"}[parts[0]]
        return Instruction(handler, "u32", [], [], options=(s.operands[0].value,) if parts[0] == "wait_group" else ())
    _async, _sync, _aligned, shape, out, a, b = parts
    if out != "f32" or a != b or a not in ("f16", "bf16", "tf32"):
        raise _NotUnderstood(s.opcode)
    n, k = (int(part) for part in shape.removeprefix("m64n").split("k"))
    if k * (4 if a == "tf32" else 2) != 32:
        raise _NotUnderstood(shape)
    d, first, second, adds, scale_a, scale_b, *transposed = s.operands
    from_registers = isinstance(first, Vector)
    if (scale_a.value, scale_b.value) != (1, 1):
        raise _NotUnderstood("a negated operand")
    flags = [flag.value for flag in transposed]
    a_transposed, b_transposed = (0, *flags)[-2:] if flags else (0, 0)
    accumulators = _values(d)
    if len(accumulators) != n // 2:
        raise _NotUnderstood("accumulators")
    sources = [*_values(first), second, *accumulators]
    constant = isinstance(adds, Constant)
    if not constant:
        sources.append(adds)
    options = (n, k, int(from_registers), a_transposed, b_transposed, int(adds.value != 0) if constant else -1)
    return Instruction("wgmma", a, sources, accumulators, options=options)


def label_of(instruction: Instruction, kernel: Kernel) -> int:
    """Index of the statement that a branch goes to."""
    target = instruction.options[0]
    if not isinstance(target, Symbol) or target.name not in kernel.labels:
        raise PtxError(f"a branch to {target}: no such label")
    return kernel.labels[target.name]
