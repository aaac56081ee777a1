"""Identity of a record's machine. Times of different machines never share a table.

Clouds give one name, "AMD EPYC", to processors with different kernels. So instructions, caches, cores and memory belong
to the identity.
"""

from collections.abc import Iterable
from typing import Any

GIB = 2**30


def identity(record: dict[str, Any]) -> dict[str, str]:
    """Return the fields of a record that identify its machine, without those that it lacks."""
    device, environment = record["device"], record["environment"]
    size, isa = device.get("memory_bytes"), environment.get("isa")
    fields = {
        "device": device.get("name"),
        "arch": device.get("arch"),
        "isa": None if isa is None else " ".join(isa),
        "cores": environment.get("cores"),
        "caches": device.get("caches"),
        # rounded, because the system reserves another amount at each boot
        "memory": f"{size / GIB:.0f} GiB" if size else None,
        "threads": environment.get("threads"),
        "torch": environment.get("torch"),
    }
    return {name: str(value) for name, value in fields.items() if value is not None}


def difference(a: Iterable[dict[str, Any]], b: Iterable[dict[str, Any]]) -> str | None:
    """Return why timed records of `a` and `b` can't be compared, by the fields that both have; None if they can."""
    sides = [list({tuple(identity(r).items()): None for r in records if r["time"]}) for records in (a, b)]
    for one in map(dict, sides[0]):
        for other in map(dict, sides[1]):
            unlike = [name for name in one if name in other and one[name] != other[name]]
            if unlike:
                return "; ".join(f"{name} {one[name]} against {other[name]}" for name in unlike)
    return None
