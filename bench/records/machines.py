"""Identity of a record's machine. Times of different machines never share a table.

Clouds give one name, "AMD EPYC", to processors with different kernels. So instructions, caches, cores and memory belong
to the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

GIB = 2**30


def _text(value: Any) -> str | None:
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, dict):
        return " ".join(f"{name}={inner}" for name, inner in sorted(value.items()))
    return None if value is None else str(value)


def _memory(record: dict[str, Any]) -> str | None:
    size = record["device"].get("memory_bytes")
    # rounded, because the system reserves another amount at each boot
    return f"{size / GIB:.0f} GiB" if isinstance(size, (int, float)) else None


#: field of a machine's identity -> its text in a record, None if the record lacks it
IDENTITY: dict[str, Callable[[dict[str, Any]], str | None]] = {
    "device": lambda r: _text(r["device"].get("name")),
    "arch": lambda r: _text(r["device"].get("arch")),
    "isa": lambda r: _text(r["environment"].get("isa")),
    "cores": lambda r: _text(r["environment"].get("cores")),
    "caches": lambda r: _text(r["device"].get("caches")),
    "memory": _memory,
    "threads": lambda r: _text(r["environment"].get("threads")),
    "torch": lambda r: _text(r["environment"].get("torch")),
}


def identity(record: dict[str, Any]) -> dict[str, str]:
    """Return the fields of a record that identify its machine."""
    return {name: value for name, of in IDENTITY.items() if (value := of(record)) is not None}


def difference(a: Iterable[dict[str, Any]], b: Iterable[dict[str, Any]]) -> str | None:
    """Return why timed records of `a` and `b` can't be compared; None if they can. A field that a record lacks is left
    out.
    """
    sides = [list({tuple(identity(r).items()): None for r in records if r["time"]}) for records in (a, b)]
    for one in map(dict, sides[0]):
        for other in map(dict, sides[1]):
            unlike = [
                f"{name} {one[name]} against {other[name]}"
                for name in IDENTITY
                if name in one and name in other and one[name] != other[name]
            ]
            if unlike:
                return "; ".join(unlike)
    return None
