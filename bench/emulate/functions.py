"""Constants and functions of a PTX module, beside its kernel.

Functions are inlined. The parameters of a call are registers here, one for each offset. The emulator has its own
`vprintf` and `__assertfail`.
"""

from __future__ import annotations

import dataclasses
import re

from .parse import Kernel, Memory, PtxError, Register, Statement, Symbol, Vector, body, read, size_of

_FUNCTION = re.compile(r"\.func\s*(?:\([^)]*\)\s*)?([\w$]+)\s*\(([^)]*)\)\s*(?:\.noreturn\s*)?(;|\{)", re.S)
_CONSTANT = re.compile(r"\.(?:global|const)\s+\.align\s+(\d+)\s+\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?(?:\s*=\s*([^;]*))?;")
_RETURNED = "func_retval0"
_DEPTH = 20  # of calls: more is taken for recursion
BUILT_IN = {"vprintf": 2, "__assertfail": 5}  # parameters


@dataclasses.dataclass
class Function:
    """A function's statements; `parameters` are the names of its parameters in order."""

    kernel: Kernel
    parameters: list[str]


def constants(text: str) -> tuple[dict[str, int], bytes]:
    """Return (offset by name, bytes) of a module's variables in global and constant memory."""
    offsets, raw = {}, bytearray()
    for align, kind, name, count, values in _CONSTANT.findall(text):
        size = int(kind[1:]) // 8
        raw += bytes(-len(raw) % int(align))
        offsets[name] = len(raw)
        numbers = [int(v, 0) for v in values.strip("{} \n").split(",")] if values else []
        total = int(count or len(numbers) or 1)
        for number in numbers + [0] * (total - len(numbers)):
            raw += (number & (2 ** (8 * size) - 1)).to_bytes(size, "little")
    return offsets, bytes(raw)


def functions(text: str, files: dict[int, str]) -> dict[str, Function]:
    """Return the functions that a module defines."""
    found, text = {}, re.sub(r"//.*", "", text)
    for match in _FUNCTION.finditer(text):
        name, parameters, end = match.groups()
        if end == "{":
            kernel = Kernel(name, [], [], {}, {}, {}, None)
            read(body(text[match.end() :]), files, kernel)
            names = re.findall(r"([\w$]+)(?:\[\d+\])?\s*(?:,|$)", parameters)
            found[name] = Function(kernel, names)
    return found


def linked(kernel: Kernel, defined: dict[str, Function]) -> None:
    """Inline every function at its calls, and replace the parameters of calls by registers."""
    linker = _Linker(kernel, defined)
    statements, labels = kernel.statements, dict(kernel.labels)
    if not any(s.opcode.startswith("call") for s in statements):
        return
    kernel.statements, kernel.labels = [], {}
    linker.append(statements, labels, "", 0)


class _Linker:
    def __init__(self, kernel: Kernel, defined: dict[str, Function]):
        self.kernel, self.defined, self.instances = kernel, defined, 0

    def append(self, statements: list[Statement], labels: dict[str, int], scope: str, depth: int) -> None:
        """Append statements. scope: suffix of the instance's own names, empty for the kernel's."""
        if depth > _DEPTH:
            raise PtxError("not emulated: a function that calls itself")
        by_place: dict[int, list[str]] = {}
        for label, at in labels.items():
            by_place.setdefault(at, []).append(label)
        for at, statement in enumerate(statements):
            self._label(by_place.get(at, ()), scope)
            self._statement(statement, scope, depth)
        self._label((label for place, names in by_place.items() if place >= len(statements) for label in names), scope)
        if scope:
            self.kernel.labels["end" + scope] = len(self.kernel.statements)

    def _label(self, names, scope: str) -> None:
        for name in names:
            self.kernel.labels[name + scope] = len(self.kernel.statements)

    def _statement(self, s: Statement, scope: str, depth: int) -> None:
        root, *parts = s.opcode.split(".")
        operands = [self._renamed(operand, scope) for operand in s.operands]
        predicate = s.predicate and (s.predicate + scope if scope else s.predicate)
        if root == "call":
            if predicate:
                raise PtxError(f"not emulated: a call under a predicate: {s.text[:80]}")
            return self._call(s, operands, scope, depth)
        if root in ("ld", "st") and parts[0] == "param" and self._of_call(operands[root == "ld"]):
            return self._moves(s, root == "ld", operands, parts, predicate, scope)
        if root == "ret" and scope:
            root, operands = "bra", [Symbol("end" + scope)]
        elif root == "bra" and scope:
            operands = [Symbol(operands[0].name + scope)]
        opcode = ".".join([root, *parts]) if root != "bra" or s.opcode.startswith("bra") else "bra"
        self._emit(s, opcode, operands, predicate)

    def _emit(self, s: Statement, opcode: str, operands: list, predicate=None) -> None:
        self.kernel.statements.append(Statement(opcode, operands, predicate, s.negate, s.line, s.text))

    def _of_call(self, address: Memory) -> bool:
        return isinstance(address.base, Symbol) and address.base.name not in dict(self.kernel.parameters)

    def _moves(self, s: Statement, loads: bool, operands: list, parts: list[str], predicate, scope: str) -> None:
        kind, address, value = (parts[-1], *reversed(operands)) if loads else (parts[-1], *operands)
        size = int(kind[1:]) // 8
        for k, one in enumerate(value.items if isinstance(value, Vector) else [value]):
            place = parameter(address.base.name, address.offset + k * size, kind, scope)
            self._emit(s, f"mov.{kind}", [one, place] if loads else [place, one], predicate)

    def _call(self, s: Statement, operands: list, scope: str, depth: int) -> None:
        returned, name, given = None, operands[0], []
        if isinstance(name, Vector):  # (retval0), name, (param0, ...)
            returned, name = name.items[0].name, operands[1]
        if isinstance(operands[-1], Vector) and len(operands) > 1:
            given = [operand.name for operand in operands[-1].items]
        if name.name in BUILT_IN:
            kinds = {"vprintf": ["b64"] * 2, "__assertfail": ["b64", "b64", "b32", "b64", "b64"]}[name.name]
            places = [parameter(one, 0, kind, scope) for one, kind in zip(given, kinds)]
            result = [parameter(returned, 0, "b32", scope)] if returned else []
            return self._emit(s, name.name.strip("_"), [*result, *places])
        function = self.defined.get(name.name)
        if function is None:
            raise PtxError(f"not emulated: a call of {name.name}")
        self.instances += 1
        inner = f"@{self.instances}"
        body_, caller = function.kernel, self.kernel
        caller.widths |= {key: value for key, value in body_.widths.items() if key not in caller.widths}
        for depot, (_, size) in body_.local.items():
            caller.local.setdefault(depot, (size_of(caller.local), size))
        reads = _parameters_of(body_.statements, "ld")
        for own, theirs in zip(function.parameters, given, strict=True):
            for offset, kind in sorted(reads.get(own, ())):
                target, source = parameter(own, offset, kind, inner), parameter(theirs, offset, kind, scope)
                self._emit(s, f"mov.{kind}", [target, source])
        self.append(body_.statements, body_.labels, inner, depth + 1)
        for offset, kind in sorted(_parameters_of(body_.statements, "st").get(_RETURNED, ())):
            if returned:
                target, source = parameter(returned, offset, kind, scope), parameter(_RETURNED, offset, kind, inner)
                self._emit(s, f"mov.{kind}", [target, source])

    def _renamed(self, operand, scope: str):
        if not scope:
            return operand
        if isinstance(operand, Register) and operand.name.startswith("%") and not _special(operand.name):
            return Register(operand.name + scope)
        if isinstance(operand, Memory):
            coordinates = tuple(self._renamed(one, scope) for one in operand.coordinates)
            return Memory(self._renamed(operand.base, scope), operand.offset, coordinates)
        if isinstance(operand, Vector):
            return Vector(tuple(self._renamed(one, scope) for one in operand.items))
        if isinstance(operand, tuple):
            return (operand[0], self._renamed(operand[1], scope))
        return operand


def parameter(name: str, offset: int, kind: str, scope: str) -> Register:
    """The register that stands for a part of a call's parameter."""
    return Register(f"%parameter.{kind} {name}+{offset}{scope}")


def _special(name: str) -> bool:
    return re.match(r"%(tid|ntid|ctaid|nctaid|laneid|warpid|smid|clock|globaltimer)", name) is not None


def _parameters_of(statements: list[Statement], which: str) -> dict[str, set[tuple[int, str]]]:
    """Return, by parameter, the (offset, type) of its loads and stores."""
    found: dict[str, set[tuple[int, str]]] = {}
    for s in statements:
        root, *parts = s.opcode.split(".")
        if root == which and parts[:1] == ["param"]:
            address, value = s.operands[which == "ld"], s.operands[which != "ld"]
            size = int(parts[-1][1:]) // 8
            count = len(value.items) if isinstance(value, Vector) else 1
            places = found.setdefault(address.base.name, set())
            places |= {(address.offset + k * size, parts[-1]) for k in range(count)}
    return found
