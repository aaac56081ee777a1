"""Make every fault of a source by a small set of operators: comparisons, arithmetic, conditions, small numbers.

Others break caches and files: parts of a key, bounds of ranges, missing statements, writes before a sync.
"""

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Fault:
    """Replacement of the text `before`, which begins in `line` (the first is 1), by `after`."""

    line: int
    before: str
    after: str
    rare: bool = field(default=False, compare=False)  # few sources have one: a key's part, a range's end, a sync

    def apply(self, source: str) -> str:
        """Return the source with the fault. Raises ValueError if the lines are not `before`."""
        lines = source.split("\n")
        planted = slice(self.line - 1, self.line + self.before.count("\n"))
        if (found := "\n".join(lines[planted])) != self.before:
            raise ValueError(f"line {self.line}: expected {self.before!r}; got {found!r}")
        lines[planted] = self.after.split("\n")
        return "\n".join(lines)

    @property
    def text(self) -> str:
        before, after = ("; ".join(map(str.strip, text.split("\n"))) for text in (self.before, self.after))
        return f"{before} -> {after}"


#: line, first byte, last byte, old, new
Edit = tuple[int, int, int, str, str]


def _either(*pairs: tuple[str, str]) -> dict[str, str]:
    """Map each of a pair to the other."""
    return {a: b for pair in pairs for a, b in (pair, pair[::-1])}


COMPARISONS = _either(("<", "<="), (">", ">="), ("==", "!="), ("is", "is not"), ("in", "not in"))
ARITHMETIC = {"+": "-", "-": "+", "*": "+", "//": "*", "/": "*", "%": "*"}
LOGIC = _either(("and", "or"))
GREATEST_NUMBER = 9  # larger constants are mostly sizes and bounds
#: names of cache keys, whose parts are dropped one at a time
KEY = re.compile(r"(^|_)(key|parts)$")
#: calls that order writes; the next statement is moved before the call
SYNC = re.compile(r"\b(\w*sync\w*|flush|barrier)\(")
#: nodes whose faults change no result
SILENT = (ast.Raise, ast.Assert, ast.JoinedStr, ast.ImportFrom, ast.Import)


def python(source: str) -> list[Fault]:
    """Return the faults inside functions, without those in messages and annotations."""
    lines, faults = source.split("\n"), {}
    for node in _live(ast.parse(source)):
        for line, start, end, old, new in _edits(node, lines):
            text = lines[line - 1].encode()
            before, inside, after = (part.decode() for part in (text[:start], text[start:end], text[end:]))
            if inside.count(old) == 1:
                rare = isinstance(node, (ast.Assign, ast.AnnAssign, ast.Call))
                fault = Fault(line, lines[line - 1], before + inside.replace(old, new) + after, rare)
                if _compiles(fault.apply(source)):
                    faults[fault] = None
    for node in ast.walk(ast.parse(source)):
        faults |= dict.fromkeys(_before_a_sync(node, lines))
    return sorted(faults, key=lambda f: (f.line, f.after))


def _compiles(source: str) -> bool:
    try:
        compile(source, "fault", "exec")
    except SyntaxError:
        return False
    return True


def _live(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes of function bodies, without messages and annotations."""
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    left: list[ast.AST] = [statement for function in functions for statement in function.body]
    seen: set[int] = set()
    while left:
        node = left.pop()
        if isinstance(node, SILENT) or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        left += [value for name, value in _children(node) if name not in ("annotation", "returns", "decorator_list")]


def _children(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for name, value in ast.iter_fields(node):
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, ast.AST):
                yield name, inner


def _edits(node: ast.AST, lines: list[str]) -> Iterator[Edit]:
    """Yield the edits of a node that stands on one line."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        for left, right in itertools.pairwise(sides):
            yield from _between(left, right, lines, COMPARISONS)
    elif isinstance(node, ast.BinOp):
        yield from _between(node.left, node.right, lines, ARITHMETIC)
    elif isinstance(node, ast.BoolOp):
        for left, right in itertools.pairwise(node.values):
            yield from _between(left, right, lines, LOGIC)
        yield from _dropped(node.values, lines)
    elif isinstance(node, (ast.Assign, ast.AnnAssign)) and _is_key(node):
        for part in ast.walk(node.value):
            if isinstance(part, (ast.Tuple, ast.List)):
                yield from _dropped(part.elts, lines, "," if isinstance(part, ast.Tuple) else "")
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.lineno == node.end_lineno:
        call = lines[node.lineno - 1].encode()[node.col_offset : node.end_col_offset].decode()
        yield node.lineno, node.col_offset, node.end_col_offset, call, "pass"
    elif isinstance(node, ast.Call) and getattr(node.func, "id", None) == "range" and node.lineno == node.end_lineno:
        stop = node.args[0] if len(node.args) == 1 else node.args[1]
        text = lines[stop.lineno - 1].encode()[stop.col_offset : stop.end_col_offset].decode()
        yield stop.lineno, stop.col_offset, stop.end_col_offset, text, f"{text} + 1"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.lineno, node.col_offset, node.operand.col_offset, "not ", ""
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node.lineno, node.col_offset, node.end_col_offset, str(node.value), str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int) and 0 <= node.value <= GREATEST_NUMBER:
        yield node.lineno, node.col_offset, node.end_col_offset, str(node.value), str(node.value + 1)


def _is_key(node: ast.Assign | ast.AnnAssign) -> bool:
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    name = getattr(target, "id", getattr(target, "attr", ""))
    return isinstance(node.value, (ast.Tuple, ast.List)) and bool(KEY.search(name))


def _dropped(parts: list[ast.expr], lines: list[str], alone: str = "") -> Iterator[Edit]:
    """Yield edits that leave out each of two or more parts. alone: text behind a part left alone, as in a tuple."""
    for i, part in enumerate(parts if len(parts) > 1 else []):
        first, last = (part, parts[i + 1]) if i + 1 < len(parts) else (parts[i - 1], part)
        if first.lineno != last.end_lineno:
            continue
        line = lines[part.lineno - 1].encode()
        if len(parts) == 2:
            kept = parts[1 - i]
            start, end = first.col_offset, last.end_col_offset
            left = line[kept.col_offset : kept.end_col_offset].decode() + alone
        elif i + 1 < len(parts):
            start, end, left = first.col_offset, last.col_offset, ""
        else:
            start, end, left = first.end_col_offset, last.end_col_offset, ""
        text = line[start:end].decode()
        if text.count("(") == text.count(")"):
            yield part.lineno, start, end, text, left


def _before_a_sync(node: ast.AST, lines: list[str]) -> Iterator[Fault]:
    """Yield faults that move the statement after a sync before it."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        for sync, then in itertools.pairwise(block if isinstance(block, list) else []):
            one, two = sync.lineno - 1, then.lineno - 1
            single = sync.end_lineno == sync.lineno and then.end_lineno == then.lineno == sync.lineno + 1
            if single and SYNC.search(lines[one]) and not isinstance(then, (ast.Return, ast.Raise)):
                yield Fault(sync.lineno, f"{lines[one]}\n{lines[two]}", f"{lines[two]}\n{lines[one]}", True)


def _between(left: ast.expr, right: ast.expr, lines: list[str], table: dict[str, str]) -> Iterator[Edit]:
    if left.end_lineno != right.lineno:
        return
    between = lines[right.lineno - 1].encode()[left.end_col_offset : right.col_offset].decode()
    old = between.strip(" ()")
    if old in table:
        yield right.lineno, left.end_col_offset, right.col_offset, old, table[old]


CPP = _either((" < ", " <= "), (" > ", " >= "), (" == ", " != "), (" && ", " || "), (" + ", " - "))
CPP |= _either(("std::min(", "std::max("), ("true", "false"))
CPP |= {" * ": " + ", " / ": " * ", " % ": " * ", " += ": " -= ", " = 0;": " = 1;"}
#: statements that clear memory, which are left out
CLEARING = re.compile(r"(?<![\w.>:])(clear|std::fill_n|std::memset)\((?:[^();]|\([^();]*\))*\)(?=[,;])")
#: lines that compute nothing, or whose faults would not compile or only move work among threads
NO_CODE = re.compile(
    r"^\s*(#|//|/?\*|template|static_assert|using |namespace |struct |class |throw|case "
    r"|RETRO_CHECK)|prefetch|assert\(|constexpr"
)


def cpp(source: str) -> list[Fault]:
    """Return the faults in lines of code. Spaces around an operator tell it from a template's bracket."""
    faults = {}
    for number, line in enumerate(source.split("\n"), 1):
        code = line.split("//")[0]
        if NO_CODE.search(code) or '"' in code:
            continue
        for old, new in CPP.items():
            for found in re.finditer(re.escape(old), code):
                faults[Fault(number, line, line[: found.start()] + new + line[found.end() :])] = None
        for cleared in CLEARING.finditer(code):
            faults[Fault(number, line, line[: cleared.start()] + "(void)0" + line[cleared.end() :])] = None
    return sorted(faults, key=lambda f: (f.line, f.after))


def of(path: str, source: str) -> list[Fault]:
    return python(source) if path.endswith(".py") else cpp(source)
