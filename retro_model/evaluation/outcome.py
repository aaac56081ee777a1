"""Outcome of a run: intervals of differences, differences by leakage as a picture, a sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from .scoring import Scores, bits_per_byte, document_rows

LEAST_BYTES = 0.05  # share of the bytes below which a point of the curve says nothing
ALPHAS = tuple(i / 16 for i in range(17))


def bootstrap(scores: Scores, other: Scores, store, *, samples: int = 1000) -> tuple[float, float, float]:
    """bpb(scores) - bpb(other), and the 2.5% and 97.5% percentiles of that difference over resampled documents.

    Tokens of one document are not independent, so whole documents are drawn.
    """
    spans = document_rows(store)
    bits = [[s.nats[a:b].sum() / math.log(2) for s in (scores, other)] for a, b in spans]
    sums = np.array([[*pair, scores.bytes[a:b].sum()] for pair, (a, b) in zip(bits, spans)])
    sums = sums[sums[:, 2] > 0]
    draws = np.random.default_rng(0).integers(len(sums), size=(samples, len(sums)))
    totals = sums[draws].sum(1)
    gaps = (totals[:, 0] - totals[:, 1]) / totals[:, 2]
    low, high = np.percentile(gaps, [2.5, 97.5])
    return bits_per_byte(scores) - bits_per_byte(other), float(low), float(high)


def gains(
    scores: Scores, other: Scores, store, leakage: np.ndarray, *, alphas: Sequence[float] = ALPHAS
) -> list[tuple[float, float, float, float, float]]:
    """bpb(scores) - bpb(other) of chunks with r(C) <= alpha that hold 5% of the bytes, with its interval.

    Returns: (alpha, difference, 2.5% and 97.5% percentiles, share of the bytes) for each such alpha.
    Source: section 2.6 of arXiv 2112.04426; `bootstrap` for the interval.
    """
    rows, total = [], max(1, int(scores.bytes.sum()))
    for alpha in alphas:
        kept = np.asarray(leakage) <= alpha
        share = float(scores.bytes[kept].sum() / total)
        if share >= LEAST_BYTES:
            part, rest = (Scores(s.nats * kept, s.tokens * kept, s.bytes * kept) for s in (scores, other))
            rows.append((float(alpha), *bootstrap(part, rest, store), share))
    return rows


def plot_gains(scores: Scores, others: Mapping[str, Scores], store, leakage: np.ndarray, path) -> None:
    """Write an image: `gains` over each of `others` against alpha, above the share of bytes that each alpha keeps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 5), layout="constrained")
    FigureCanvasAgg(figure)  # no global state, no display
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    top.axhline(0, color="black", linewidth=0.8)
    kept = []
    for (name, other), colour in zip(others.items(), ("#0072b2", "#d55e00", "#009e73")):
        points = np.array(gains(scores, other, store, leakage))
        if not len(points):
            continue
        alpha, gap, low, high, share = points.T
        top.plot(alpha, gap, marker="o", markersize=3, color=colour, label=f"minus {name}")
        top.fill_between(alpha, low, high, color=colour, alpha=0.18, linewidth=0)
        kept = list(zip(alpha, share))
    top.set(ylabel="retrieval on minus the other,\nbits per byte (below 0: on is better)")
    if kept:
        top.legend(title="shaded: 95% over documents")
        bottom.bar(*zip(*kept), width=0.04, color="#777777")
    bottom.set(xlabel="alpha: chunks that share at most this part with a neighbour's text", ylabel="bytes kept")
    bottom.set(ylim=(0, 1.05), xlim=(-0.03, 1.03))
    figure.savefig(path, dpi=150)


LEAST_DOCUMENTS = 10  # of which an interval over documents says something


def gain_of_retrieval(on: Scores, random: Scores, store, control: str = "random neighbours") -> str:
    """Say in a sentence whether retrieval helps: scores with the neighbours minus the control's, and the interval over
    the documents that both have scored. control: its name in the sentence."""
    documents = len(np.unique(np.asarray(store.chunk_doc)[random.bytes > 0]))
    gap, low, high = bootstrap(on, random, store)
    if documents < LEAST_DOCUMENTS:
        found = f"{gap:+.3f} bits per byte, neighbours minus {control}, over {documents} documents"
        return f"Too few to say: {found}; expected at least {LEAST_DOCUMENTS}."
    if low <= 0 <= high:
        said = f"Whether retrieval helps cannot be told: {gap:+.3f} bits per byte"
        interval = f"{low:+.3f} to {high:+.3f}"
    else:
        near, far = sorted((abs(low), abs(high)))
        said = f"Retrieval {'helps' if gap < 0 else 'hurts'} by {abs(gap):.3f} bits per byte"
        interval = f"{near:.3f} to {far:.3f}"
    return f"{said} (95% over documents: {interval}): neighbours against {control}, {documents} documents."
