"""The plots as one PNG, with matplotlib (the one optional dependency of the reports)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .. import record as records_module
from . import html, summary
from .svg import colour


def write(records: list[dict[str, Any]], path: Path) -> None:
    """Roofline scatter, ratio bars and history, one below the other. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    latest = list(records_module.latest(records).values())
    rows = [row for row in summary.rows(latest) if row.seconds is not None]
    bars, history = html.ratios(rows), {k: v for k, v in html.history(records).items() if len(v) > 1}
    heights = [5, max(1.0, 0.25 * len(bars)), 4 if history else 0.1]
    figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(11, sum(heights)), height_ratios=heights, layout="constrained")
    _roofline(top, html.scatter(rows), html.roofs(latest))
    groups = list(dict.fromkeys(group for _, _, group in bars))
    middle.barh([b[0] for b in bars][::-1], [b[1] for b in bars][::-1], color=[colour(groups, b[2]) for b in bars][::-1])
    middle.set_xscale("log")
    middle.axvline(1, color="#a40000", linestyle="--")
    middle.set_xlabel("speed-up over the fastest baseline that computes the same")
    middle.tick_params(labelsize=7)
    bottom.set_visible(bool(history))
    for name, values in history.items():
        bottom.plot([v / values[0] for v in values], label=name)
    bottom.set_ylabel("time relative to the first")
    figure.suptitle("; ".join(summary.machine(latest)[:1]), fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _roofline(axes, points, roofs) -> None:
    groups = list(dict.fromkeys(p[2] for p in points))
    for group in groups:
        mine = [p for p in points if p[2] == group]
        axes.scatter([p[0] for p in mine], [p[1] for p in mine], s=18, color=colour(groups, group), label=group)
    low = min([p[0] for p in points], default=1) / 2
    high = max([p[0] for p in points] + [peak / bandwidth for _, bandwidth, peak in roofs], default=10) * 2
    for name, bandwidth, peak in roofs:
        corner = peak / bandwidth
        axes.plot([min(low, corner), corner, max(high, corner)], [min(low, corner) * bandwidth, peak, peak], color="#555", linewidth=1)
        axes.annotate(name, (max(high, corner), peak), ha="right", va="bottom", fontsize=7)
    axes.set(xscale="log", yscale="log", xlabel="FLOPs a byte", ylabel="FLOP/s")
    if groups:
        axes.legend(fontsize=7)
