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

import torch
from torch import Tensor

Value = TypeVar("Value")

_MOST = 4096  # entries; a full memo is emptied, which costs less than to keep the order of their use
_MEMO: dict[tuple, object] = {}
_ORDINARY = frozenset((Tensor, torch.nn.Parameter))
_OPTIONS = frozenset((int, float, bool, str))


def forget() -> None:
    """Drop every entry. Call it after a change of what layouts do not show: tile tables, backends of this machine."""
    _MEMO.clear()


def once(name: tuple, layout: tuple | None, make: Callable[[], Value]) -> Value:
    """Return the value of a layout under a name; the first call makes and stores it. Nothing is stored if the layout is
    None or if `make` raises an error.
    """
    if layout is None:
        return make()
    entry = name, layout
    found = _MEMO.get(entry)
    if found is None:
        found = make()
        if len(_MEMO) >= _MOST:
            forget()
        _MEMO[entry] = found
    return found


class Known(dict):
    """Values of one layout, by name: the backend, tiles, the scalars of each launch."""

    def once(self, name, make: Callable[[], Value]) -> Value:
        """Return the value of a name, made by the first call of the layout."""
        found = self.get(name)
        if found is None:
            found = self[name] = make()
        return found


class _Running(threading.local):
    known: Known | None = None


_RUNNING = _Running()


def within(known: Known, run: Callable[..., Value], *arguments) -> Value:
    """Run a pass of a backend, inside which `current` returns the stored values of the call's layout."""
    before, _RUNNING.known = _RUNNING.known, known
    try:
        return run(*arguments)
    finally:
        _RUNNING.known = before


def current() -> Known:
    """Return the stored values of the layout of this thread's call, or an empty `Known` outside an operator."""
    return Known() if _RUNNING.known is None else _RUNNING.known


def key(values, aligned: bool = False) -> tuple | None:
    """Return the layout of a call, or of other tensors and options. None if they have no plain layout.

    The key is flat and unambiguous: each value adds None, four parts of a tensor, two of an option, or the branch of a
    moving position. aligned: each tensor adds its alignment too, to which kernels are specialised. Only the
    implementation of an operator may ask for it, because wrapped tensors have no address.
    """
    parts: list = []
    moving = _moving(values.__class__)
    for at, value in enumerate(values):
        kind = value.__class__
        if value is None:
            parts.append(None)
        elif kind in _ORDINARY or (aligned and isinstance(value, Tensor)):
            if value.layout is not torch.strided or value.is_nested:
                return None
            parts += value.dtype, value.shape, value.stride(), value.device
            if aligned:
                parts.append(value.data_ptr() & 15)
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


def checked(op: str, call, layout: tuple):
    """Return the call with its arguments checked and defaults filled in. The first call of a layout is checked."""
    found = once(("checked", op), layout, lambda: _changes(call))
    if not found:
        return call
    values = list(call)
    for at, value, source in found:
        values[at] = value if source is None else call[source]
    return call._make(values)


def _changes(call) -> tuple[tuple[int, object, int | None], ...]:
    """Check a call. Return the fields that the check changes, as (field, its value, None).

    A position that is a tensor moves to a field of its own: (field, None, field of the position).
    """
    moving, resolved = _moving(call.__class__), call.checked()
    pairs = enumerate(zip(call, resolved, strict=True))
    changed = [(at, new) for at, (old, new) in pairs if new is not old]
    return tuple((at, None, moving) if isinstance(new, Tensor) else (at, new, None) for at, new in changed)
