"""retro-model rpt cards: train the missing variants, then write a table, a picture and the numbers."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from pathlib import Path

from retro_model.apps.report import Report, as_json
from retro_model.evaluation import rpt as evaluation

from . import cards
from .deck import Deck
from .options import VARIANTS, parser

#: The two lower layers and the chunk attention learn slowly, the embeddings fast. Otherwise the lower layers learn the
#: common part of all cues before the embeddings learn which forms belong to one word, and the words are lost.
RATES = dict.fromkeys(("layers.0.", "layers.1.", "retriever.attention."), 0.1) | {"embedding.": 3.0}
REWORDED = cards.Plan(Deck(words=32, forms=8), steps=450, alpha=30.0, reader=True, candidates=40, rates=RATES)
SMOKE = {"documents": 8, "scored": 4, "steps": 4, "batch_size": 2, "every": 2}
READ = ("own", "teacher", "random", "off")  # sources of neighbours, as `cards.score` names them


def main(arguments: list[str] | None = None) -> None:
    """Run `retro-model rpt`."""
    options = parser().parse_args(arguments)
    plan = REWORDED if options.reworded else cards.Plan()
    if options.smoke:
        plan = dataclasses.replace(plan, deck=dataclasses.replace(plan.deck, showings=8), **SMOKE)
    given = {name: value for name in ("steps", "alpha") if (value := getattr(options, name)) is not None}
    name = "cards-reworded" if options.reworded else "cards"
    variants = options.only or list(VARIANTS)
    run(options.out, dataclasses.replace(plan, **given), name, variants, options.seed, options.minutes)


def run(folder: Path, plan: cards.Plan, name: str, variants: list[str], seed: int, minutes: float) -> None:
    """Train the variants that are not in `folder`/`name`.json. It stops after `minutes`; the same call continues."""
    report, until, path = Report(folder), time.monotonic() + 60 * minutes, folder / f"{name}.json"
    wanted = as_json({"plan": dataclasses.asdict(plan), "seed": seed})
    results = json.loads(path.read_text()) if path.exists() else wanted | {"variants": {}}
    if {k: results[k] for k in wanted} != wanted:
        raise ValueError(f"{path}: made with another plan or seed; delete it or choose another --out")
    path.write_text(json.dumps(results, indent=1) + "\n")  # now, so that a stopped run continues with this plan only
    missing = [v for v in variants if v not in results["variants"]]
    if missing:
        report.say("drawing documents and their supervision")
        train = cards.Documents.draw(plan, plan.documents, 2 * seed + 1)
        scored = cards.Documents.draw(plan, plan.scored, 2 * seed + 2)
    for variant in missing:

        def show(row, variant=variant):
            shown = ", ".join(f"{key} {row[key]:.2f}" for key in (*READ, "recall") if key in row)
            report.say(f"{variant}: step {row['step']}, {row['seconds']:.0f} s: {shown}")

        place = folder / f"{name}-training" / variant.replace(", ", "-").replace(" ", "-")
        try:
            how = {"seed": seed, "until": until, "report": show}
            model, history = cards.fit(VARIANTS[variant], plan, train, scored, place, **how)
        except cards.Stopped as stopped:
            report.say(f"stopped at {stopped}; the same command continues")
            break
        results["variants"][variant] = history
        shutil.rmtree(place)
        if variant == "RPT":
            few = scored.rows(slice(4))
            results["share of retrieval"] = evaluation.retrieval_share(model, few.tokens, few.lessons)
            cards.keep(folder / f"{name}-model", plan, model, scored)
        path.write_text(json.dumps(results, indent=1) + "\n")
    if results["variants"]:
        tell(report, results, name)


def tell(report: Report, results: dict, name: str) -> None:
    """Print the last scores of every variant; draw nats a far token and recall by training step."""
    rows = []
    for variant, history in results["variants"].items():
        last = history[-1]
        cells = [f"{last[key]:.2f}" if key in last else "" for key in (*READ, "recall")]
        whole = last.get("own, all", last["off, all"])
        rows.append([variant, *cells, f"{whole:.2f}", last["step"], f"{last['seconds']:.0f}"])
    columns = ["variant", *READ, "recall", "all tokens", "steps", "seconds"]
    report.table("nats a far token, by source of neighbours", columns, rows)
    if "share of retrieval" in results:
        shares = ", ".join(f"{value:.0%} of {what}" for what, value in results["share of retrieval"].items())
        report.say(f"retrieval takes {shares}")
    figure, (left, right) = report.figure(f"{name}.png", 2, figsize=(11, 4), layout="constrained")
    for variant, history in results["variants"].items():
        steps, key = [row["step"] for row in history], "own" if "own" in history[-1] else "off"
        left.plot(steps, [row[key] for row in history], label=variant)
        if "recall" in history[-1]:
            right.plot(steps, [row["recall"] for row in history], label=variant)
    left.set(xlabel="step", ylabel="nats a far token, own neighbours", ylim=(0, None))
    right.set(xlabel="step", ylabel="recall: a right chunk among the K", ylim=(0, 1.02))
    left.legend(fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.save()
