"""The pictures: all of them as one PNG for a pull request, or each as
SVG for the page. `panels` draws; matplotlib is needed.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from html import escape, unescape
from pathlib import Path
from typing import Any

from ..records import record as records_module
from . import panels, summary

WIDTH_IN, DPI = 12.0, 96
COLOURS = 128  # of the PNG's palette: a third of the bytes
PLOT_IN, BAR_IN, MARGIN_IN = 4.2, 0.21, 0.9  # height of a plot, of a bar, and of a panel's axis and title
PAGE_IN = 8.2  # width of a picture on the page


def roofs(records: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """(type, bytes/s, FLOP/s) of the last ceilings that were measured."""
    ceilings = next((r["ceilings"] for r in reversed(records) if r["ceilings"]), None)
    if ceilings is None:
        return []
    return [(dtype, ceilings["bytes_per_s"], rate) for dtype, rate in ceilings["flops_per_s"].items() if rate]


@contextlib.contextmanager
def _plain() -> Iterator[Any]:
    """pyplot without a display, in the colours that the page
    exchanges for its own. Raises ImportError without matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    inks = {
        name: panels.INK for name in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    }
    with matplotlib.rc_context(
        {**inks, "svg.fonttype": "none", "svg.hashsalt": "bench", "font.size": 9, "axes.titlesize": 10}
    ):
        yield plt


def svg(draw: Callable[..., None], *arguments, height: float = PLOT_IN) -> str:
    """One panel as SVG that takes the page's colours; what carries an id has it as `data-id`."""
    with _plain() as plt:
        figure, axes = plt.subplots(figsize=(PAGE_IN, height), layout="constrained")
        draw(axes, *arguments)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
        plt.close(figure)
    text = drawn.getvalue()
    text = text[text.index("<svg") :].replace(panels.INK, "currentColor").replace(panels.FAINT, "var(--faint)")
    named = re.compile(r"""<g id=(["'])(?:point|bar):(.*?)\1""")
    text = named.sub(lambda m: f'<g class="mark" data-id="{escape(unescape(m[2]))}"', text)
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return re.sub(r' (width|height)="[^"]*pt"', "", text, count=2).replace("<svg ", '<svg role="img" ', 1)


def write(records: list[dict[str, Any]], path: Path) -> None:
    """Roofline, ratio bars with intervals and, where the records hold several lengths, memory, as one PNG.

    Raises ImportError without matplotlib.
    """
    with _plain() as plt:
        from PIL import Image  # matplotlib needs it too

        latest = list(records_module.latest(records).values())
        rows = [row for row in summary.rows(latest) if row.seconds is not None]
        drawn = [(panels.roofline, (rows, roofs(latest)))]
        if series := panels.memory_series(latest):
            drawn.append((panels.memory, (series,)))
        compared = [row for row in rows if row.rival_speedup is not None]
        columns = panels.balanced(compared)
        bars = max([len(c) for c in columns], default=0)
        pairs = -(-len(drawn) // 2)
        heights = [PLOT_IN] * pairs + ([BAR_IN * bars + MARGIN_IN] if bars else [])
        figure = plt.figure(figsize=(WIDTH_IN, sum(heights) + 0.4), layout="constrained")
        grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
        for place, (draw, arguments) in enumerate(drawn):
            alone = place == len(drawn) - 1 and place % 2 == 0
            draw(figure.add_subplot(grid[place // 2, :] if alone else grid[place // 2, place % 2]), *arguments)
        for place, column in enumerate(columns if bars else ()):
            panels.bars(figure.add_subplot(grid[pairs, place]), column, bars, panels.farthest(compared))
        figure.suptitle("\n".join(summary.machine(latest)[:2]), fontsize=8)
        drawn_rgb = io.BytesIO()
        figure.savefig(drawn_rgb, dpi=DPI, format="png")
        plt.close(figure)
    Image.open(drawn_rgb).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(
        path, format="PNG", optimize=True
    )
