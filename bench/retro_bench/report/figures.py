"""Pictures by matplotlib: each of the `panels` as SVG for the page."""

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from html import escape, unescape
from typing import Any

from . import panels, summary

PLOT_IN, BAR_IN, MARGIN_IN = 4.2, 0.21, 0.9  # height of a plot, of a bar, and of a panel's axis and title
PAGE_IN = 8.2  # width of a picture on the page


def roofs(records: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """Return (type, bytes/s, FLOP/s) of the last ceilings."""
    ceilings = next((r["ceilings"] for r in reversed(records) if r["ceilings"]), None)
    if ceilings is None:
        return []
    return [(dtype, ceilings["bytes_per_s"], rate) for dtype, rate in ceilings["flops_per_s"].items() if rate]


def bar_height(rows: list[summary.ReportRow]) -> float:
    """Return the height of a panel of bars in inches."""
    return BAR_IN * len(rows) + MARGIN_IN


@contextlib.contextmanager
def _plain() -> Iterator[Any]:
    """Yield pyplot without a display, with placeholder colours. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    form = {"svg.fonttype": "none", "svg.hashsalt": "bench", "font.size": 9, "axes.titlesize": 10}
    with matplotlib.rc_context(dict.fromkeys(names, panels.INK) | form):
        yield plt


def svg(draw: Callable[..., None], *arguments, height: float = PLOT_IN) -> str:
    """Return one panel as SVG in the page's colours. Points and bars have the id of their record as `data-id`."""
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
