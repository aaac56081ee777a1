"""The memo of the package. It maps the layout of a call to plain values that the layout determines.

A layout is a call's types, shapes, strides, devices and options. The memo maps it to checked options, to the backend,
and to the scalars of each launch. It holds no tensor. A position that moves from call to call is not part of a layout;
the part of it that decides something (`Call.place`) is.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from . import private

Value = TypeVar("Value")

_MOST = 4096  # entries; a full memo is emptied, which costs less than to keep the order of their use
_OPTIONS = frozenset((int, float, bool, str))


class Known(dict):
    """Values of one layout, by name: the backend, tiles, the scalars of each launch."""

    def once(self, name, make: Callable[[], Value]) -> Value:
        """Return the value of a name, made by the first call of the layout."""
        found = self.get(name)
        if found is None:
            found = self[name] = make()
        return found


_MEMO = Known()  # by name and layout


def forget() -> None:
    """Drop every entry. Call it after a change that layouts do not show, such as another tile table or backend."""
    _MEMO.clear()


def once(name: tuple, layout: tuple | None, make: Callable[[], Value]) -> Value:
    """Return the value of a layout under a name; the first call makes and stores it. Nothing is stored if the layout is
    None or if `make` raises an error.
    """
    if layout is None:
        return make()
    if len(_MEMO) >= _MOST:
        forget()
    return _MEMO.once((name, layout), make)


_RUNNING = threading.local()  # known: the stored values of this thread's call


def within(known: Known, run: Callable[..., Value], *arguments) -> Value:
    """Run a pass of a backend, inside which `current` returns the stored values of the call's layout."""
    before, _RUNNING.known = getattr(_RUNNING, "known", None), known
    try:
        return run(*arguments)
    finally:
        _RUNNING.known = before


def current() -> Known:
    """Return the stored values of the layout of this thread's call, or an empty `Known` outside an operator."""
    found = getattr(_RUNNING, "known", None)
    return Known() if found is None else found


def key(values) -> tuple | None:
    """Return the layout of a call, or of a tuple of tensors. None if a value has no plain layout.

    The layout is one flat tuple. A tensor adds five parts, the last of which is its alignment, because kernels are
    specialised to it. An option adds its type and its value. A moving position adds the branch that `place` returns.
    """
    parts: list = []
    moving = _moving(values.__class__)
    for at, value in enumerate(values):
        kind = value.__class__
        if value is None:
            parts.append(None)
        elif isinstance(value, Tensor):
            if private.dispatch_keys(value).raw_repr() not in private.ORDINARY:
                return None
            parts += value.dtype, value.shape, value.stride(), value.device, value.data_ptr() & 15
        elif at == moving and kind is int:
            try:
                parts.append(values.place(value)[1])
            except (AttributeError, IndexError, TypeError, ZeroDivisionError):  # other arguments are not valid
                return None
        elif kind in _OPTIONS:
            parts += kind, value
        else:
            return None
    return tuple(parts)


@functools.cache
def _moving(kind: type) -> int | None:
    """Return the index of the field that holds the moving position, or None."""
    return kind._fields.index(kind.MOVES) if hasattr(kind, "MOVES") else None


def sources(call, resolved) -> tuple[tuple[int | None, object], ...]:
    """Return (index, value) for each field of a resolved call: the index of the field of the call that it came from, or
    None and its value.

    A tensor of positions came from the field of the moving position.
    """
    moving = _moving(call.__class__)
    return tuple(
        (at, None) if new is old else (moving, None) if isinstance(new, Tensor) else (None, new)
        for at, (old, new) in enumerate(zip(call, resolved, strict=True))
    )


def filled(call, found: tuple[tuple[int | None, object], ...]):
    """Return another call of the layout, resolved by its `sources`."""
    return call._make([value if source is None else call[source] for source, value in found])
