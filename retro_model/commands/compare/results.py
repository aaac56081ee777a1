"""Scores and costs of contenders on disk, and the record, the table and the picture that are made from them."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from retro_model import evaluation
from retro_model.evaluation import Scores
from retro_model.evaluation.outcome import LEAST_DOCUMENTS

from .options import CONTENDERS

ALPHAS = (0.25, 0.5)
#: Bands of a passage's similarity.
BANDS = {"below 0.2": (-np.inf, 0.2), "0.2 to 0.3": (0.2, 0.3), "0.3 to 0.5": (0.3, 0.5), "from 0.5": (0.5, np.inf)}
SCORED, FIELDS = ("true", "random"), [field.name for field in dataclasses.fields(Scores)]
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass
class Result:
    """Scores of a contender on the first held-out documents, with the control's neighbours too if it retrieves.

    true, random: scores with retrieved neighbours and with the control's neighbours.
    facts: facts for the record.
        of: the settings.
        made: facts of the training, and its cost.
        documents, cpu_seconds: number of scored documents and their CPU time, each for "true" and for "random".
        neighbours: number of distinct neighbours in the groups of documents, for "true" and for "random".
        read, reading_cpu_seconds: number of neighbours that were not cached, and the CPU time to encode them, which
            cpu_seconds does not include.
        seconds_by_part: time of all scoring by part, by the host's clock, see `OwnAttention`; empty for others.
        peak_mb: largest resident memory.
    """

    true: Scores
    random: Scores
    facts: dict

    @classmethod
    def empty(cls, store, settings: dict) -> Result:
        """Make a result without scores."""
        count = len(store.lengths)
        none = Scores(np.zeros(count), np.zeros(count, np.int64), np.zeros(count, np.int64))
        facts = {name: dict.fromkeys(SCORED, 0) for name in ("documents", "cpu_seconds", "neighbours")}
        return cls(none, none, facts | {"of": settings, "peak_mb": None, "read": 0, "reading_cpu_seconds": 0.0})

    def add(self, which: str, scores: Scores, cost: Cost, parts: Mapping[str, float]) -> None:
        """Add scores of further documents. which: "true" or "random". parts: seconds of scoring by part."""
        before = getattr(self, which)
        setattr(self, which, Scores(*(getattr(before, name) + getattr(scores, name) for name in FIELDS)))
        self.facts["cpu_seconds"][which] += cost.cpu_seconds
        total = self.facts.setdefault("seconds_by_part", {})
        total |= {part: round(total.get(part, 0.0) + seconds, 3) for part, seconds in parts.items()}
        if cost.peak_mb is not None:
            self.facts["peak_mb"] = max(cost.peak_mb, self.facts["peak_mb"] or 0)

    def add_reading(self, which: str, neighbours: int, read: int, cost: Cost) -> None:
        """Add the number of distinct neighbours of further documents, and the number that had to be encoded."""
        self.facts["neighbours"][which] += neighbours
        self.facts["read"] += read
        self.facts["reading_cpu_seconds"] += cost.cpu_seconds if read else 0.0

    def save(self, path: Path) -> None:
        """Save atomically: a reader sees the whole file or none."""
        part = path.with_suffix(".part.npz")
        arrays = {f"{which}-{name}": getattr(getattr(self, which), name) for which in SCORED for name in FIELDS}
        np.savez(part, facts=json.dumps(self.facts), **arrays)
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> Result:
        with np.load(path) as kept:
            parts = [Scores(*(kept[f"{which}-{name}"] for name in FIELDS)) for which in SCORED]
            return cls(*parts, json.loads(str(kept["facts"])))


class Cost:
    """Context manager that measures the CPU seconds of all threads and the largest resident memory in MB.

    The memory is None on systems that do not report it.
    """

    def __enter__(self) -> Cost:
        try:
            RESET.write_text("5")  # resets the peak; only Linux has this file
            self.resets = True
        except OSError:
            self.resets = False
        self.began = time.process_time()
        return self

    def __exit__(self, *_) -> None:
        self.cpu_seconds = round(time.process_time() - self.began, 2)
        found = re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text()) if self.resets else None
        self.peak_mb = int(found[1]) // 1024 if found else None


def rows(
    results: Mapping[str, Result], titles: Mapping[str, str], store, leakage: np.ndarray, similarity: np.ndarray
) -> dict[str, dict]:
    """Make a row of the record for each contender, over the documents that all of them have scored.

    similarity: similarity of each chunk to its nearest neighbour, which the next chunk attends, float [chunks].
    A difference is a triple (difference, 2.5%, 97.5% over documents).
    """
    read, seconds = (sum(r.facts[key] for r in results.values()) for key in ("read", "reading_cpu_seconds"))
    each = seconds / read if read else 0.0  # to encode one neighbour
    few = min(result.facts["documents"]["true"] for result in results.values())
    shared = {name: _of(result.true, np.asarray(store.chunk_doc) < few) for name, result in results.items()}
    found = {}
    for name, result in results.items():
        scores, facts, tokens = shared[name], result.facts, int(result.true.tokens.sum())
        kept = result.random.bytes > 0
        row = {
            "title": titles[name],
            "documents": few,
            "bits_per_byte": round(evaluation.bits_per_byte(scores), 4),
            "minus_alone": _difference(scores, shared["alone"], store),
            "cpu_ms_a_token": round(1000 * facts["cpu_seconds"]["true"] / tokens, 3),
        }
        if facts["neighbours"]["true"]:
            row["reading_cpu_ms_a_token"] = round(1000 * each * facts["neighbours"]["true"] / tokens, 3)
        for other in ("alone+prefix", "in-context", "in-context+prefix"):
            if other in shared:
                row[f"minus_{re.sub('[-+]', '_', other)}"] = _difference(scores, shared[other], store)
        if kept.any():
            row["random_minus_alone"] = _difference(result.random, _of(results["alone"].true, kept), store)
            row["minus_random"] = _difference(_of(result.true, kept), result.random, store)
            row["random_documents"] = facts["documents"]["random"]
        row["by_leakage"] = {
            f"r(C) <= {alpha}": {"minus_alone": _rounded(gap), "share_of_bytes": round(share, 3)}
            for alpha, *gap, share in evaluation.gains(scores, shared["alone"], store, leakage, alphas=ALPHAS)
        }
        row["by_similarity"] = _by_similarity(scores, shared["alone"], store, similarity)
        row["settings"] = {key: value for key, value in facts["of"].items() if key != "plan"}
        found[name] = row | {key: facts.get(key) for key in ("cpu_seconds", "seconds_by_part", "peak_mb", "made")}
    return found


def _by_similarity(scores: Scores, alone: Scores, store, similarity: np.ndarray) -> dict[str, dict]:
    """Return differences on the chunks that may read a neighbour, by its similarity to the chunk that retrieved it."""
    owner, found = np.asarray(store.chunk_doc), {}
    reads, before = np.append(False, owner[1:] == owner[:-1]), np.append(np.nan, similarity[:-1])
    for name, (low, high) in BANDS.items():
        kept = reads & (before >= low) & (before < high) & (scores.bytes > 0)
        if kept.any():
            share = round(float(scores.bytes[kept].sum() / scores.bytes.sum()), 3)
            gap = _difference(_of(scores, kept), _of(alone, kept), store)
            found[name] = {"minus_alone": gap, "share_of_bytes": share}
    return found


def _of(scores: Scores, kept: np.ndarray) -> Scores:
    """Return the scores of some chunks, zero elsewhere."""
    return Scores(scores.nats * kept, scores.tokens * kept, scores.bytes * kept)


def _difference(scores: Scores, other: Scores, store) -> list[float]:
    return _rounded(evaluation.bootstrap(scores, other, store))


def _rounded(gap) -> list[float]:
    return [round(float(value), 4) for value in gap]


CONTROLLED, QUARTER = "random_documents", "r(C) <= 0.25"
#: Columns of the table: the heading and the text of a row's cell.
COLUMNS: dict[str, Callable[[dict], str]] = {
    "": lambda row: row["title"],
    "bits per byte": lambda row: f"{row['bits_per_byte']:.3f}",
    "minus alone (95%)": lambda row: _interval(row, row["minus_alone"]),
    "retrieved minus control": lambda row: _interval(row, row.get("minus_random"), CONTROLLED),
    "control minus alone": lambda row: _interval(row, row.get("random_minus_alone"), CONTROLLED),
    "r(C) <= 1/4, minus alone": lambda row: _interval(row, row["by_leakage"].get(QUARTER, {}).get("minus_alone")),
    "minus alone with the prefix": lambda row: _interval(row, row.get("minus_alone_prefix")),
    "minus in-context": lambda row: _interval(row, row.get("minus_in_context")),
    "minus in-context with the prefix": lambda row: _interval(row, row.get("minus_in_context_prefix")),
    "CPU ms per token": lambda row: f"{row['cpu_ms_a_token']:.1f}",
    "first encoding": lambda row: f"{row['reading_cpu_ms_a_token']:.1f}" if "reading_cpu_ms_a_token" in row else "",
    "training, CPU s": lambda row: f"{row['made']['cpu_seconds']:.0f}" if "cpu_seconds" in row["made"] else "",
    "peak MB": lambda row: f"{row['peak_mb'] or 0:,}",
}
#: Columns of the table in the terminal: heading, width and the text of a row's cell.
SHOWN: dict[str, tuple[int, Callable[[dict], str]]] = {
    "bits/byte": (9, lambda row: f"{row['bits_per_byte']:.3f}"),
    "minus alone": (19, lambda row: _interval(row, row["minus_alone"], short=True)),
    "minus control": (19, lambda row: _interval(row, row.get("minus_random"), CONTROLLED, short=True)),
    "ms/token": (8, lambda row: f"{row['cpu_ms_a_token']:.1f}"),
}


def table(found: Mapping[str, dict], title: str):
    """Make a rich table of the record's rows, at most 80 columns wide: names of contenders, then `SHOWN`."""
    from rich import box
    from rich.table import Table

    out = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 0))
    out.add_column("", width=21)
    for name, (width, _) in SHOWN.items():
        out.add_column(name, width=width)
    for name, row in found.items():
        out.add_row(name, *(cell(row) for _, cell in SHOWN.values()))
    return out


def _interval(row: dict, gap, documents: str = "documents", *, short: bool = False) -> str:
    """Return a difference and its interval, which is left out over few documents. documents: key of their number."""
    if not gap or not any(gap):
        return ""
    if row[documents] < LEAST_DOCUMENTS:
        return f"{gap[0]:+.3f}"
    low, high = (f"{value:+.2f}" if short else f"{value:+.3f}" for value in gap[1:])
    return f"{gap[0]:+.3f} {low}..{high}" if short else f"{gap[0]:+.3f} ({low} to {high})"


def markdown(made: Mapping) -> str:
    """Return a record as a paragraph and a table of Markdown."""
    library, rows = made["library"], made["contenders"]
    scored = {name: part["share_of_bytes"] for name, part in rows["alone"]["by_leakage"].items()}
    share = library["bytes_by_leakage"] | scored  # a run may score only the first of the held-out documents
    lines = [
        f"**{made['corpus']}**: {rows['alone']['documents']} held-out documents, at most "
        f"{made['plan']['held_bytes']} characters of each; library of {library['documents']:,} documents, "
        f"{library['tokens']:,} tokens, {len(library['leaks_dropped'])} leaks dropped; "
        f"{1 - share['r(C) <= 0.5']:.0%} of the bytes share more than half of their chunk with a neighbour, "
        f"{share['r(C) <= 0.25']:.0%} at most a quarter.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
    ]
    lines += ["| " + " | ".join(cell(row) for cell in COLUMNS.values()) + " |" for row in rows.values()]
    if by := rows.get("own-all", {}).get("by_similarity"):
        bands = ((name, at["minus_alone"][0], at["share_of_bytes"]) for name, at in by.items())
        said = ", ".join(f"{name} {gap:+.3f} ({share:.0%} of the bytes)" for name, gap, share in bands)
        lines += ["", f"Every passage, nothing trained, minus alone, by the passage's similarity: {said}."]
    return "\n".join(lines) + "\n"


def draw(records: Sequence[Mapping], folder: Path) -> None:
    """Write compare.md and compare.png of records into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compare.md").write_text("\n".join(markdown(made) for made in records))
    plot({made["corpus"]: made["contenders"] for made in records}, folder / "compare.png")


#: Colours of contenders; the shared prefix changes the marker, not the colour. Records may have contenders of earlier
#: versions, which are drawn in yellow or as stars.
COLOURS = ("#000000", "#777777", "#cc79a7", "#e69f00", "#56b4e9", "#0072b2", "#009e73", "#d55e00", "#882255")
FAMILIES = [name for name in CONTENDERS if "+" not in name]
MARKERS = {"": "o", "prefix": "s"}


def plot(records: Mapping[str, Mapping[str, dict]], path: Path) -> None:
    """Plot the gain over the decoder alone against the CPU time per token, one panel per corpus, into an image file.

    Hollow marks have the control's neighbours. A dotted line to the right is the first encoding of neighbours.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.5 + 3.6 * len(records), 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = np.atleast_1d(figure.subplots(1, len(records)))
    for axes, (title, found) in zip(panels, records.items()):
        for name, row in found.items():
            family, _, added = name.partition("+")
            colour, marker = dict(zip(FAMILIES, COLOURS)).get(family, "#f0e442"), MARKERS.get(added, "*")
            at = row["cpu_ms_a_token"]
            gap, low, high = (-value for value in row["minus_alone"])
            bars = [[gap - high], [low - gap]] if row["documents"] >= LEAST_DOCUMENTS else None
            axes.errorbar(at, gap, bars, marker=marker, color=colour, label=row["title"], capsize=2)
            axes.plot([at, at + row.get("reading_cpu_ms_a_token", 0)], [gap, gap], color=colour, linestyle=":")
            if "random_minus_alone" in row:
                axes.plot(at, -row["random_minus_alone"][0], marker=marker, markerfacecolor="none", color=colour)
        axes.axhline(0, color="black", linewidth=0.6)
        axes.set(title=title, xlabel="CPU milliseconds per scored token\n(dotted: first encoding)", xlim=(0, None))
    panels[0].set_ylabel("bits per byte below the decoder alone\n(bars: 95%; hollow: control)")
    most = panels[int(np.argmax([len(found) for found in records.values()]))]
    figure.legend(*most.get_legend_handles_labels(), loc="outside lower center", ncols=len(records), fontsize=8)
    figure.savefig(path, dpi=150)
