"""Plots as SVG text, without a plotting library: scatter with logarithmic axes, bars, lines."""

from __future__ import annotations

import math
from html import escape

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 760, 380, 80, 50, 20, 20
COLOURS = ("#3465a4", "#cc5500", "#4e9a06", "#75507b", "#a40000", "#888a85", "#c4a000", "#06989a")


def colour(names: list[str], name: str) -> str:
    return COLOURS[names.index(name) % len(COLOURS)]


def _decades(values: list[float]) -> tuple[int, int]:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def roofline(points: list[tuple[float, float, str, str]], roofs: list[tuple[str, float, float]]) -> str:
    """points: (FLOPs a byte, FLOP/s, group, label); roofs: (name, bytes/s, FLOP/s). Both axes logarithmic."""
    if not points:
        return ""
    xs = [p[0] for p in points] + [peak / bandwidth for _, bandwidth, peak in roofs]
    ys = [p[1] for p in points] + [peak for _, _, peak in roofs]
    (x0, x1), (y0, y1) = _decades(xs), _decades(ys)

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (math.log10(x) - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - (math.log10(max(y, 10.0**y0)) - y0) / (y1 - y0) * (HEIGHT - BOTTOM - TOP)

    groups = list(dict.fromkeys(p[2] for p in points))
    parts = _frame("FLOPs a byte", "FLOP/s")
    for e in range(x0, x1 + 1):
        parts.append(_text(at(10.0**e, 10.0**y0)[0], HEIGHT - BOTTOM + 16, f"1e{e}", "middle"))
    for e in range(y0, y1 + 1):
        parts.append(_text(LEFT - 6, at(10.0**x0, 10.0**e)[1] + 4, f"1e{e}", "end"))
    for name, bandwidth, peak in roofs:
        corner = peak / bandwidth
        left = at(10.0**x0, bandwidth * 10.0**x0)
        line = [left, at(corner, peak), at(10.0**x1, peak)] if corner > 10.0**x0 else [at(10.0**x0, peak), at(10.0**x1, peak)]
        parts.append(f'<polyline fill="none" stroke="#555" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in line)}"/>')
        parts.append(_text(line[-1][0] - 4, line[-1][1] - 5, name, "end"))
    for x, y, group, label in points:
        cx, cy = at(x, y)
        parts.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="4" fill="{colour(groups, group)}"><title>{escape(label)}</title></circle>')
    return _svg(parts + _legend(groups))


def bars(values: list[tuple[str, float, str]]) -> str:
    """values: (label, ratio, group), one horizontal bar each from 1, leftwards below it; the axis is logarithmic."""
    if not values:
        return ""
    height, label_width = 18 * len(values) + 40, 380
    groups = list(dict.fromkeys(group for _, _, group in values))
    logs = [math.log10(v) for _, v, _ in values] + [0.0]
    low, high = min(logs), max(max(logs), min(logs) + 0.1)
    scale = (WIDTH - label_width - 70) / (high - low)
    one = label_width - low * scale
    parts = []
    for i, (label, value, group) in enumerate(values):
        y, end = 10 + 18 * i, one + math.log10(value) * scale
        parts.append(_text(label_width - 6, y + 11, label, "end"))
        parts.append(f'<rect x="{min(one, end):.1f}" y="{y}" width="{abs(end - one):.1f}" height="13" fill="{colour(groups, group)}"/>')
        parts.append(_text(max(one, end) + 4, y + 11, f"{value:.2f}x", "start"))
    parts.append(f'<line x1="{one:.1f}" x2="{one:.1f}" y1="4" y2="{height - 24}" stroke="#a40000" stroke-dasharray="4 3"/>')
    return _svg(parts, height)


def lines(series: dict[str, list[float]]) -> str:
    """One line a name over the order of its measurements, each relative to its first."""
    drawn = {name: [v / values[0] for v in values] for name, values in series.items() if len(values) > 1}
    if not drawn:
        return ""
    longest, top = max(map(len, drawn.values())), max(max(v) for v in drawn.values()) * 1.1
    names = list(drawn)
    parts = _frame("measurement", "time relative to the first")
    parts += [_text(LEFT - 6, _height(top * i / 4, top) + 4, f"{top * i / 4:.2f}", "end") for i in range(5)]
    for name, values in drawn.items():
        step = (WIDTH - LEFT - RIGHT) / max(longest - 1, 1)
        path = " ".join(f"{LEFT + i * step:.1f},{_height(v, top):.1f}" for i, v in enumerate(values))
        parts.append(
            f'<polyline fill="none" stroke="{colour(names, name)}" stroke-width="2" points="{path}"><title>{escape(name)}</title></polyline>'
        )
    return _svg(parts)


def _height(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - value / top * (HEIGHT - BOTTOM - TOP)


def _frame(x_label: str, y_label: str) -> list[str]:
    box = f'<rect x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" height="{HEIGHT - BOTTOM - TOP}" fill="none" stroke="#bbb"/>'
    turned = f'<text transform="translate(16,{HEIGHT / 2}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'
    return [box, _text((LEFT + WIDTH) / 2, HEIGHT - 10, x_label, "middle"), turned]


def _legend(groups: list[str]) -> list[str]:
    parts = []
    for i, group in enumerate(groups):
        y = TOP + 16 + 16 * i
        parts.append(f'<circle cx="{LEFT + 14}" cy="{y - 4}" r="4" fill="{colour(groups, group)}"/>')
        parts.append(_text(LEFT + 24, y, group, "start"))
    return parts


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(parts: list[str], height: int = HEIGHT) -> str:
    style = 'font-family="sans-serif" font-size="11"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" {style}>{"".join(parts)}</svg>'
