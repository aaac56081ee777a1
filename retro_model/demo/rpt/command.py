"""retro-model rpt cards | text: trains every variant that is not
there yet, then writes a table, a picture and the numbers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from . import cards, text
from .deck import Deck

REWORDED = Deck(words=32, forms=8)
SMOKE = cards.Plan(Deck(showings=8), documents=8, scored=4, steps=4, batch_size=2, every=2)
TEXT_SMOKE = text.Plan(length=256, train=4, scored=10, vocab_size=300, steps=4, segment=32, candidates=2)
READ = ("own", "teacher", "random", "off")  # whose neighbours


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="retro-model rpt", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("cards", help="made-up documents whose content returns beyond the window")
    command.add_argument(
        "--out", type=Path, default=Path("rpt-out"), help="folder for everything that is made (default: rpt-out)"
    )
    command.add_argument(
        "--reworded", action="store_true", help="a returning cue has other tokens: BM25 cannot find it"
    )
    command.add_argument(
        "--only", nargs="+", choices=list(cards.VARIANTS), metavar="VARIANT", help=f"of {', '.join(cards.VARIANTS)}"
    )
    command.add_argument("--steps", type=int, help="of each variant")
    command.add_argument("--alpha", type=float, help="weight of the retrieval loss (default: 1)")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    command = commands.add_parser("text", help="the standard library's packages, each joined to one document")
    command.add_argument(
        "--out", type=Path, default=Path("rpt-out"), help="folder for everything that is made (default: rpt-out)"
    )
    command.add_argument("--steps", type=int, help="of each model")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    options = parser.parse_args(arguments)
    if options.command == "text":
        plan = TEXT_SMOKE if options.smoke else text.Plan()
        run_text(
            options.out, plan if options.steps is None else dataclasses.replace(plan, steps=options.steps), options.seed
        )
        return
    plan = SMOKE if options.smoke else cards.Plan()
    if options.reworded:
        plan = dataclasses.replace(plan, deck=dataclasses.replace(REWORDED, showings=plan.deck.showings))
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
    )


def run_cards(
    folder: Path, plan: cards.Plan, name: str, variants: list[str], seed: int = 0, quiet: bool = False
) -> dict:
    """Trains the variants that `folder`/`name`.json has not, for this plan and seed; gives all that it then has."""
    folder.mkdir(parents=True, exist_ok=True)
    console, path = Console(quiet=quiet), folder / f"{name}.json"
    wanted = json.loads(json.dumps({"plan": dataclasses.asdict(plan), "seed": seed}))
    results = json.loads(path.read_text()) if path.exists() else wanted | {"variants": {}}
    if {k: results[k] for k in wanted} != wanted:
        raise ValueError(f"{path}: made with another plan or seed; delete it or choose another --out")
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

        model, results["variants"][variant] = cards.fit(cards.VARIANTS[variant], plan, train, scored, seed, report)
        if variant == "RPT":
            cards.keep(folder / f"{name}-model", plan, model, scored)
        path.write_text(json.dumps(results, indent=1) + "\n")
    console.print(table(results))
    draw(results, folder / f"{name}.png")
    return results


def run_text(folder: Path, plan: text.Plan, seed: int = 0, quiet: bool = False) -> dict:
    """The three models and their scores, in `folder`/text.json."""
    folder.mkdir(parents=True, exist_ok=True)
    console = Console(quiet=quiet)
    results = {"plan": dataclasses.asdict(plan), "seed": seed} | text.run(folder, plan, seed, console.print)
    shown = Table(
        "model", "nats a token", title=f"{results['documents']} documents of packages that training has not seen"
    )
    for name, value in results["nats"].items():
        shown.add_row(name, f"{value:.4f}")
    console.print(shown)
    for name, (gap, low, high) in results["differences"].items():
        console.print(f"{name}: {gap:+.4f} nats a token (95% over packages: {low:+.4f} to {high:+.4f})")
    for name, value in results["retrieval"].items():
        console.print(name, value)
    (folder / "text.json").write_text(json.dumps(results, indent=1) + "\n")
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
