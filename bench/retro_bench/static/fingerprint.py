"""Hash of the sources of a Triton launch. Under one toolchain, equal hashes mean equal machine code.

Triton's own cache key also changes with a comment or a line number. This hash follows the syntax trees of the kernel
and of everything that it names, so `ab` compiles only the launches that an edit could have changed.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def of_launch(source, options) -> str:
    """`source`: a triton ASTSource; `options`: of its compilation. 16 hexadecimal digits."""
    named = options.__dict__ | {"extern_libs": sorted(dict(options.extern_libs or ()))}  # without a machine's paths
    parts = [_text(source.fn), sorted(source.signature.items()), source.attrs, sorted(named.items(), key=str)]
    parts += [(place, _text(value)) for place, value in sorted(source.constants.items(), key=str)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def of_files(folder: Path, suffixes: tuple[str, ...]) -> str:
    """Hash the files in `folder` with these suffixes: a CUDA C++ source and the headers next to it."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.suffix in suffixes):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _text(value: Any) -> str:
    if not _is_jit(value):
        return repr(value)
    return hashlib.sha256("\n".join(_reachable(value, set())).encode()).hexdigest()


def _is_jit(value: Any) -> bool:
    return hasattr(value, "parse") and hasattr(value, "fn")


def _reachable(function, seen: set[int]) -> Iterator[str]:
    """Yield the syntax tree of `function` and, depth first, of the functions and values that it names. Triton's own
    belong to the toolchain and are left out.
    """
    if id(function) in seen or function.fn.__module__.split(".")[0] == "triton":
        return
    seen.add(id(function))
    yield _dump(function)
    closure = inspect.getclosurevars(function.fn)
    for name in _names(function):
        value = closure.nonlocals.get(name.split(".")[0], function.fn.__globals__.get(name.split(".")[0]))
        for part in name.split(".")[1:]:
            value = getattr(value, part, None)
        if _is_jit(value):
            yield from _reachable(value, seen)
        elif value is not None and not isinstance(value, types.ModuleType):
            yield f"{name}={getattr(value, '__qualname__', None) or repr(value)}"


@functools.cache
def _dump(function) -> str:
    tree = function.parse()
    for node in ast.walk(tree):  # a docstring makes no code
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.dump(tree)


@functools.cache
def _names(function) -> tuple[str, ...]:
    """Return names `a` and `a.b` of the code, sorted."""
    names = set()
    for node in ast.walk(function.parse()):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names.add(f"{node.value.id}.{node.attr}")
    return tuple(sorted(names))
