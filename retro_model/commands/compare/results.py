"""Scores of contenders on disk, and the record and the table that are made from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from retro_model import evaluation
from retro_model.evaluation import Scores
from retro_model.evaluation.outcome import LEAST_DOCUMENTS

ALPHAS = (0.25, 0.5)
BASELINES = ("alone", "alone+prefix", "in-context", "in-context+prefix")
CONTROL = ("minus_random", "random_minus_alone")


class Result(NamedTuple):
    """Scores of a contender on the first held-out documents.

    true: with retrieved neighbours. random: with the control's neighbours; None for a contender that retrieves nothing.
    facts: the settings (`of`), facts of the training (`made`), and CPU seconds of `true` and `random`.
    """

    true: Scores
    random: Scores | None
    facts: dict

    def save(self, path: Path) -> None:
        """Save atomically: a reader sees the whole file or none."""
        part = path.with_suffix(".part.npz")
        scored = {"true": self.true} | ({} if self.random is None else {"random": self.random})
        arrays = {f"{which}-{name}": array for which, scores in scored.items() for name, array in vars(scores).items()}
        np.savez(part, facts=json.dumps(self.facts), **arrays)
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> Result:
        with np.load(path) as kept:
            true, random = (
                {name.partition("-")[2]: kept[name] for name in kept if name.startswith(f"{which}-")}
                for which in ("true", "random")
            )
            return cls(Scores(**true), Scores(**random) if random else None, json.loads(str(kept["facts"])))


def rows(results: Mapping[str, Result], titles: Mapping[str, str], store, leakage: np.ndarray) -> dict[str, dict]:
    """Make a row of the record for each contender. All have scored the same documents.

    A difference is a triple (difference, 2.5%, 97.5% over documents).
    """

    def difference(scores: Scores, other: Scores) -> list[float]:
        return [round(float(value), 4) for value in evaluation.bootstrap(scores, other, store)]

    alone, found = results["alone"].true, {}
    for name, (scores, random, facts) in results.items():
        row = {
            "title": titles[name],
            "documents": len(np.unique(np.asarray(store.chunk_doc)[scores.bytes > 0])),
            "bits_per_byte": round(evaluation.bits_per_byte(scores), 4),
            "cpu_ms_per_token": round(1000 * facts["cpu_seconds"]["true"] / int(scores.tokens.sum()), 3),
        }
        for other in BASELINES:
            if other in results:
                row[f"minus_{other.replace('-', '_').replace('+', '_')}"] = difference(scores, results[other].true)
        if random is not None:
            row |= zip(CONTROL, (difference(scores, random), difference(random, alone)))
        row["by_leakage"] = {
            f"r(C) <= {alpha}": {"minus_alone": [round(value, 4) for value in gap], "share_of_bytes": round(share, 3)}
            for alpha, *gap, share in evaluation.gains(scores, alone, store, leakage, alphas=ALPHAS)
        }
        found[name] = row | {key: facts[key] for key in ("cpu_seconds", "made")}
    return found


#: Columns of the table: the heading and the text of a row's cell.
COLUMNS: dict[str, Callable[[dict], str]] = {
    "": lambda row: row["title"],
    "bits per byte": lambda row: f"{row['bits_per_byte']:.3f}",
    "minus alone (95%)": lambda row: _interval(row, row["minus_alone"]),
    "retrieved minus control": lambda row: _interval(row, row.get("minus_random")),
    "r(C) <= 1/4, minus alone": lambda row: _interval(
        row, row["by_leakage"].get("r(C) <= 0.25", {}).get("minus_alone")
    ),
    "minus in-context with the prefix": lambda row: _interval(row, row.get("minus_in_context_prefix")),
    "CPU ms per token": lambda row: f"{row['cpu_ms_per_token']:.1f}",
}


def _interval(row: dict, gap) -> str:
    """Return a difference and its interval, which is left out over few documents."""
    if not gap or not any(gap):
        return ""
    if row["documents"] < LEAST_DOCUMENTS:
        return f"{gap[0]:+.3f}"
    return f"{gap[0]:+.3f} ({gap[1]:+.3f} to {gap[2]:+.3f})"


def markdown(made: Mapping) -> str:
    """Return a record as a paragraph and a table of Markdown."""
    library, rows = made["library"], made["contenders"]
    share = {name: part["share_of_bytes"] for name, part in rows["alone"]["by_leakage"].items()}
    shares = "".join(f"; {share[name]:.0%} of the bytes have {name}" for name in share)
    lines = [
        f"**{made['corpus']}**: {rows['alone']['documents']} held-out documents, at most "
        f"{made['sizes']['held_bytes']} characters of each; library of {library['documents']:,} documents, "
        f"{library['tokens']:,} tokens, {len(library['leaks_dropped'])} leaks dropped{shares}.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
    ]
    lines += ["| " + " | ".join(cell(row) for cell in COLUMNS.values()) + " |" for row in rows.values()]
    return "\n".join(lines) + "\n"
