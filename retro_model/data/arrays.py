"""Checks of integer arrays: token ids, lengths, chunk numbers, document numbers."""

from __future__ import annotations

import numpy as np


def integers(name: str, values, dims: int | None = None) -> np.ndarray:
    """Return the values as an array. Raise TypeError or ValueError unless they are integers in `dims` dimensions."""
    array = np.asarray(values)
    if array.size == 0 and not isinstance(values, np.ndarray):
        array = array.astype(np.int64)  # NumPy makes an empty list float64
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integers; got {array.dtype}")
    if dims is not None and array.ndim != dims:
        raise ValueError(f"{name}: expected {dims} dimension{'s'[: dims > 1]}; got shape {list(array.shape)}")
    return array


def within(name: str, values, low: int, high: int, what: str = "", dims: int | None = None) -> np.ndarray:
    """Return `integers` from low to high. Raise ValueError for others."""
    array = integers(name, values, dims)
    if array.size and not low <= array.min() <= array.max() <= high:
        raise ValueError(f"{name}: expected {what}{' ' if what else ''}within {low} .. {high}; got {seen(array)}")
    return array


def row_lengths(name: str, lengths, n: int, width: int) -> np.ndarray:
    """Return the numbers of real tokens of n rows of M = width, int64 [n]. None: all are real."""
    if lengths is None:
        return np.full(n, width, np.int64)
    return of_rows(name, lengths, n, 0, width, f"M={width}")


def of_rows(name: str, values, n: int, low: int, high: int, high_name: str = "") -> np.ndarray:
    """Return one integer a row from low to high, int64 [n]. Raise ValueError for others."""
    array = integers(name, values, 1)
    if array.shape != (n,) or (n and not low <= array.min() <= array.max() <= high):
        raise ValueError(f"{name}: expected [n={n}] within {low} .. {high_name or high}; got {seen(array)}")
    return np.ascontiguousarray(array, dtype=np.int64)


def seen(array: np.ndarray) -> str:
    """Format the shape and range of an array for an error."""
    return f"shape {list(array.shape)}" + (f", {array.min()} .. {array.max()}" if array.size else "")
