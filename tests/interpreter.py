"""Triton's interpreter with checked bounds, and without redundant work.

A load or store outside the storage of every argument of the launch raises an error instead of corrupting the heap. The
original interpreter patches the language again at every call of a device function, constructs the type and shape of
every value anew, checks integers for overflow and ignores the result, and scans element by element.
"""

import functools
import inspect

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def mend() -> None:
    """Patch the interpreter for the rest of this process."""
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = once_a_launch(interpreter._patch_lang)
    TritonSemantic.binary_op_sanitize_overflow_impl = where_asserted(TritonSemantic.binary_op_sanitize_overflow_impl)
    interpreter.ScanOps.generic_scan = scan
    interpreter.GridExecutor._init_args_hst = noted(interpreter.GridExecutor._init_args_hst)
    builder = interpreter.InterpreterBuilder
    builder.create_masked_load = in_bounds(builder.create_masked_load, 0)
    builder.create_masked_store = in_bounds(builder.create_masked_store, 1)
    tl.block_type.__new__, tl.block_type.__init__ = block_types(tl.block_type.__init__)
    tl.tensor.__init__ = by_type(tl.tensor.__init__)
    TritonSemantic.broadcast_impl_value = where_shapes_differ(TritonSemantic.broadcast_impl_value)
    TritonSemantic.computation_type_impl = functools.cache(TritonSemantic.computation_type_impl)
    interpreter._get_np_dtype = once_a_type(interpreter._get_np_dtype)


#: (first byte, past the last) of the running launch's arguments
_STORAGES: list[tuple[int, int]] = []


def noted(copy_arguments):
    def copied(self, args_dev, kwargs):
        args, kwargs = copy_arguments(self, args_dev, kwargs)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        storages = [tensor.untyped_storage() for tensor in tensors]
        _STORAGES[:] = {(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages}
        return args, kwargs

    return copied


def in_bounds(access, mask_at: int):
    """Check that a block of pointers stays within one tensor: its first and last byte lie in one storage. mask_at:
    index of the mask operand.
    """

    def checked(self, ptrs, *operands):
        at = ptrs.data[np.broadcast_to(operands[mask_at].data.astype(bool), ptrs.data.shape)]
        if at.size:
            first, end = int(at.min()), int(at.max()) + max(ptrs.get_element_ty().primitive_bitwidth // 8, 1)
            if not any(lo <= first and end <= hi for lo, hi in _STORAGES):
                raise IndexError(f"{access.__name__}: bytes {first} to {end} lie in no argument of the launch")
        return access(self, ptrs, *operands)

    return checked


def once_a_launch(patch_lang):
    """Patch the language once per launch instead of at every call of a device function."""
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
    """Skip the arguments of `device_assert` unless debugging."""

    def checked(self, lhs, rhs, operation) -> None:
        if self.builder.options.debug:
            overflow(self, lhs, rhs, operation)

    return checked


def block_types(init):
    """Return `__new__` and `__init__` of a block type that is constructed once per element type and shape."""
    made = {}

    def new(cls, element_ty, shape):
        key = id(element_ty), tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
        found = made.get(key)
        if found is None:
            found = object.__new__(cls)
            init(found, element_ty, shape)
            made[key] = found  # keeps the element type alive, so that its id stays unique
        return found

    return new, lambda self, element_ty, shape: None


def by_type(init):
    """Derive a value's shape, size and scalar type from its type."""

    def of_type(self, handle, type) -> None:
        if "_of_values" not in type.__dict__:
            init(self, handle, type)
            type._of_values = {name: value for name, value in self.__dict__.items() if name != "handle"}
        self.__dict__.update(type._of_values)
        self.handle = handle

    return of_type


def where_shapes_differ(broadcast):
    def broadcasted(self, lhs, rhs):
        shapes = [list(value.type.shape) for value in (lhs, rhs) if value.type.is_block()]
        if len(shapes) == 2 and shapes[0] == shapes[1]:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return broadcasted


def once_a_type(np_dtype):
    def found(type):
        if "_in_numpy" not in type.__dict__:
            type._in_numpy = np_dtype(type)
        return type._in_numpy

    return found


def scan(self, input: list) -> list:
    """Scan row after row: each element sees the same operations in the same order."""
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
