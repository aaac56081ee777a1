"""Scores and costs of contenders, kept as they come; the record, table and picture that are made of them."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from retro_model import evaluation
from retro_model.evaluation import Scores

ALPHAS = (0.25, 0.5)
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Result:
    """A contender's scores, with random neighbours too where it retrieves; facts: settings and cost."""

    scores: Scores
    random: Scores | None
    facts: dict

    def save(self, path: Path) -> None:
        """Atomically: the file is there whole, or not at all."""
        arrays = _arrays("true", self.scores) | (_arrays("random", self.random) if self.random else {})
        part = path.with_suffix(".part.npz")
        np.savez(part, facts=json.dumps(self.facts), **arrays)
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> Result:
        with np.load(path) as kept:
            parts = [
                Scores(*(kept[f"{name}-{field.name}"] for field in dataclasses.fields(Scores)))
                for name in ("true", "random")
                if f"{name}-nats" in kept
            ]
            return cls(parts[0], parts[1] if len(parts) > 1 else None, json.loads(str(kept["facts"])))


def _arrays(name: str, scores: Scores) -> dict[str, np.ndarray]:
    return {f"{name}-{field}": array for field, array in dataclasses.asdict(scores).items()}


class Cost:
    """Context manager: CPU seconds of all threads within, and the largest resident memory in MB (None where the system
    does not tell)."""

    def __enter__(self) -> Cost:
        try:
            RESET.write_text("5")  # the peak begins anew; Linux alone
            self.resets = True
        except OSError:
            self.resets = False
        self.began = time.process_time()
        return self

    def __exit__(self, *_) -> None:
        self.cpu_seconds = round(time.process_time() - self.began, 2)
        found = re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text()) if self.resets else None
        self.peak_mb = int(found[1]) // 1024 if found else None


def rows(results: Mapping[str, Result], titles: Mapping[str, str], store, leakage: np.ndarray) -> dict[str, dict]:
    """What the record says of each contender; differences are (difference, 2.5%, 97.5% over documents)."""
    alone, found = results["alone"].scores, {}
    for name, result in results.items():
        scores, facts = result.scores, dict(result.facts)
        tokens = int(scores.tokens.sum())
        row = {
            "title": titles[name],
            "bits_per_byte": round(evaluation.bits_per_byte(scores), 4),
            "minus_alone": _rounded(evaluation.bootstrap(scores, alone, store)),
            "tokens_per_cpu_second": round(tokens / facts["cpu_seconds"], 1),
        }
        if result.random is not None:
            same = _restricted(scores, result.random)
            row["random_minus_alone"] = _rounded(
                evaluation.bootstrap(result.random, _restricted(alone, result.random), store)
            )
            row["minus_random"] = _rounded(evaluation.bootstrap(same, result.random, store))
            row["random_documents"] = len(np.unique(np.asarray(store.chunk_doc)[result.random.bytes > 0]))
        row["by_leakage"] = {
            f"r(C) <= {alpha}": {"minus_alone": _rounded(gap), "share_of_bytes": round(share, 3)}
            for alpha, *gap, share in evaluation.gains(scores, alone, store, leakage, alphas=ALPHAS)
        }
        found[name] = row | facts
    return found


def _restricted(scores: Scores, like: Scores) -> Scores:
    """The scores of the chunks that `like` scored."""
    kept = like.bytes > 0
    return Scores(scores.nats * kept, scores.tokens * kept, scores.bytes * kept)


def _rounded(gap) -> list[float]:
    return [round(float(value), 4) for value in gap]


def table(found: Mapping[str, dict], title: str):
    """A rich table of the record's rows."""
    from rich.table import Table

    columns = ("", "bits a byte", "minus alone (95%)", "true minus random", "random minus alone", "r(C) <= 1/4")
    out = Table(*columns, "CPU s", "tokens/s", "peak MB", "training s", title=title)
    for row in found.values():
        quarter = row["by_leakage"].get("r(C) <= 0.25", {}).get("minus_alone")
        out.add_row(
            row["title"],
            f"{row['bits_per_byte']:.4f}",
            _interval(row["minus_alone"]),
            _interval(row.get("minus_random")),
            _interval(row.get("random_minus_alone")),
            _interval(quarter),
            f"{row['cpu_seconds']:.0f}",
            f"{row['tokens_per_cpu_second']:.0f}",
            f"{row['peak_mb'] or 0:,}",
            f"{row.get('training', {}).get('cpu_seconds', 0):.0f}",
        )
    return out


def _interval(gap) -> str:
    return "" if gap is None else f"{gap[0]:+.3f} ({gap[1]:+.3f} to {gap[2]:+.3f})"


COLOURS = ("#000000", "#777777", "#cc79a7", "#e69f00", "#56b4e9", "#0072b2", "#009e73", "#d55e00", "#f0e442")


def plot(records: Mapping[str, Mapping[str, dict]], path: Path) -> None:
    """Gain over the decoder alone against CPU seconds a token, a panel a corpus; an image file. Hollow: with random
    neighbours."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.5 + 3.6 * len(records), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = np.atleast_1d(figure.subplots(1, len(records), sharey=True))
    for axes, (title, found) in zip(panels, records.items()):
        for colour, row in zip(COLOURS, found.values()):
            at = 1000 / row["tokens_per_cpu_second"]
            gap, low, high = (-value for value in row["minus_alone"])
            axes.errorbar(at, gap, [[gap - high], [low - gap]], marker="o", color=colour, label=row["title"], capsize=2)
            if "random_minus_alone" in row:
                axes.plot(at, -row["random_minus_alone"][0], marker="o", markerfacecolor="none", color=colour)
        axes.axhline(0, color="black", linewidth=0.6)
        axes.set(title=title, xlabel="CPU milliseconds a scored token", xscale="log")
    panels[0].set_ylabel("bits per byte below the decoder alone\n(bars: 95% over documents; hollow: random)")
    panels[0].legend(fontsize=7)
    figure.savefig(path, dpi=150)
