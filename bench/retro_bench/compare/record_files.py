"""Compare two files of records. They must be of one machine.

Times of separate runs prove little: a slow-down here is a hint (`slower`), and `ab` is the gate. Broken numerics, a
vanished op and worse static metrics need no clock, and fail.
"""

from dataclasses import dataclass
from typing import Any

from ..measure.samples import estimate
from ..records import record
from ..static import regressions

HINT = 1.05  # times of separate runs within 5% are called equal


@dataclass(frozen=True)
class Change:
    id: str
    kind: str  # broke | vanished | static | changed | slower | faster | new | fixed
    detail: str
    ratio: float | None = None

    @property
    def fails(self) -> bool:
        return self.kind in ("broke", "vanished", "static")


def changes(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> list[Change]:
    """List the differences from `a` to `b`, failures first. Baselines are left out."""
    before, after = ({i: r for i, r in record.latest(side).items() if r["role"] != "baseline"} for side in (a, b))
    differences = _static(before, after)
    for name, old in before.items():
        if old["mode"] != "static":
            differences += _one(name, old, after.get(name))
    new = [name for name, one in after.items() if name not in before and one["status"] == "ok"]
    differences += [Change(name, "new", "ok") for name in new]
    return sorted(differences, key=lambda c: (not c.fails, -abs((c.ratio or 1) - 1)))


def _one(name: str, old: dict[str, Any], new: dict[str, Any] | None) -> list[Change]:
    if old["status"] == "ok" and (new is None or new["status"] == "unsupported"):
        return [Change(name, "vanished", "no record" if new is None else new["reason"])]
    if new is None:
        return []
    if old["status"] == "ok" and new["status"] != "ok":
        return [Change(name, "broke", f"{new['status']}: {new['reason']}")]
    if old["status"] != "ok" and new["status"] == "ok":
        return [Change(name, "fixed", f"was {old['status']}")]
    if changed := record.case_change(old, new):
        return [Change(name, "changed", f"another case, not compared: {changed}")]
    if old["time"] and new["time"]:
        ratio = estimate(new["time"]) / estimate(old["time"])
        if max(ratio, 1 / ratio) > HINT:
            detail = f"{estimate(old['time']) * 1e3:.3f} ms -> {estimate(new['time']) * 1e3:.3f} ms"
            return [Change(name, "slower" if ratio > 1 else "faster", detail, ratio)]
    return []


def _static(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> list[Change]:
    old, new = ([r for r in side.values() if r["mode"] == "static"] for side in (before, after))
    if not (old and new):
        return []
    found = [("static", regressions.regressions(old, new)), ("changed", regressions.changed(old, new))]
    return [Change(name, kind, why) for kind, lines in found for name, why in (one.split(": ", 1) for one in lines)]
