"""The plots as one PNG, with matplotlib (the one optional dependency of the reports): the layout; `panels` draws."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from .. import record as records_module
from . import html, panels, summary

WIDTH_IN, DPI = 12.0, 96
COLOURS = 128  # of the palette: a third of the bytes
PLOT_IN, BAR_IN, MARGIN_IN = 4.2, 0.21, 0.9  # height of a plot, of a bar, and of a panel's axis and title


def write(records: list[dict[str, Any]], path: Path) -> None:
    """Roofline, ratio bars with intervals, and, where the records hold several lengths or runs, memory and history.

    Raises ImportError without matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from PIL import Image  # matplotlib needs it too

    latest = list(records_module.latest(records).values())
    rows = [row for row in summary.rows(latest) if row.seconds is not None]
    drawn = [(panels.roofline, (rows, html.roofs(latest)))]
    if series := panels.memory_series(latest):
        drawn.append((panels.memory, (series,)))
    if runs := {name: times for name, times in html.history(records).items() if len(times) > 1}:
        drawn.append((panels.history, (runs,)))
    columns = panels.balanced([row for row in rows if row.rival_speedup is not None])
    bars = max([len(c) for c in columns], default=0)
    pairs = -(-len(drawn) // 2)
    heights = [PLOT_IN] * pairs + ([BAR_IN * bars + MARGIN_IN] if bars else [])
    figure = plt.figure(figsize=(WIDTH_IN, sum(heights) + 0.4), layout="constrained")
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    for place, (draw, given) in enumerate(drawn):
        alone = place == len(drawn) - 1 and place % 2 == 0
        draw(figure.add_subplot(grid[place // 2, :] if alone else grid[place // 2, place % 2]), *given)
    for place, column in enumerate(columns if bars else ()):
        panels.bars(figure.add_subplot(grid[pairs, place]), column, bars)
    figure.suptitle("\n".join(summary.machine(latest)[:2]), fontsize=8)
    drawn_rgb = io.BytesIO()
    figure.savefig(drawn_rgb, dpi=DPI, format="png")
    plt.close(figure)
    Image.open(drawn_rgb).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, format="PNG", optimize=True)
