"""Estimate of a build's cost: bytes on disk, memory of a worker and core-seconds of each stage, from rates that were
measured.

The times of most stages grow with the number of chunks. Those of an IVF index do not: training grows with lists times
sample, adding with lists times chunks, a search with lists plus the share of the codes it visits; each is counted in
multiply-adds, and a rate turns them into seconds. Calibrate on your machine: build something small, then `--rates
OUT/report.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from retro_model.data.faiss_index import KEYS_A_LIST, RECALL_SAMPLE, TRAINING_KEYS

from .recipe import Recipe

STAGES = ("tokens", "frequencies", "keys", "index", "neighbours")
LARGEST_TABLE = 1 << 31  # bytes: of the table that FAISS makes when an index by PQ is opened; no larger one
WORKER = 450 << 20  # bytes of a process that has imported torch and FAISS
#: Core-seconds for each unit of `units`; "text": of tokens that are made
#: of text. Source: docs/scale.md, the runs of 10^5 and 10^6 chunks.
RATES = {
    "text": 2.1e-4,
    "tokens": 4.3e-6,
    "frequencies": 3.1e-5,
    "keys": 3.5e-5,
    "index": 3.0e-11,
    "neighbours": 7.6e-11,
}
# of a query's time what does not depend on the index, in multiply-adds: its embedding, its candidates' exact distances
A_QUERY = 3.7e6
# queries of text that are searched for again, their nearest chunks being their own document's: 15% once, 2% twice more
AGAIN = 0.17
# Dask's own cost: core-seconds a task (the client packs the embedder for each, the workers unpack it), cores that its
# scheduler, nannies and heartbeats keep busy whatever there is to do, core-seconds of a worker that loads FAISS.
DASK_TASK, DASK_IDLE, LOADS_FAISS = 0.2, 0.05, 1.0


class Stage(NamedTuple):
    """disk: bytes written. memory: of a worker. core_seconds."""

    name: str
    disk: int
    memory: int
    core_seconds: float


def units(recipe: Recipe, chunks: int, searched: int) -> dict[str, float]:
    """Units of work of each stage: chunks of 64 tokens, or multiply-adds."""
    d, lists = recipe.dim, recipe.lists
    tokens = chunks * recipe.chunk_len / 64
    if not recipe.index:
        return {
            "tokens": tokens,
            "frequencies": tokens,
            "keys": tokens,
            "index": 0,
            "neighbours": searched * (A_QUERY + float(chunks) * d),  # exact: nothing is searched for twice
        }
    sample = min(chunks, max(TRAINING_KEYS, KEYS_A_LIST * lists))
    coded = "PQ" in recipe.index
    codes = coded * min(sample, 1 << 16) * 256 * d * 900  # OPQ's and PQ's own clusterings, whatever the number of lists
    training = 10.0 * sample * lists * d + codes
    adding = float(chunks) * d * (lists + coded * (256 + d) + RECALL_SAMPLE)  # and the exact search for the recall
    visited = recipe.nprobe / lists * chunks * (recipe.code_bytes if coded else d)
    search = (A_QUERY + d * lists + visited) * (1 + AGAIN * recipe.text)
    return {
        "tokens": tokens,
        "frequencies": tokens,
        "keys": tokens,
        "index": training + adding,
        "neighbours": searched * search,
    }


def plan(
    recipe: Recipe,
    chunks: int,
    shards: int,
    *,
    searched: int | None = None,
    rates: dict[str, float] | None = None,
    cluster: int = 0,
) -> list[Stage]:
    """The stages of a build of so many chunks in so many shards; `searched` chunks get neighbours (None: all).

    cluster: workers of a Dask cluster, whose own work is counted too; 0: there is none.
    """
    searched = chunks if searched is None else searched
    rates, shard = RATES | (rates or {}), -(-chunks // shards)
    amounts = units(recipe, chunks, searched)
    key = recipe.dim * (2 if recipe.key_type == "float16" else 4)
    token = 2 if max(recipe.vocab_size, 0) <= 1 << 16 else 4
    sample = min(chunks, max(TRAINING_KEYS, KEYS_A_LIST * recipe.lists)) if recipe.index else 0
    centroids = recipe.lists * recipe.dim * 4
    index = chunks * (recipe.code_bytes + 8) + centroids
    table = recipe.lists * recipe.code_bytes * 256 * 4 * ("PQ" in (recipe.index or ""))
    table *= table <= LARGEST_TABLE
    disk = {
        "tokens": chunks * (recipe.chunk_len * token + 20),
        "frequencies": 0,
        "keys": chunks * key,
        "index": index if recipe.index else 0,
        "neighbours": searched * recipe.k * 8,
    }
    memory = {
        "tokens": WORKER,
        "frequencies": WORKER + (256 << 20),
        "keys": WORKER + (256 << 20),
        "index": WORKER + max(sample * recipe.dim * 4 * 6, shard * (recipe.code_bytes + 8) + 2 * centroids),
        "neighbours": WORKER + 2 * centroids + table + (256 << 20),
    }
    rates["tokens"] = rates[_tokens(recipe)]
    seconds = {name: amounts[name] * rates[name] for name in STAGES}
    more = {name: of_cluster(name, amount, shards, cluster) for name, amount in seconds.items()}
    return [Stage(name, disk[name], memory[name], seconds[name] + more[name]) for name in STAGES]


def of_cluster(stage: str, seconds: float, shards: int, workers: int) -> float:
    """Core-seconds of a Dask cluster itself while its workers take so many for the tasks of a stage."""
    if not workers:
        return 0.0
    return shards * DASK_TASK + seconds / workers * DASK_IDLE + (stage == "index") * workers * LOADS_FAISS


def _tokens(recipe: Recipe) -> str:
    """The name of the rate of the first stage."""
    return "text" if recipe.text else "tokens"


def measured_rates(report: str | Path) -> dict[str, float]:
    """The rates of a build, of the report it left. Raises: FileNotFoundError, ValueError naming the file."""
    try:
        measured = json.loads(Path(report).read_text())
        recipe = Recipe(**measured["recipe"])
        amounts = units(recipe, measured["chunks"], measured["searched"])
        shards, workers = measured["shards"], measured.get("cluster", 0)
        rates = {}
        for stage in measured["stages"]:
            name, seconds = stage["name"], stage["core_seconds"]
            if amounts[name]:  # without what a cluster's own work may have been, at least half
                rates[name] = max(seconds / 2, seconds - of_cluster(name, seconds, shards, workers)) / amounts[name]
        return {_tokens(recipe) if name == "tokens" else name: rate for name, rate in rates.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{report}: expected the report of a build; got another file ({error!r})") from None


def table(stages: list[Stage], *, machines: int = 1, cores: int = 2) -> str:
    """The plan as text."""
    rows = [f"{'stage':12} {'disk':>10} {'memory a worker':>16} {'core-hours':>11} {'hours':>9}"]
    for name, disk, memory, seconds in [*stages, _total(stages)]:
        rows.append(
            f"{name:12} {_bytes(disk):>10} {_bytes(memory):>16} {seconds / 3600:>11.3f} "
            f"{seconds / 3600 / machines / cores:>9.3f}"
        )
    return "\n".join(
        [
            *rows,
            f"hours: on {machines} machine{'s'[: machines > 1]} of {cores} cores, the index's training on one of them "
            "aside",
        ]
    )


def summary(chunks: int, stages: list[Stage], *, machines: int = 1, cores: int = 2) -> str:
    """The plan in a line."""
    whole = _total(stages)
    hours = whole.core_seconds / 3600
    return (
        f"{chunks:,} such chunks on {machines} machine{'s'[: machines > 1]} of {cores} cores: {_bytes(whole.disk)}, "
        f"{_bytes(whole.memory)} a worker, {hours:,.0f} core-hours, {hours / machines / cores:,.1f} hours"
    )


def _total(stages: list[Stage]) -> Stage:
    return Stage("all", sum(s.disk for s in stages), max(s.memory for s in stages), sum(s.core_seconds for s in stages))


def _bytes(count: int) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
