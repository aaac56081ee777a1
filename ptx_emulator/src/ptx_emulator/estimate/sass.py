"""Machine code of a cubin: its opcodes, the hot loop, and a lower bound of that loop in cycles. Needs no GPU."""

from __future__ import annotations

import collections
import hashlib
import itertools
import math
import re
from dataclasses import dataclass

from .. import machines

TENSOR = ("HMMA", "IMMA", "BMMA", "DMMA", "HGMMA", "QGMMA", "IGMMA", "UTCHMMA", "UTCQMMA", "UTCIMMA")
ASYNC_COPY = ("LDGSTS", "UBLKCP", "UTMALDG", "UTMASTG")
STORE = ("ST", "RED", "ATOM", "UTMASTG", "UBLKCP")
LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P[T0-9]+\s+)?([A-Z0-9_]+(?:\.[A-Za-z0-9_]+)*)\s*([^;]*);")


@dataclass(frozen=True)
class Instruction:
    address: int
    opcode: str  # with its modifiers
    operands: str

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]


def functions(text: str) -> dict[str, list[Instruction]]:
    """Return the instructions of every function, padding left out."""
    listings: dict[str, list[Instruction]] = {}
    current = None
    for line in text.splitlines():
        if "Function :" in line:
            current = listings.setdefault(line.split(":", 1)[1].strip(), [])
        elif current is not None and (match := LINE.search(line)) and match[2] != "NOP":
            current.append(Instruction(int(match[1], 16), match[2], match[3].strip()))
    return listings


def hot_loop(code: list[Instruction]) -> list[Instruction]:
    """Return the loop that matters, empty without loops.

    It is the innermost loop with the most tensor instructions. If only outer loops have some, it is the shortest of the
    loops with the most. If no loop has any, it is the longest innermost loop.
    """
    loops, innermost = _loops(code)
    with_products = [loop for loop in loops if _tensors(loop)]
    if with_products and not any(map(_tensors, innermost)):
        return max(with_products, key=lambda loop: (_tensors(loop), -len(loop)))
    return max(innermost, key=lambda loop: (_tensors(loop), len(loop)), default=[])


def copies_in_flight(code: list[Instruction]) -> int | None:
    """Fewest groups of asynchronous copies that an innermost loop leaves in flight where it waits. 0: a loop waits for
    all its copies. None: no loop issues copies and waits.
    """
    waits = [
        int(match[1], 16)
        for loop in _loops(code)[1]
        if any(i.name in ASYNC_COPY for i in loop)
        for i in loop
        if i.name == "DEPBAR" and (match := re.search(r"0x([0-9a-f]+)", i.operands))
    ]
    return min(waits, default=None)


def _loops(code: list[Instruction]) -> tuple[list[list[Instruction]], list[list[Instruction]]]:
    """Return the instructions of every loop, and of the innermost loops."""
    spans = []  # first and last address
    for instruction in code:
        target = re.search(r"0x([0-9a-f]+)", instruction.operands) if instruction.name == "BRA" else None
        if target and int(target[1], 16) < instruction.address:
            spans.append((int(target[1], 16), instruction.address))
    loops = [[i for i in code if first <= i.address <= last] for first, last in spans]
    inner = [not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans) for s in spans]
    return loops, list(itertools.compress(loops, inner))


def _tensors(code: list[Instruction]) -> int:
    return sum(i.name in TENSOR for i in code)


def writes(code: list[Instruction]) -> bool:
    """Whether a kernel stores anything. One whose body was compiled out for this architecture does not."""
    return any(i.name.startswith(STORE) for i in code)


def summarise(code: list[Instruction], warps: int | None, arch: int) -> dict:
    """Summarise a kernel for comparing two builds. Issue slots count every warp of a block; None where unknown."""
    loop = hot_loop(code)
    counts = collections.Counter(i.name for i in loop)
    names = collections.Counter(i.name for i in code)
    return {
        "instructions": len(code),
        "opcode_hash": hashlib.sha256("\n".join(i.opcode for i in code).encode()).hexdigest()[:16],
        "tensor_instructions": sum(names[name] for name in TENSOR),
        "async_copies": sum(names[name] for name in ASYNC_COPY),
        "copies_in_flight": copies_in_flight(code),
        "loop_opcodes": dict(sorted(counts.items())),
        "loop_issue_slots": len(loop) * warps if loop and warps else None,
        "loop_tensor_instructions": sum(counts[name] for name in TENSOR) if loop else None,
        "loop_cycles_at_least": cycles(loop, warps, arch) if loop and warps else None,
    }


def cycles(loop: list[Instruction], warps: int, arch: int) -> float:
    """Lower bound of one pass of all warps of one block: issue by 4 schedulers, or tensor cores."""
    issue = len(loop) * warps / machines.SCHEDULERS
    tensor = sum(_tensor_flops(i.opcode) for i in loop) * warps / machines.device(arch).tensor_flops
    return max(issue, tensor)


def _tensor_flops(opcode: str) -> float:
    """FLOPs a warp at the half-type rate. TF32 products run at half of it, so they count double. Unknown opcodes: 0."""
    name, double = opcode.split(".")[0], 2 if "TF32" in opcode else 1
    if name == "HMMA" and (shape := re.search(r"\.168(16|8|4)\b", opcode)):
        return double * 2.0 * 16 * 8 * int(shape[1])
    if name == "HGMMA" and (shape := re.search(r"\.(\d+)x(\d+)x(\d+)", opcode)):
        return double * 2.0 * math.prod(map(int, shape.groups())) / 4  # issued by each of a group's four warps
    return 0.0


def own_shared(reported: int, arch: int) -> int:
    """Static shared bytes of the kernel itself. From sm_90 on cuobjdump adds the system's to a kernel that has some."""
    system = machines.RESERVED_SHARED_BYTES
    return reported - system if arch >= 90 and reported >= system else reported


def blocks_per_sm(registers: int, shared: int, warps: int, arch: int) -> int:
    """CTAs that fit on one SM at once."""
    shared_bytes, blocks, threads = machines.LIMITS[arch]
    per_warp = -(-registers // machines.REGISTER_GRAIN) * machines.REGISTER_GRAIN * machines.LANES
    per_warp = -(-per_warp // machines.WARP_REGISTER_GRAIN) * machines.WARP_REGISTER_GRAIN
    by_registers = machines.REGISTERS // (max(per_warp, 1) * warps)
    by_shared = (shared_bytes + machines.RESERVED_SHARED_BYTES) // (shared + machines.RESERVED_SHARED_BYTES)
    return min(by_registers, by_shared, threads // machines.LANES // warps, blocks)
