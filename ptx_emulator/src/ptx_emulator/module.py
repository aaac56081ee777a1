"""A PTX module: its kernel, with the constants and functions that the kernel uses.

Functions are inlined. The parameters of a call are registers here, one for each offset. The emulator has its own
`vprintf` and `__assertfail`.
"""

from __future__ import annotations

import math
import re

from .parse import TYPE_BYTES, Kernel, Memory, PtxError, Register, Statement, Symbol, Vector, body, read, size_of

_FILE = re.compile(r'^\s*\.file\s+(\d+)\s.*"([^"\n]*)"', re.M)  # the last of its strings
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)[^,]*?(\w+)(?:\[(\d+)\])?\s*(?:,|$)")
_FUNCTION = re.compile(r"\.func\s*(?:\([^)]*\)\s*)?([\w$]+)\s*\(([^)]*)\)\s*(?:\.noreturn\s*)?(;|\{)", re.S)
_CONSTANT = re.compile(r"\.(?:global|const)\s+\.align\s+(\d+)\s+\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?(?:\s*=\s*([^;]*))?;")
_NAME = re.compile(r"([\w$]+)(?:\[\d+\])?\s*(?:,|$)")  # name of a parameter
_SPECIAL = re.compile(r"%(tid|ntid|ctaid|nctaid|laneid|warpid|smid|clock|globaltimer|n?cluster)")
_DIMENSIONS = r"\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?"
_RETURNED = "func_retval0"
_DEPTH = 20  # of calls: more is taken for recursion
#: types of the parameters
BUILT_IN = {"vprintf": ("b64", "b64"), "__assertfail": ("b64", "b64", "b32", "b64", "b64")}


def entries(text: str) -> list[str]:
    """Return the names of a module's kernels."""
    return re.findall(r"\.entry\s+(\w+)", text)


def kernel(text: str, name: str | None = None) -> Kernel:
    """Return an entry of a PTX module: the only one, or the one of that name."""
    files = {int(number): path.rsplit("/", 1)[-1] for number, path in _FILE.findall(text)}
    shared, size, names, found = {}, 0, {}, entries(text)
    if len(found) != 1 if name is None else name not in found:
        raise PtxError(f"expected a PTX module with one .entry{f' {name}' if name else ''}; got {found}")
    head = re.search(rf"\.entry\s+({name or found[0]})\s*\((.*?)\)(.*?)\n\{{", text, re.S)
    name, parameters, directives = head.groups()
    for declared in re.finditer(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+(\w+)(?:\[(\d*)\])?", text):
        align, label, length = int(declared[1]), declared[2], declared[3]
        if length:
            size = -(-size // align) * align
            shared[label] = (size, int(length))
            size += int(length)
        else:
            names[label] = align
    for label, align in names.items():  # the dynamic part begins where the static arrays end
        shared[label] = (-(-size // align) * align, 0)
    if ".blocksareclusters" in directives:
        raise PtxError(f"{name}: not emulated: a grid counted in clusters (.blocksareclusters)")
    threads, cluster = (re.search(rf"\.{one}{_DIMENSIONS}", directives) for one in ("reqntid", "reqnctapercluster"))
    sizes = [(label, TYPE_BYTES[kind] * int(count or 1)) for kind, label, count in _PARAMETER.findall(parameters)]
    parsed = Kernel(name, sizes, shared=shared)
    if threads:
        parsed.threads = math.prod(int(part or 1) for part in threads.groups())
    if cluster:
        parsed.cluster = tuple(int(part or 1) for part in cluster.groups())
    parsed.constants, parsed.constant_bytes = constants(text)
    read(body(text[head.end() :]), files, parsed)
    if any(s.opcode.startswith("call") for s in parsed.statements):
        _Linker(parsed, functions(text, files)).link()
    return parsed


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


def functions(text: str, files: dict[int, str]) -> dict[str, Kernel]:
    """Return the functions that a module defines. The bytes of their parameters stay 0."""
    found, text = {}, re.sub(r"//.*", "", text)
    for match in _FUNCTION.finditer(text):
        name, parameters, end = match.groups()
        if end == "{":
            kernel = Kernel(name, [(label, 0) for label in _NAME.findall(parameters)])
            read(body(text[match.end() :]), files, kernel)
            found[name] = kernel
    return found


class _Linker:
    """Inlines every function at its calls, and replaces the parameters of calls by registers."""

    def __init__(self, kernel: Kernel, defined: dict[str, Kernel]):
        self.kernel, self.defined, self.instances = kernel, defined, 0

    def link(self) -> None:
        statements, labels = self.kernel.statements, self.kernel.labels
        self.kernel.statements, self.kernel.labels = [], {}
        self.append(statements, labels, "", 0)

    def append(self, statements: list[Statement], labels: dict[str, int], scope: str, depth: int) -> None:
        """Append statements. scope: suffix of the instance's own names, empty for the kernel's."""
        if depth > _DEPTH:
            raise PtxError("not emulated: a function that calls itself")
        places = []  # index in the result of each statement
        for statement in statements:
            places.append(len(self.kernel.statements))
            self._statement(statement, scope, depth)
        places.append(len(self.kernel.statements))
        self.kernel.labels |= {label + scope: places[at] for label, at in labels.items()}
        if scope:
            self.kernel.labels["end" + scope] = places[-1]

    def _statement(self, s: Statement, scope: str, depth: int) -> None:
        opcode, (root, *parts) = s.opcode, s.opcode.split(".")
        operands = [self._renamed(operand, scope) for operand in s.operands]
        predicate = s.predicate and (s.predicate + scope if scope else s.predicate)
        if root == "call":
            if predicate:
                raise PtxError(f"not emulated: a call under a predicate: {s.text[:80]}")
            return self._call(s, operands, scope, depth)
        if root in ("ld", "st") and parts[0] == "param" and self._of_call(operands[root == "ld"]):
            return self._moves(s, root == "ld", operands, parts[-1], predicate, scope)
        if root == "ret" and scope:
            opcode, operands = "bra", [Symbol("end" + scope)]
        elif root == "bra" and scope:
            operands = [Symbol(operands[0].name + scope)]
        self._emit(s, opcode, operands, predicate)

    def _emit(self, s: Statement, opcode: str, operands: list, predicate=None) -> None:
        self.kernel.statements.append(Statement(opcode, operands, predicate, s.negate, s.line, s.text))

    def _of_call(self, address: Memory) -> bool:
        return isinstance(address.base, Symbol) and address.base.name not in dict(self.kernel.parameters)

    def _moves(self, s: Statement, loads: bool, operands: list, kind: str, predicate, scope: str) -> None:
        address, value = reversed(operands) if loads else operands
        for k, one in enumerate(value.items if isinstance(value, Vector) else [value]):
            place = parameter(address.base.name, address.offset + k * int(kind[1:]) // 8, kind, scope)
            self._emit(s, f"mov.{kind}", [one, place] if loads else [place, one], predicate)

    def _call(self, s: Statement, operands: list, scope: str, depth: int) -> None:
        returned, name, given = None, operands[0], []
        if isinstance(name, Vector):  # (retval0), name, (param0, ...)
            returned, name = name.items[0].name, operands[1]
        if isinstance(operands[-1], Vector) and len(operands) > 1:
            given = [operand.name for operand in operands[-1].items]
        if name.name in BUILT_IN:
            places = [parameter(one, 0, kind, scope) for one, kind in zip(given, BUILT_IN[name.name])]
            result = [parameter(returned, 0, "b32", scope)] if returned else []
            return self._emit(s, name.name.strip("_"), [*result, *places])
        function = self.defined.get(name.name)
        if function is None:
            raise PtxError(f"not emulated: a call of {name.name}")
        self.instances += 1
        inner = f"@{self.instances}"
        self.kernel.widths = function.widths | self.kernel.widths
        for depot, (_, size) in function.local.items():
            self.kernel.local.setdefault(depot, (size_of(self.kernel.local), size))

        def move(target: str, into: str, source: str, out_of: str, places) -> None:
            for offset, kind in sorted(places):
                moved = [parameter(target, offset, kind, into), parameter(source, offset, kind, out_of)]
                self._emit(s, f"mov.{kind}", moved)

        reads = _parameters_of(function.statements, "ld")
        for (own, _), theirs in zip(function.parameters, given, strict=True):
            move(own, inner, theirs, scope, reads.get(own, ()))
        self.append(function.statements, function.labels, inner, depth + 1)
        if returned:
            places = _parameters_of(function.statements, "st").get(_RETURNED, ())
            move(returned, scope, _RETURNED, inner, places)

    def _renamed(self, operand, scope: str):
        if not scope:
            return operand
        if isinstance(operand, Register) and operand.name.startswith("%") and not _SPECIAL.match(operand.name):
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
