"""retro-model rpt cards | text: trains every variant that is not
there yet, then writes a table, a picture and the numbers.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from retro_model.evaluation import rpt as evaluation

from . import cards, text
from .deck import Deck
from .options import parser
from .parts import Stopped

LOWER = ("layers.0.", "layers.1.", "retriever.attention.")
#: The two lower layers and the chunk attention learn slowly, the embeddings fast. Otherwise the former learn what all
#: cues have in common, and that drowns the words before the embeddings know which forms are one word's.
REWORDED = cards.Plan(
    Deck(words=32, forms=8),
    steps=450,
    alpha=30.0,
    reader=True,
    candidates=40,
    rates=dict.fromkeys(LOWER, 0.1) | {"embedding.": 3.0},
)
SMOKE = cards.Plan(Deck(showings=8), documents=8, scored=4, steps=4, batch_size=2, every=2)
TEXT_SMOKE = text.Plan(length=256, train=4, scored=10, vocab_size=300, steps=4, segment=32, candidates=2)
READ = ("own", "teacher", "random", "off")  # whose neighbours


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    options = parser().parse_args(arguments)
    if options.command == "text":
        plan = dataclasses.replace(TEXT_SMOKE if options.smoke else text.Plan(), corpus=options.corpus)
        if options.steps is not None:
            plan = dataclasses.replace(plan, steps=options.steps)
        run_text(options.out, plan, options.seed, minutes=options.minutes)
        return
    plan = REWORDED if options.reworded else cards.Plan()
    if options.smoke:
        small = {name: getattr(SMOKE, name) for name in ("documents", "scored", "steps", "batch_size", "every")}
        plan = dataclasses.replace(plan, deck=dataclasses.replace(plan.deck, showings=SMOKE.deck.showings), **small)
    if options.steps is not None:
        plan = dataclasses.replace(plan, steps=options.steps)
    if options.alpha is not None:
        plan = dataclasses.replace(plan, alpha=options.alpha)
    run_cards(
        options.out,
        plan,
        "cards-reworded" if options.reworded else "cards",
        options.only or list(cards.VARIANTS),
        options.seed,
        minutes=options.minutes,
    )


def run_cards(
    folder: Path,
    plan: cards.Plan,
    name: str,
    variants: list[str],
    seed: int = 0,
    quiet: bool = False,
    minutes: float = math.inf,
) -> dict:
    """Trains the variants that `folder`/`name`.json has not, for this plan and seed; gives all that it then has. After
    `minutes` training stops, and the same call goes on."""
    folder.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * minutes
    console, path = Console(quiet=quiet), folder / f"{name}.json"
    wanted = json.loads(json.dumps({"plan": dataclasses.asdict(plan), "seed": seed}))
    results = json.loads(path.read_text()) if path.exists() else wanted | {"variants": {}}
    if {k: results[k] for k in wanted} != wanted:
        raise ValueError(f"{path}: made with another plan or seed; delete it or choose another --out")
    path.write_text(json.dumps(results, indent=1) + "\n")
    missing = [v for v in variants if v not in results["variants"]]
    if missing:
        with console.status("documents and their lessons"):
            train, scored = (
                cards.Documents.draw(plan, plan.documents, 2 * seed + 1),
                cards.Documents.draw(plan, plan.scored, 2 * seed + 2),
            )
    for variant in missing:

        def report(row, variant=variant):
            shown = ", ".join(f"{key} {row[key]:.2f}" for key in (*READ, "recall") if key in row)
            console.print(f"{variant}: step {row['step']}, {row['seconds']:.0f} s: {shown}")

        place = folder / f"{name}-training" / variant.replace(", ", "-").replace(" ", "-")
        how = {"seed": seed, "until": until, "report": report}
        try:
            model, history = cards.fit(cards.VARIANTS[variant], plan, train, scored, place, **how)
        except Stopped as stopped:
            console.print(f"stopped at {stopped}; the same command goes on")
            break
        results["variants"][variant] = history
        shutil.rmtree(place)
        if variant == "RPT":
            share = evaluation.retrieval_share(model, scored.tokens[:4], scored.lessons.rows(slice(4)))
            results["share of retrieval"] = share
            cards.keep(folder / f"{name}-model", plan, model, scored)
        path.write_text(json.dumps(results, indent=1) + "\n")
    if not results["variants"]:
        return results
    console.print(table(results))
    if "share of retrieval" in results:
        shares = ", ".join(f"{value:.0%} of {what}" for what, value in results["share of retrieval"].items())
        console.print(f"retrieval takes {shares}")
    draw(results, folder / f"{name}.png")
    return results


def run_text(
    folder: Path, plan: text.Plan, seed: int = 0, quiet: bool = False, minutes: float = math.inf
) -> dict | None:
    """The three models and their scores, in `folder`/`corpus`.json; None where time was up before."""
    folder, console = folder / f"text-{plan.corpus}", Console(quiet=quiet)
    folder.mkdir(parents=True, exist_ok=True)
    path, wanted = folder / "plan.json", json.loads(json.dumps({"plan": dataclasses.asdict(plan), "seed": seed}))
    if path.exists() and json.loads(path.read_text()) != wanted:
        raise ValueError(f"{path}: made with another plan or seed; delete its folder or choose another --out")
    path.write_text(json.dumps(wanted, indent=1) + "\n")
    try:
        results = wanted | text.run(folder, plan, seed, console.print, minutes)
    except Stopped as stopped:
        console.print(f"stopped at {stopped}; the same command goes on")
        return None
    (folder / "text.json").write_text(json.dumps(results, indent=1) + "\n")
    shown = Table("model", "nats a token", title=f"{results['documents']} documents that training has not seen")
    for name, value in results["nats"].items():
        shown.add_row(name, f"{value:.4f}")
    console.print(shown)
    for name, found in results["differences"].items():
        for unit, (gap, low, high) in found.items():
            console.print(f"{name}: {gap:+.4f} nats a token (95% over {unit}: {low:+.4f} to {high:+.4f})")
    for name, value in results["retrieval"].items():
        console.print(name, value)
    return results


def table(results: dict) -> Table:
    """The last score of every variant."""
    shown = Table(
        "variant",
        *READ,
        "recall",
        "all tokens",
        "steps",
        "seconds",
        title="nats a far token, by whose neighbours are read",
    )
    for name, history in results["variants"].items():
        last = history[-1]
        cells = [f"{last[key]:.2f}" if key in last else "" for key in (*READ, "recall")]
        whole = last.get("own, all", last["off, all"])
        shown.add_row(name, *cells, f"{whole:.2f}", str(last["step"]), f"{last['seconds']:.0f}")
    return shown


def draw(results: dict, path: Path) -> None:
    """Nats a far token and recall along the training, one line a variant."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, history in results["variants"].items():
        steps, key = [row["step"] for row in history], "own" if "own" in history[-1] else "off"
        left.plot(steps, [row[key] for row in history], label=name)
        if "recall" in history[-1]:
            right.plot(steps, [row["recall"] for row in history], label=name)
    left.set(xlabel="step", ylabel="nats a far token, own neighbours", ylim=(0, None))
    right.set(xlabel="step", ylabel="recall: a right chunk among the K", ylim=(0, 1.02))
    left.legend(fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
