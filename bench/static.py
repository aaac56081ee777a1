"""Static metrics of every kernel and configuration we ship: Triton by `retro_kernels.aot`, CUDA C++ by nvcc. Needs no GPU."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import record, static_cuda, static_triton
from .static_rows import NoToolchain, row

__all__ = ["NoToolchain", "Plan", "listing", "plan", "regressions", "row", "rows", "vanished"]

#: +5% issue slots in the hot loop is a regression
SLOTS_SLACK = 1.05


def listing(arches: list[int], parts: tuple[str, ...] | None) -> dict[str, str]:
    """id -> fingerprint of everything `rows` would compile; seconds instead of minutes. Raises NoToolchain."""
    units = [launch for launch in static_triton.launches(arches, parts) if launch.wanted]
    return {unit.id: unit.fingerprint for unit in units + static_cuda.sources(arches, parts)}


@dataclass(frozen=True)
class Plan:
    """What is to be compiled."""

    arches: list[int]
    every: list[static_triton.Launch]
    triton: list[static_triton.Launch]  # those of `every` that are wanted
    cuda: list[static_cuda.Source]

    def __len__(self) -> int:
        """Rows, as far as they are known: a CUDA source has one or more."""
        return len(self.triton) + len(self.cuda)


def plan(arches: list[int], parts: tuple[str, ...] | None, only: Collection[str] | None = None) -> Plan:
    """Whatever has one of `parts` in its id; `only`: ids of a listing. Raises NoToolchain."""
    every = static_triton.launches(arches, parts)
    triton = [launch for launch in every if launch.wanted and (only is None or launch.id in only)]
    cuda = [source for source in static_cuda.sources(arches, parts) if only is None or source.id in only]
    return Plan(arches, every, triton, cuda)


def rows(plan: Plan, keep: Path | None, jobs: int | None) -> Iterator[dict[str, Any]]:
    """Static records of a plan, each as soon as it and those before it are done. Raises NoToolchain."""
    folder = keep or Path(tempfile.mkdtemp(prefix="retro-static-"))
    folder.mkdir(parents=True, exist_ok=True)
    run = {"run": record.new_run()}
    try:
        if plan.triton:
            yield from (each | run for each in static_triton.rows(plan.arches, plan.triton, plan.every, folder, jobs))
        for source in plan.cuda:
            yield from (each | run for each in static_cuda.rows(source, folder))
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def vanished(base: Collection[str], head: Collection[str]) -> list[str]:
    """A line for every id of `base` that `head` lacks."""
    return [f"{name}: no longer compiled" for name in base if name not in head]


def regressions(base: list[dict[str, Any]], head: list[dict[str, Any]]) -> list[str]:
    """What got worse from `base` to `head`, a line each; both must come from one toolchain."""
    after = {r["id"]: r["static"] for r in head if r["static"]}
    found = []
    for before in base:
        if not before["static"]:
            continue
        old, new = before["static"], after.get(before["id"])
        found += [f"{before['id']}: {what}" for what in (_worse(old, new) if new else ["no longer compiled"])]
    return found


def _worse(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    if (new["stack_bytes"] or 0) > (old["stack_bytes"] or 0):
        yield f"spills: {new['stack_bytes']} stack bytes, were {old['stack_bytes']}"
    if None not in (new["blocks_per_sm"], old["blocks_per_sm"]) and new["blocks_per_sm"] < old["blocks_per_sm"]:
        yield f"CTAs per SM: {new['blocks_per_sm']}, were {old['blocks_per_sm']} ({new['registers']} registers, were {old['registers']})"
    for name, words in (("tensor_instructions", "tensor instructions"), ("async_copies", "asynchronous copies")):
        if old[name] and not new[name]:
            yield f"{words} gone: were {old[name]}"
    slots, before = new["loop_issue_slots"], old["loop_issue_slots"]
    if slots and before and slots > SLOTS_SLACK * before and _per_product(new) > SLOTS_SLACK * _per_product(old):
        yield f"hot loop: {slots} issue slots, were {before}"


def _per_product(metrics: dict[str, Any]) -> float:
    """Issue slots a tensor instruction: a larger tile has more of both and is no regression."""
    return metrics["loop_issue_slots"] / max(metrics["loop_tensor_instructions"] or 0, 1)
