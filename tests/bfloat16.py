"""Triton's interpreter with a correct bfloat16: stored as bits, multiplied as float32, rounded where a GPU rounds.

Any other arithmetic on bits is an error; no kernel here has any.
"""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from retro_kernels import triton_lib


def mend() -> None:
    """Patch the interpreter for the rest of this process."""
    builder = interpreter.InterpreterBuilder
    product, binary, unary = builder.create_dot, builder.binary_op, builder.unary_op
    cast = builder.cast_impl

    def create_dot(self, a, b, *rest):
        return product(self, wide(self, a), wide(self, b), *rest)

    def binary_op(self, lhs, rhs, op):
        refuse(op, lhs, rhs)
        return binary(self, lhs, rhs, op)

    def unary_op(self, arg, op):
        refuse(op, arg)
        return unary(self, arg, op)

    def cast_impl(self, src, dst_type):
        pair = src.dtype.scalar, dst_type.scalar
        if pair == (tl.float32, tl.bfloat16):
            return interpreter.TensorHandle(rounded(src.data), tl.bfloat16)
        if pair == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle((src.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
        return cast(self, src, dst_type)

    builder.cast_impl = cast_impl
    builder.create_dot, builder.binary_op, builder.unary_op = create_dot, binary_op, unary_op
    triton_lib.INTERPRETS_BFLOAT16 = True


def wide(builder, handle):
    return builder.cast_impl(handle, tl.float32) if handle.dtype.scalar == tl.bfloat16 else handle


def rounded(values: np.ndarray) -> np.ndarray:
    """Return the bits of the nearest bfloat16 of float32 values, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32).astype(np.uint64)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, nearest).astype(np.uint16)


def refuse(op, *handles) -> None:
    if any(handle.data.dtype == np.uint16 and handle.dtype.scalar == tl.bfloat16 for handle in handles):
        raise NotImplementedError(f"{op.__name__} of bfloat16: the interpreter would take its bits for integers")
