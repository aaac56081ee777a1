"""Gain of a trained model from a larger database and from more neighbours, and the worth of its parts.

    retro-model demo --out demo-out
    retro-model scaling demo-out                              # scaling.json, scaling.png in demo-out
    retro-model scaling demo-out --ablations 600      # trains four small models for so many steps each

The model, its baseline, the database and the held-out text are those of the demonstration in the folder. Source: Figure
1 (middle, right) and appendix D of arXiv 2112.04426.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np

from retro_model import Retro, evaluation
from retro_model.data.subset import subset_neighbours, subset_rows

from .ablations import ablations
from .options import NEIGHBOURS, SHARES
from .options import scaling as parser
from .trained import Trained, open_demo


def curves(
    demo: Trained, *, shares=SHARES, ks=NEIGHBOURS, documents: int | None = None, seed: int = 0, report=print
) -> dict:
    """Bits per byte of the held-out text, by the share of the database and by the number of neighbours.

    shares: of the database's chunks, with the training's number of neighbours. ks: with the whole database. documents:
    of the held-out text, the first so many; None: all. seed: of the documents that a share keeps.
    Returns: {"database": [(share, chunks, bpb)], "neighbours": [(k, bpb)], "off": bpb, "baseline": bpb, "random": bpb,
        "k": k, "gain": the outcome in a sentence}; random: with k random neighbours, the control.
    """
    held_out, database = demo.corpus.validation, demo.corpus.database
    options = {"window": demo.plan.window, "stride": demo.plan.stride}
    options |= {} if documents is None else {"documents": range(min(documents, len(held_out.documents)))}
    k = demo.plan.neighbours

    def bpb(model: Retro, *neighbours) -> float:
        return evaluation.bits_per_byte(evaluation.score(model, held_out, *neighbours, **options))

    out: dict = {"off": bpb(demo.retro), "baseline": bpb(demo.baseline), "k": k, "database": [], "neighbours": []}
    report(f"retrieval off: {out['off']:.4f} bits per byte; baseline: {out['baseline']:.4f}")
    most = np.zeros((0, 0), np.int64)
    for share in sorted(shares):
        rows = subset_rows(database, share, seed=seed)
        neighbours = subset_neighbours(database, held_out, max(ks) if share == 1 else k, rows)
        most = neighbours if share == 1 else most
        out["database"].append((share, len(rows), bpb(demo.retro, neighbours[:, :k], database)))
        report(f"{k} neighbours among {len(rows):,} chunks ({share:.0%}): {out['database'][-1][2]:.4f}")
    if not len(most):
        most = subset_neighbours(database, held_out, max(ks), np.arange(len(database)))
    random = evaluation.random_neighbours(most[:, :k], database, seed)
    control, on = (evaluation.score(demo.retro, held_out, n, database, **options) for n in (random, most[:, :k]))
    out["random"] = evaluation.bits_per_byte(control)
    out["gain"] = evaluation.gain_of_retrieval(on, control, held_out)
    report(f"{k} random neighbours: {out['random']:.4f}. {out['gain']}")
    for number in sorted(ks):
        out["neighbours"].append((number, bpb(demo.retro, most[:, :number], database)))
        report(f"{number} neighbours of the whole database: {out['neighbours'][-1][1]:.4f}")
    return out


def plot(results: dict, path: Path) -> None:
    """Two panels as in Figure 1: bits per byte over the database's chunks, and over the neighbours."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    left.plot(
        [c for _, c, _ in results["database"]],
        [b for *_, b in results["database"]],
        marker="o",
        label=f"RETRO, {results['k']} neighbours",
    )
    right.plot(
        [k for k, _ in results["neighbours"]],
        [b for _, b in results["neighbours"]],
        marker="o",
        label="RETRO, whole database",
    )
    for axes, label in ((left, "chunks in the database"), (right, "neighbours")):
        axes.axhline(results["off"], color="grey", linestyle="--", label="RETRO off")
        axes.axhline(results["random"], color="grey", linestyle="-.", label="RETRO, random neighbours")
        axes.axhline(results["baseline"], color="black", linestyle=":", label="baseline")
        axes.set(xscale="log", xlabel=label)
        axes.legend(fontsize=8)
    left.set(ylabel="bits per byte")
    right.set_xticks([k for k, _ in results["neighbours"]], [str(k) for k, _ in results["neighbours"]])
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    given = parser().parse_args(arguments)
    begin, demo = time.perf_counter(), open_demo(given.folder)
    if given.ablations is not None:
        results = ablations(
            demo, given.ablations, given.folder / "ablations", seed=given.seed, documents=given.documents
        )
        path = given.folder / "ablations.json"
    else:
        results = curves(demo, shares=given.shares, ks=given.neighbours, documents=given.documents, seed=given.seed)
        path = given.folder / "scaling.json"
        plot(results, given.folder / "scaling.png")
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{time.perf_counter() - begin:.0f} s; {path}")
