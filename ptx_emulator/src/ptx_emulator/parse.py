"""Parse PTX text into instructions as written: opcode, predicate, operands and line of source."""

from __future__ import annotations

import dataclasses
import re

_LINE_COMMENT = re.compile(r"//.*")
#: a location, a brace of an inline block, a label, or a statement
_TOKEN = re.compile(r"\s*(?:\.loc\s+(\d+)\s+(\d+).*|([{}])|([$\w]+):(?!:)|([^;]*);)")
_STATEMENT = re.compile(r"^(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.S)
_OPERAND = re.compile(r"(?:\{[^}]*\}|\[[^\]]*\]|\([^)]*\)|[^,])+")
_REGISTERS = re.compile(r"^\.reg\s+\.(\w+)\s+(.*)$")
_INLINE = re.compile(r"// begin inline asm.*?// end inline asm", re.S)
_LOCATION = re.compile(r"^\s*\.loc\s.*$", re.M)
_TARGETS = re.compile(r"^\.branchtargets\s(.*)$", re.S)
_LOCAL = re.compile(r"^\.local\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d+)\]$")
TYPE_BYTES = {f"{letter}{bits}": bits // 8 for bits in (8, 16, 32, 64) for letter in "busf"[: 3 + (bits > 8)]}
TYPE_BYTES["pred"] = 1


class PtxError(Exception):
    """Error: the emulator does not know the text or an instruction in it."""


@dataclasses.dataclass(frozen=True)
class Register:
    name: str


@dataclasses.dataclass(frozen=True)
class Constant:
    """An immediate; of a float literal its bits."""

    value: int


@dataclasses.dataclass(frozen=True)
class Decimal:
    """Float written in decimal, as in inline assembly. Its bits depend on the instruction's type."""

    value: float


@dataclasses.dataclass(frozen=True)
class Symbol:
    """A parameter, a shared array or a label."""

    name: str
    offset: int = 0


@dataclasses.dataclass(frozen=True)
class Memory:
    base: Register | Symbol | Constant
    offset: int = 0
    coordinates: tuple = ()  # coordinates in a tensor map


@dataclasses.dataclass(frozen=True)
class Vector:
    items: tuple


@dataclasses.dataclass
class Statement:
    opcode: str
    operands: list
    predicate: str | None
    negate: bool
    line: str  # file:line of the source
    text: str


@dataclasses.dataclass
class Kernel:
    name: str
    parameters: list[tuple[str, int]]  # name, bytes
    statements: list[Statement] = dataclasses.field(default_factory=list)
    labels: dict[str, int] = dataclasses.field(default_factory=dict)
    targets: dict[str, list[str]] = dataclasses.field(default_factory=dict)  # of brx.idx, by the label of the list
    widths: dict[str, int] = dataclasses.field(default_factory=dict)  # bytes of registers, by the prefix of their names
    shared: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)  # static arrays: offset, bytes
    threads: int | None = None  # .reqntid
    cluster: tuple[int, ...] = (1, 1, 1)  # .reqnctapercluster: CTAs along each dimension
    constants: dict[str, int] = dataclasses.field(default_factory=dict)  # offset of each in constant_bytes
    constant_bytes: bytes = b""
    local: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)  # a thread's memory: offset, bytes


def size_of(space: dict[str, tuple[int, int]]) -> int:
    """Return the end of the last variable: each is (offset, bytes)."""
    return max((offset + size for offset, size in space.values()), default=0)


def body(text: str) -> str:
    """Return `text`, without comments, up to the brace that closes the block it begins in.

    LLVM counts the lines of an inline block on from the line of its source, so the locations inside are left out.
    """
    text = _INLINE.sub(lambda block: _LOCATION.sub("", block[0]), text)
    text, depth = _LINE_COMMENT.sub("", text), 1
    for brace in re.finditer(r"[{}]", text):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[: brace.start()]
    raise PtxError("a kernel without end")


def read(code: str, files: dict[int, str], kernel: Kernel) -> None:
    line, blocks, at = "?", [], 0  # blocks: (first statement, labels) of each open inline block
    while token := _TOKEN.match(code, at):
        file, number, brace, label, statement = token.groups()
        if file:
            line = f"{files.get(int(file), '?')}:{number}"
        elif brace == "{":
            blocks.append((len(kernel.statements), {}))
        elif brace:
            _close(kernel, *blocks.pop())
        elif label:
            (blocks[-1][1] if blocks else kernel.labels)[label] = len(kernel.statements)
        elif statement:
            _statement(" ".join(statement.split()), line, kernel)
        at = token.end()
    if rest := code[at:].strip():
        raise PtxError(f"statement without end: {rest[:80]}")


def _close(kernel: Kernel, first: int, labels: dict[str, int]) -> None:
    """End an inline block. Its labels are its own, because other blocks have the same."""
    for statement in kernel.statements[first:]:
        (target, *_) = statement.operands or [None]
        if statement.opcode.startswith("bra") and isinstance(target, Symbol) and target.name in labels:
            statement.operands = [Symbol(f"{target.name} of {first}")]
    kernel.labels.update({f"{name} of {first}": at for name, at in labels.items()})


def _statement(text: str, line: str, kernel: Kernel) -> None:
    registers = _REGISTERS.match(text)
    if registers:
        for name in registers[2].split(","):
            match = re.match(r"^\s*(%?\w+)(?:<\d+>)?\s*$", name)
            if match is None or registers[1] not in TYPE_BYTES:
                raise PtxError(f"declaration of registers not emulated: {text}")
            kernel.widths[match[1]] = TYPE_BYTES[registers[1]]
        return
    local = _LOCAL.match(text)
    if local:
        align, name, size = int(local[1]), local[2], int(local[3])
        kernel.local[name] = (-(-size_of(kernel.local) // align) * align, size)
        return
    if listed := _TARGETS.match(text):
        kernel.targets[next(reversed(kernel.labels))] = _split(listed[1])
        return
    if text.startswith("."):
        if text.startswith((".pragma", ".shared", ".param")):
            return
        raise PtxError(f"directive not understood: {text[:80]}")
    match = _STATEMENT.match(text)
    if match is None:
        raise PtxError(f"statement not understood: {text[:80]}")
    negate, predicate, opcode, rest = match.groups()
    operands = [_declared(_operand(part), kernel) for part in _split(rest)]
    if opcode.startswith("brx.idx"):  # a comparison and a branch for each target
        if predicate:
            raise PtxError(f"not emulated: brx.idx under a predicate: {text[:80]}")
        kernel.widths["%brx"] = TYPE_BYTES["pred"]
        for number, target in enumerate(kernel.targets[operands[1].name]):
            compared = [Register("%brx"), operands[0], Constant(number)]
            kernel.statements.append(Statement("setp.eq.u32", compared, None, False, line, text))
            kernel.statements.append(Statement("bra", [Symbol(target)], "%brx", False, line, text))
        return kernel.statements.append(Statement("trap", [], None, False, line, text))
    kernel.statements.append(Statement(opcode, operands, predicate, negate == "!", line, text))


def _declared(operand, kernel: Kernel):
    """Inline blocks have registers without a percent sign."""
    if isinstance(operand, Symbol) and {operand.name, operand.name.rstrip("0123456789")} & kernel.widths.keys():
        return Register(operand.name)
    if isinstance(operand, Vector):
        return Vector(tuple(_declared(one, kernel) for one in operand.items))
    return operand


def _split(text: str) -> list[str]:
    """Split operands at commas outside brackets. `a|b` is one operand."""
    return [part.strip() for part in _OPERAND.findall(text) if part.strip()]


def _operand(text: str):
    if text.startswith(("(", "{")):  # "(": of a call
        return Vector(tuple(_operand(part) for part in _split(text[1:-1])))
    if text.startswith("["):
        return _memory(text[1:-1].strip())
    if "|" in text:
        return Vector(tuple(_operand(part.strip()) for part in text.split("|")))
    if text.startswith("!"):
        return ("not", _operand(text[1:]))
    number = _number(text)
    if number is not None:
        return Constant(number)
    if re.match(r"^-?\d+(\.\d*([eE][+-]?\d+)?|[eE][+-]?\d+)$", text):
        return Decimal(float(text))
    if text.startswith("%") or text == "_":
        return Register(text)
    sum_ = re.match(r"^([\w$]+)\s*\+\s*(\d+)$", text)
    return Symbol(sum_[1], int(sum_[2])) if sum_ else Symbol(text)


def _memory(text: str) -> Memory:
    text, *coordinates = _split(text)
    if coordinates:
        (vector,) = (_operand(part) for part in coordinates)
        place = _memory(text)
        return Memory(place.base, place.offset, vector.items)
    match = re.match(r"^(\S+?)\s*(?:([+-])\s*(-?\w+))?$", text)
    offset = _number(match[3] or "0") if match else None
    if offset is None:
        raise PtxError(f"address not understood: [{text}]")
    return Memory(_operand(match[1]), -offset if match[2] == "-" else offset)


def _number(text: str) -> int | None:
    if re.match(r"^0([fF][0-9a-fA-F]{8}|[dD][0-9a-fA-F]{16})$", text):
        return int(text[2:], 16)
    match = re.match(r"^(-?)(0[xX][0-9a-fA-F]+|\d+)U?$", text)
    if match is None:
        return None
    value = int(match[2], 8 if re.match(r"0\d", match[2]) else 0)
    return -value if match[1] else value
