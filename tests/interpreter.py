"""Triton's interpreter without work of its own that changes no result: half of its time went into preparing the
language again at every call of a device function, a tenth into overflows of integers, which it finds and then ignores;
scans went element by element.
"""

import functools
import inspect

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def mend() -> None:
    """For every kernel interpreted in this process from now on."""
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = once_a_launch(interpreter._patch_lang)
    TritonSemantic.binary_op_sanitize_overflow_impl = where_asserted(TritonSemantic.binary_op_sanitize_overflow_impl)
    interpreter.ScanOps.generic_scan = scan


def once_a_launch(patch_lang):
    """What a launch replaces in the language stays so to its end; the functions that it calls replace nothing again."""
    patched = set()

    @functools.cache
    def languages(fn) -> frozenset[str]:
        modules = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
        return frozenset(module.__name__ for module in modules if module in (tl, tl.core))

    def patch(fn):
        seen = languages(fn)
        if seen in patched:
            return interpreter._LangPatchScope()
        outermost = not patched
        patched.add(seen)
        scope = patch_lang(fn)
        if outermost:
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        return scope

    return patch


def where_asserted(overflow):
    """`device_assert` does nothing but in debugging: neither does what it would be told."""

    def checked(self, lhs, rhs, operation) -> None:
        if self.builder.options.debug:
            overflow(self, lhs, rhs, operation)

    return checked


def scan(self, input: list) -> list:
    """Row after row: what combines two elements combines two rows, and each element sees the same operations in the
    same order.
    """
    rows = [np.moveaxis(arg.handle.data, self.axis, 0) for arg in input]
    found = [np.empty_like(row) for row in rows]
    for i in range(len(rows[0])):
        row = tuple(self.to_tensor(r[i], arg.dtype) for r, arg in zip(rows, input))
        if i > 0:
            before = tuple(self.to_tensor(f[i - 1], arg.dtype) for f, arg in zip(found, input))
            together = self.combine_fn.fn(*before, *row)
            row = together if isinstance(together, tuple) else (together,)
        for f, value in zip(found, row):
            f[i] = value.handle.data.reshape(f[i].shape)
    return [self.to_tensor(np.moveaxis(f, 0, self.axis), arg.dtype) for f, arg in zip(found, input)]
