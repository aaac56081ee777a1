"""Panels of the pictures. Each of OPERATORS has one colour and each type one marker in all of them."""

from . import summary

OPERATORS = ("chunked_cross_attention", "relative_attention", "relative_logits", "topk_chunks", "leaky_average")
#: Okabe and Ito's palette, for colour-blind readers, on a light or dark ground
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # the last: any other operator
MARKERS = {"float32": "o", "bfloat16": "s", "float16": "^"}
SMALL = 7  # points
INK, FAINT = "#333334", "#8a8a8b"  # text and axes, lines behind the data; the page replaces both by its own colours


def colour(op: str) -> str:
    return COLOURS[OPERATORS.index(op) if op in OPERATORS else len(OPERATORS)]


def roofline(axes, rows: list[summary.ReportRow], roofs: list[tuple[str, float, float]]) -> None:
    """Draw FLOP/s against FLOPs per byte, under the memory's slope and the ceilings of matrix products."""
    from matplotlib.lines import Line2D

    known = [(work, r) for r in rows if (work := r.record["work"]) and work["bytes"] and work["flops"]]
    points = [(work["flops"] / work["bytes"], work["flops"] / r.seconds / 1e9, r.record) for work, r in known]
    for x, y, record in points:
        marker = MARKERS.get(record["dtype"], "x")
        drawn = axes.scatter(x, y, s=24, color=colour(record["op"]), marker=marker, linewidths=0, alpha=0.85)
        drawn.set_gid(f"point:{record['id']}")
    low = min([p[0] for p in points], default=1) / 2
    high = max([p[0] for p in points] + [peak / rate for _, rate, peak in roofs], default=10) * 2
    for name, rate, peak in roofs:
        corner = max(peak / rate, low)
        axes.plot([low, corner, high], [low * rate / 1e9, peak / 1e9, peak / 1e9], color=FAINT, linewidth=1, zorder=0)
        _note(axes, f"{name} {peak / 1e9:.3g}", (high, peak / 1e9), (-2, 2), ha="right")
    if roofs:
        rate = roofs[0][1]
        _note(axes, f"memory {rate / 1e9:.3g} GB/s", (low * 1.2, low * 1.2 * rate / 1e9), (10, -10))
    axes.set(xscale="log", yscale="log", xlabel="FLOPs a byte (fewest bytes)", ylabel="GFLOP/s", title="Roofline")
    ops = list(dict.fromkeys(r.record["op"] for r in rows))
    dtypes = list(dict.fromkeys(r.record["dtype"] for r in rows))
    handles = [Line2D([], [], linestyle="", marker="o", color=colour(k), label=k) for k in ops]
    handles += [Line2D([], [], linestyle="", marker=MARKERS.get(d, "x"), color=INK, label=d) for d in dtypes]
    axes.legend(handles=handles, fontsize=SMALL, loc="lower right", framealpha=0)


def bars(axes, rows: list[summary.ReportRow]) -> None:
    """Draw a bar for each row, its speed-up over the fastest rival. Whiskers show the known spreads."""
    places = range(len(rows))
    lows = [row.rival_speedup - min(row.spread[0], row.rival_speedup) if row.spread else 0 for row in rows]
    highs = [max(row.spread[1], row.rival_speedup) - row.rival_speedup if row.spread else 0 for row in rows]
    values = [row.rival_speedup for row in rows]
    colours = [colour(row.record["op"]) for row in rows]
    lengths = [value - 1 for value in values]  # a bar begins at 1, because the axis is logarithmic
    drawn = axes.barh(places, lengths, left=1, height=0.75, color=colours, alpha=0.85)
    for patch, row in zip(drawn, rows, strict=True):
        patch.set_gid(f"bar:{row.record['id']}")
    axes.errorbar(values, places, xerr=[lows, highs], fmt="none", ecolor=INK, elinewidth=0.8, capsize=1.5)
    axes.axvline(1, color="#d04545", linestyle="--", linewidth=1)
    several = len(dict.fromkeys(row.record["backend"] for row in rows)) > 1
    columns = ("dtype", "mode", "backend") if several else ("dtype", "mode")
    labels = [" ".join([row.record["case"]["name"], *(row.record[name] for name in columns)]) for row in rows]
    axes.set_yticks(places, labels, fontsize=SMALL)
    first = {}
    for place, row, high in zip(places, rows, highs, strict=True):
        _note(axes, f"{row.rival_speedup:.2f}x {row.rival}", (row.rival_speedup + high, place), (3, 0), va="center")
        first.setdefault(row.record["op"], place)
    for place in list(first.values())[1:]:
        axes.axhline(place - 0.5, color=FAINT, linewidth=0.8)
    longest = max(1.0, *map(sum, zip(values, highs, strict=True)))
    shortest = min(1.0, *(value - low for value, low in zip(values, lows, strict=True)))
    # the label behind the longest bar takes a third of the axis
    axes.set(xscale="log", xlim=(0.9 * shortest, longest * (longest / shortest * 1.5) ** 0.5))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.xaxis.set_major_formatter("{x:g}x")
    axes.set_xlabel("speed-up over the fastest baseline; whiskers: p10 to p90")
    axes.set_title(", ".join(first), fontsize=9)


def _note(axes, text: str, place: tuple[float, float], points: tuple[int, int], **options) -> None:
    """Write small text at a place of the data, shifted by `points`."""
    axes.annotate(text, place, points, textcoords="offset points", fontsize=SMALL, color=INK, **options)
