"""Products of tensor cores before sm_100, and the loads and stores of their fragments."""

from __future__ import annotations

from .assemble import Instruction, NotUnderstood, form, known, values
from .parse import Vector


@form("ldmatrix", "stmatrix")
def _matrices(s, parts):
    loads = s.opcode.startswith("ld")
    flags = known(parts, "sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16")
    first, second = s.operands
    address, loaded, stored = (second, values(first), []) if loads else (first, [], values(second))
    if f"x{len(loaded + stored)}" not in flags:
        raise NotUnderstood("operands")
    options = (address.offset, int("trans" in flags))
    return Instruction("matrix rows", "u32", [address.base, *stored], loaded, options=options)


#: operands of products: bytes, and the accumulators that they may have
_OPERANDS = {
    "f16": (2, ("f32", "f16")),
    "bf16": (2, ("f32",)),
    "tf32": (4, ("f32",)),
    **dict.fromkeys(("e4m3", "e5m2"), (1, ("f32", "f16"))),
    **dict.fromkeys(("s8", "u8"), (1, ("s32",))),
}


def _check(s, a: str, b: str, out: str) -> None:
    """Check that a product of these types exists. Two eight-bit floats, or integers, may differ."""
    size, outs = _OPERANDS.get(a, (0, ()))
    same = _OPERANDS.get(b) == (size, outs) if size == 1 else a == b
    if not same or out not in outs:
        raise NotUnderstood(s.opcode)


@form("mma")
def _mma(s, parts):
    saturates = "satfinite" in parts
    _sync, _aligned, shape, row, column, out, a, b, add = (part for part in parts if part != "satfinite")
    _check(s, a, b, out)
    if (row, column, add) != ("row", "col", out):
        raise NotUnderstood(s.opcode)
    k, size = int(shape.removeprefix("m16n8k")), _OPERANDS[a][0]
    if k * size not in (16, 32):
        raise NotUnderstood(shape)
    d, *sources = s.operands
    sources = [v for operand in sources for v in values(operand)]
    options = (k, b, int(saturates))
    if len(sources) != k * size // 8 + k * size // 16 + len(values(d)):
        raise NotUnderstood("operands")
    return Instruction("mma", a, sources, values(d), type2=out, options=options)


@form("wgmma")
def _wgmma(s, parts):
    if parts[0] in ("fence", "commit_group"):
        return Instruction(f"wgmma.{parts[0].removesuffix('_group')}")
    if parts[0] == "wait_group":
        return Instruction("wgmma.wait", options=(s.operands[0].value,))
    saturates = "satfinite" in parts
    _async, _sync, _aligned, shape, out, a, b = (part for part in parts if part != "satfinite")
    _check(s, a, b, out)
    n, k = (int(part) for part in shape.removeprefix("m64n").split("k"))
    if k * _OPERANDS[a][0] != 32:
        raise NotUnderstood(shape)
    d, first, second, adds, *rest = s.operands
    from_registers = isinstance(first, Vector)
    scales, transposed = ([], rest) if out == "s32" else (rest[:2], rest[2:])
    if any(scale.value != 1 for scale in scales):
        raise NotUnderstood("a negated operand")
    flags = [flag.value for flag in transposed]
    a_transposed, b_transposed = (0, *flags)[-2:] if flags else (0, 0)
    accumulators = values(d)
    if len(accumulators) != (n // 4 if out == "f16" else n // 2):
        raise NotUnderstood("accumulators")
    sources = [*values(first), second, *accumulators, adds]
    options = (n, k, int(from_registers), a_transposed, b_transposed, b, int(saturates))
    return Instruction("wgmma", a, sources, accumulators, type2=out, options=options)
