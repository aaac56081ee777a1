"""Items of `ab`: the cases, types and modes of a selection, for every kernel of the device."""

from __future__ import annotations

from ..measure import choose
from ..registry import contenders_of
from .ab import Item


def items(selection: choose.Selection, plugins: tuple[tuple[str, str], ...] = ()) -> list[Item]:
    """Return every case, type and mode of every kernel, or of the backends that the selection names."""
    found = []
    for case in choose.cases(selection):
        names = [
            c.name
            for c in contenders_of(case.kernel)
            if (c.role != "baseline" if selection.backends else c.role == "kernel")
            and selection.device in c.devices
            and choose.matches(c.name, selection.backends)
        ]
        for dtype in choose.dtypes(case, selection):
            found += [
                Item(case.kernel, name, case.name, dtype, mode, plugins)
                for name in names
                for mode in choose.modes(case, selection)
            ]
    return found
