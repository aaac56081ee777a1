"""Page of a history: a curve for each case over its commits, with its change points."""

from html import escape
from pathlib import Path

from . import changes, summary

WIDTH, HEIGHT, MARGIN = 720, 160, 24  # pixels of a curve
TITLE = "History of the ops"
STYLE = Path(__file__).resolve().parent / "page.css"


def page(series: dict[tuple[str, str], list[dict]]) -> str:
    """Return the page of `series`: (id, machine) -> records in order."""
    curves = "".join(_figure(name, where, rows) for (name, where), rows in series.items())
    head = f'<meta charset="utf-8"><title>{TITLE}</title><style>{STYLE.read_text(encoding="utf-8")}</style>'
    body = f"<h1>{TITLE}</h1>{curves}"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def commit(record: dict) -> str:
    sha = record["git"]["sha"]
    return (sha[:9] + ("+" if record["git"]["dirty"] else "")) if sha else record["at"][:10]


def _figure(name: str, where: str, rows: list[dict]) -> str:
    times = [one["time"]["median"] for one in rows]
    top = 1.1 * max(times)
    step = (WIDTH - 2 * MARGIN) / max(len(times) - 1, 1)
    places = [(MARGIN + i * step, HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * t / top) for i, t in enumerate(times)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{escape(commit(one))}: {summary.duration(t)}</title></circle>'
        for (x, y), one, t in zip(places, rows, times, strict=True)
    )
    marks = "".join(
        f'<line class="change" x1="{places[i][0]:.1f}" x2="{places[i][0]:.1f}" y1="0" y2="{HEIGHT}" stroke="#c33" '
        f'stroke-dasharray="4"/><text x="{places[i][0] + 4:.1f}" y="12" fill="#c33" font-size="11">'
        f"{escape(commit(rows[i]))} {times[i] / times[i - 1]:.2f}x</text>"
        for i in changes.points(times)
    )
    said = f"{summary.duration(times[0])} to {summary.duration(times[-1])}, {changes.drift(times):.2f}x"
    return (
        f"<section><h2>{escape(name)}</h2><p class=machine>{escape(where)}: {said}</p>"
        f'<svg role="img" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"><polyline points="{line}" fill="none" '
        f'stroke="currentColor"/>{dots}{marks}</svg></section>'
    )
