"""Regressions between two tables of static metrics, made with one toolchain."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from ..records import record

#: +5% issue slots in the hot loop is a regression
SLOTS_SLACK = 1.05
#: So are +5% in sectors or wavefronts over the minimum: an access has lost its coalescing or has a bank conflict.
ACCESS_SLACK = 1.05


def vanished(base: Collection[str], head: Collection[str]) -> list[str]:
    """Return a line for every id of `base` that `head` lacks."""
    return [f"{name}: no longer compiled" for name in base if name not in head]


def regressions(base: list[dict[str, Any]], head: list[dict[str, Any]]) -> list[str]:
    """List the regressions from `base` to `head`, one a line. Both must come from one toolchain."""
    after = {r["id"]: r for r in head if r["static"]}
    worse = []
    for before in (r for r in base if r["static"]):
        new = after.get(before["id"])
        if new is None or not _other_case(before, new):
            found = _worse(before["static"], new["static"]) if new else ["no longer compiled"]
            worse += [f"{before['id']}: {what}" for what in found]
    return worse


def changed(base: list[dict[str, Any]], head: list[dict[str, Any]]) -> list[str]:
    """List the ids that name another case in `head`, one a line: their metrics are not compared."""
    after = {r["id"]: r for r in head}
    found = ((r["id"], _other_case(r, after.get(r["id"], r))) for r in base)
    return [f"{name}: another case, not compared: {why}" for name, why in found if why]


def _other_case(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Say which arguments have other types or shapes; empty if none has. Arguments that one side lacks do not count."""
    was, now = old["case"]["shape"], new["case"]["shape"]
    return record.differences(*({name: side[name] for name in was.keys() & now.keys()} for side in (was, now)))


def _worse(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    if (new["stack_bytes"] or 0) > (old["stack_bytes"] or 0):
        yield f"spills: {new['stack_bytes']} stack bytes, were {old['stack_bytes']}"
    if None not in (new["blocks_per_sm"], old["blocks_per_sm"]) and new["blocks_per_sm"] < old["blocks_per_sm"]:
        registers = f"{new['registers']} registers, were {old['registers']}"
        yield f"CTAs per SM: {new['blocks_per_sm']}, were {old['blocks_per_sm']} ({registers})"
    for name, words in (("tensor_instructions", "tensor instructions"), ("async_copies", "asynchronous copies")):
        if old[name] and not new[name]:
            yield f"{words} gone: were {old[name]}"
    if old.get("copies_in_flight") and not new.get("copies_in_flight"):
        yield f"a pipelined loop waits for all its copies: {old['copies_in_flight']} groups were in flight"
    if new.get("emulation_fault") and not old.get("emulation_fault"):
        yield f"emulation: {new['emulation_fault']}"
    for name, words in (
        ("sectors_over_fewest", "sectors of global memory"),
        ("wavefronts_over_fewest", "wavefronts of shared memory"),
    ):
        was, now = old.get(name), new.get(name)
        if was and now and now > ACCESS_SLACK * was:
            yield f"{words}: {now} times the fewest possible, were {was}"
    slots, before = new["loop_issue_slots"], old["loop_issue_slots"]
    if slots and before and slots > SLOTS_SLACK * before and _per_product(new) > SLOTS_SLACK * _per_product(old):
        yield f"hot loop: {slots} issue slots, were {before}"


def _per_product(metrics: dict[str, Any]) -> float:
    """Issue slots per tensor instruction. A larger tile has more of both, which is not a regression."""
    return metrics["loop_issue_slots"] / max(metrics["loop_tensor_instructions"] or 0, 1)
