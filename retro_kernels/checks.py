"""Checks of one argument at a time, for the ops and for packages that build on them.

Every message names the argument, the expectation in the letters of the docstrings, and the value.

    sizes = {"D": 64}
    checks.shape("query", query, "B,N,H,D", sizes)  # binds B, N and H; raises where D is not 64
    checks.integer("chunk_len", chunk_len, low=1)
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from .core import private

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
HEAD_DIM_MIN, HEAD_DIM_MAX, HEAD_DIM_STEP = 16, 256, 8
SHARED = "B or 1"
#: largest position: displacements, their differences and sums with a row then fit the kernels' 32 bits
POSITION_MAX = 2**29


def tensor(name: str, value) -> Tensor:
    """Check a tensor. Raises TypeError for anything else."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor; got {type(value).__name__}")
    if value.is_nested:  # it has no single shape
        raise TypeError(f"{name}: expected a tensor of one shape; got a nested tensor")
    return value


def readable(value: Tensor) -> bool:
    """Whether eager code may read a tensor's values: a plain tensor, while nothing compiles, traces, transforms or
    intercepts calls. In a trace, the value would become a constant.
    """
    return type(value) is Tensor and not torch.compiler.is_compiling() and private.untraced()


def integer(name: str, value, low: int | None = None, high: int | None = None) -> int:
    """Check an int from `low` to `high`. A bool is not one."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name}: expected an int; got {type(value).__name__}")
    if low is not None and value < low:
        raise ValueError(f"{name}: expected an int >= {low}; got {value}")
    if high is not None and value > high:
        raise ValueError(f"{name}: expected an int <= {high}; got {value}")
    return value


def flag(name: str, value) -> bool:
    """Check a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool; got {type(value).__name__}")
    return value


def number(name: str, value) -> float:
    """Check a finite number and return it as a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number; got {type(value).__name__}")
    if not -sys.float_info.max <= value <= sys.float_info.max:  # also NaN, and integers beyond a float's range
        raise ValueError(f"{name}: expected a finite number; got {value}")
    return float(value)


def probability(name: str, value) -> float:
    """Check a number in [0, 1), and return it as a float."""
    if not 0 <= number(name, value) < 1:
        raise ValueError(f"{name}: expected a probability in [0, 1); got {value}")
    return float(value)


def position(name: str, value, most: int = POSITION_MAX) -> int:
    """Check an int from -most to most."""
    return integer(name, value, -most, most)


def shape(name: str, value, dims: str, sizes: dict[str, int]) -> Tensor:
    """Match `dims` ("B,N,H,D") against the tensor. A letter seen before must agree; a new one is bound in `sizes`.

    The dimension "B or 1" has one entry for each batch entry, or one for all of them.
    """
    tensor(name, value)
    letters = dims.split(",")
    got = tuple(value.shape)
    if len(got) != len(letters):
        raise ValueError(f"{name}: expected [{dims}] ({len(letters)} dimensions); got shape {list(got)}")
    for letter, size in zip(letters, got, strict=True):
        if letter == SHARED:
            if size not in (1, sizes["B"]):
                raise ValueError(f"{name}: expected [{dims}] with B={sizes['B']}; got shape {list(got)}")
        elif letter not in sizes:
            sizes[letter] = size
        elif sizes[letter] != size:
            found = f"{letter}={size} (shape {list(got)})"
            raise ValueError(f"{name}: expected [{dims}] with {letter}={sizes[letter]}; got {found}")
    return value


def like(
    name: str, value: Tensor, query: Tensor, dtypes: tuple[torch.dtype, ...] | None = None, first: str = "query"
) -> None:
    """Check device and type: the query's float type, unless `dtypes` lists others."""
    expected = (query.dtype,) if dtypes is None else dtypes
    if value.dtype not in expected:
        listed = " or ".join(str(d) for d in expected)
        why = f" (the type of {first})" if dtypes is None else ""
        raise TypeError(f"{name}: expected {listed}{why}; got {value.dtype}")
    if value.device != query.device:
        raise ValueError(f"{name}: expected the device of {first}, {query.device}; got {value.device}")
    if value.layout != torch.strided:
        raise ValueError(f"{name}: expected a strided tensor; got layout {value.layout}")


def has_rows(value: Tensor) -> bool:
    """Whether the last dimension has no gaps. A single element has none, whatever its stride."""
    return not value.dim() or value.shape[-1] <= 1 or value.stride(-1) == 1


def dense_rows(name: str, value: Tensor) -> None:
    """Check that the last dimension has no gaps."""
    if not has_rows(value):
        got = f"stride {value.stride(-1)}: call .contiguous() first"
        raise ValueError(f"{name}: expected a contiguous last dimension (stride 1); got {got}")


def floating(name: str, value: Tensor) -> None:
    """Check that a tensor has a float type that the kernels take."""
    if value.dtype not in FLOATS:
        raise TypeError(f"{name}: expected float32, float16, bfloat16 or float64; got {value.dtype}")


def head_dim(name: str, value: int, of: str = "", got: str = "") -> int:
    """Check the width of a head. `of` and `got` name the dimension of a tensor in the message."""
    if value % HEAD_DIM_STEP or not HEAD_DIM_MIN <= value <= HEAD_DIM_MAX:
        wanted = f"{of}a multiple of {HEAD_DIM_STEP} from {HEAD_DIM_MIN} to {HEAD_DIM_MAX}"
        raise ValueError(f"{name}: expected {wanted}; got {got}{value}")
    return value
