"""Table that compares models, and intervals of their differences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from .scoring import Scores, bits_per_byte, document_rows


def bootstrap(
    scores: Scores, other: Scores, store, *, samples: int = 1000, seed: int = 0
) -> tuple[float, float, float]:
    """bpb(scores) - bpb(other), and the 2.5% and 97.5% percentiles of that difference over resampled documents.

    Tokens of one document are not independent, so whole documents are drawn.
    """
    spans = document_rows(store)
    bits = [[s.nats[a:b].sum() / math.log(2) for s in (scores, other)] for a, b in spans]
    sums = np.array([[*pair, scores.bytes[a:b].sum()] for pair, (a, b) in zip(bits, spans)])
    sums = sums[sums[:, 2] > 0]
    draws = np.random.default_rng(seed).integers(len(sums), size=(samples, len(sums)))
    totals = sums[draws].sum(1)
    gaps = (totals[:, 0] - totals[:, 1]) / totals[:, 2]
    low, high = np.percentile(gaps, [2.5, 97.5])
    return bits_per_byte(scores) - bits_per_byte(other), float(low), float(high)


def table(
    results: Mapping[str, Scores], leakage: np.ndarray | None = None, alphas: Sequence[float] = (1.0, 0.5, 0.125)
):
    """Make a rich table, one model a row: bits-per-byte, perplexity a token, and bpb at each alpha below 1."""
    from rich.table import Table

    shown = [a for a in alphas if a < 1] if leakage is not None else []
    out = Table("model", "bits per byte", "perplexity", *[f"bpb({a:g})" for a in shown], title="Validation")
    for name, s in results.items():
        perplexity = math.exp(s.nats.sum() / max(1, s.tokens.sum()))
        by_leakage = [f"{bits_per_byte(s, leakage, a):.4f}" for a in shown]
        out.add_row(name, f"{bits_per_byte(s):.4f}", f"{perplexity:.2f}", *by_leakage)
    return out
