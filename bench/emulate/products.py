"""Products of tensor cores before sm_100, and the loads and stores of their fragments."""

from __future__ import annotations

from .assemble import Instruction, NotUnderstood, form, known, values
from .parse import Constant, Vector


@form("ldmatrix", "stmatrix")
def _matrices(s, parts):
    loads = s.opcode.startswith("ld")
    flags = known(parts, "sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16")
    first, second = s.operands
    address, moved = (second, values(first)) if loads else (first, values(second))
    if f"x{len(moved)}" not in flags:
        raise NotUnderstood("operands")
    options = (address.offset, int("trans" in flags))
    if loads:
        return Instruction("ldmatrix", "u32", [address.base], moved, options=options)
    return Instruction("stmatrix", "u32", [address.base, *moved], [], options=options)


@form("mma")
def _mma(s, parts):
    _sync, _aligned, shape, row, column, out, a, b, add = parts
    if (row, column, out, add) != ("row", "col", "f32", "f32") or a != b:
        raise NotUnderstood(s.opcode)
    k = {"m16n8k16": 16, "m16n8k8": 8}[shape]
    if a not in ("f16", "bf16", "tf32") or (a == "tf32" and k != 8):
        raise NotUnderstood(s.opcode)
    d, *sources = s.operands
    return Instruction("mma", a, [v for operand in sources for v in values(operand)], values(d), options=(k,))


@form("wgmma")
def _wgmma(s, parts):
    if parts[0] in ("fence", "commit_group", "wait_group"):
        handler = {"fence": "wgmma.fence", "commit_group": "wgmma.commit", "wait_group": "wgmma.wait"}[parts[0]]
        return Instruction(handler, "u32", [], [], options=(s.operands[0].value,) if parts[0] == "wait_group" else ())
    _async, _sync, _aligned, shape, out, a, b = parts
    if out != "f32" or a != b or a not in ("f16", "bf16", "tf32"):
        raise NotUnderstood(s.opcode)
    n, k = (int(part) for part in shape.removeprefix("m64n").split("k"))
    if k * (4 if a == "tf32" else 2) != 32:
        raise NotUnderstood(shape)
    d, first, second, adds, scale_a, scale_b, *transposed = s.operands
    from_registers = isinstance(first, Vector)
    if (scale_a.value, scale_b.value) != (1, 1):
        raise NotUnderstood("a negated operand")
    flags = [flag.value for flag in transposed]
    a_transposed, b_transposed = (0, *flags)[-2:] if flags else (0, 0)
    accumulators = values(d)
    if len(accumulators) != n // 2:
        raise NotUnderstood("accumulators")
    sources = [*values(first), second, *accumulators]
    constant = isinstance(adds, Constant)
    if not constant:
        sources.append(adds)
    options = (n, k, int(from_registers), a_transposed, b_transposed, int(adds.value != 0) if constant else -1)
    return Instruction("wgmma", a, sources, accumulators, options=options)
