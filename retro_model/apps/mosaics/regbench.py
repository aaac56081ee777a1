"""RegBench: Memory Mosaics, a rotary transformer and in-context n-grams learn an automaton's language from its words.

Every sequence has an automaton of its own: training teaches to learn in context, and the test's automata are new. Both
models have the same number of parameters and train on the same batches in the same order.

Source: Zhang et al., arXiv 2405.06394, section 5 and figure 11; Akyurek et al., arXiv 2401.12973.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import torch
from torch import nn

from retro_model import training
from retro_model.apps.report import Report

from . import automata, contest
from .options import RegBenchPlan as Plan

MODELS = (contest.MOSAICS, "transformer")
METRICS = {"accuracy": "Share of predictions that the automaton allows", "tv": "Total variation to its distribution"}
TEST_SEED, TUNING_SEED, TRAINING_SEED = 1, 2, 3
ORDERS = (1, 2, 3, 4)


@torch.no_grad()
def predictions(model: nn.Module, rows: list[automata.Sequence]) -> list[np.ndarray]:
    """Return probabilities [N,18] of the next symbol after each token of each row."""
    model.eval()
    predicted = []
    for first in range(0, len(rows), 25):
        tokens, _ = automata.padded(rows[first : first + 25])
        predicted.extend(model(tokens)[..., automata.FIRST_SYMBOL :].softmax(-1).numpy())
    return [p[: len(row.tokens)] for p, row in zip(predicted, rows)]


def stream(rows: list[automata.Sequence], batch_size: int, seed: int):
    """Iterate over batches for ever; every epoch visits all rows in a new random order."""
    random = np.random.default_rng(seed)
    while True:
        order = random.permutation(len(rows))
        for first in range(0, len(order) - batch_size + 1, batch_size):
            yield training.Batch(*automata.padded([rows[i] for i in order[first : first + batch_size]]))


def fit(name: str, plan: Plan, rate: float, seed: int, rows, scored_on, others, quiet: bool) -> dict:
    """Train one model; return the scores along the way, the accuracy on `others` at the end, seconds, parameters."""
    # a transformer with the mosaics' initial weights has a loss of 1.88 after 400 steps, with GPT-2's 1.98
    model = contest.make(name, plan, automata.VOCAB, seed, initial_std=None)
    points = [*range(0, plan.steps, max(1, plan.steps // plan.scored_steps)), plan.steps]
    look = lambda model: automata.score(scored_on, predictions(model, scored_on))  # noqa: E731
    title, batches = f"{name}, rate {rate:g}, seed {seed}", stream(rows, plan.batch_size, seed)
    facts = contest.fit(model, batches, plan, rate, points, look, title, quiet)
    return facts | {"tuning": automata.score(others, predictions(model, others))["accuracy"], "seed": seed}


def fits(name: str, plan: Plan, report: Report, rows, test, quiet: bool) -> tuple[list[dict], dict[str, float]]:
    """Train once a seed at the best rate, that of the highest accuracy with seed 0 on automata of neither training nor
    test. Return the runs and the accuracy of each rate."""
    others = automata.sequences(plan.test_sequences // 2, TUNING_SEED, plan.longest_word)

    def run(rate: float, seed: int) -> dict:
        return report.part(f"{name} {rate:g} {seed}", lambda: fit(name, plan, rate, seed, rows, test, others, quiet))

    first = {rate: run(rate, 0) for rate in plan.rates}
    best = max(first, key=lambda rate: first[rate]["tuning"])
    runs = [first[best], *(run(best, seed) for seed in range(1, plan.seeds))]
    return runs, {f"{rate:g}": r["tuning"] for rate, r in first.items()}


def last_quarter(curve: list[dict], metric: str) -> float:
    """Return the change of a metric over the last quarter of a run, by a fitted straight line."""
    points = curve[-max(2, len(curve) // 4 + 1) :]
    if len(points) < 2:
        return math.nan
    steps = [point["step"] for point in points]
    return float(np.polyfit(steps, [point[metric] for point in points], 1)[0] * (steps[-1] - steps[0]))


def run(folder: Path, plan: Plan, *, quiet: bool = False, minutes: float = math.inf) -> dict:
    """Train, score and draw; return the numbers of results.json. No training begins after `minutes`."""
    # more seeds and rates are more parts
    report = Report(folder, dataclasses.replace(plan, seeds=1, rates=()), quiet, minutes)
    rows = automata.sequences(plan.train_sequences, TRAINING_SEED, plan.longest_word)
    test = automata.sequences(plan.test_sequences, TEST_SEED, plan.longest_word)
    grams = {f"in-context {n}-gram": automata.score(test, [automata.ngram(row, n) for row in test]) for n in ORDERS}
    runs, tuning = {}, {}
    for name in MODELS:
        runs[name], tuning[name] = fits(name, plan, report, rows, test, quiet)
        facts = f"{runs[name][0]['parameters']:,} parameters, {sum(r['seconds'] for r in runs[name]):.0f} s"
        tried = ", ".join(f"{rate}: {accuracy:.3f}" for rate, accuracy in tuning[name].items())
        others = f"accuracy on {plan.test_sequences // 2} other automata: {tried}"
        report.say(f"{name}: {facts}, rate {runs[name][0]['rate']:g} ({others})")
    steps = [point["step"] for point in runs[MODELS[0]][0]["curve"]]
    for metric, title in METRICS.items():
        every = -(-len(steps) // 8)  # a terminal holds 8 columns: every so many, counted from the last
        table, columns = [], steps[::-every][::-1]
        for name in MODELS:
            for r in runs[name]:
                table.append([f"{name}, seed {r['seed']}", *(p[metric] for p in r["curve"][::-every][::-1])])
        table += [[name, *([""] * (len(columns) - 1)), score[metric]] for name, score in grams.items()]
        report.table(f"{title}, {len(test)} new automata, by training step", ["", *map(str, columns)], table)
    slopes = {name: {} for name in MODELS}
    for name in MODELS:
        for metric in (*METRICS, "loss"):
            slopes[name][metric] = [last_quarter(r["curve"], metric) for r in runs[name]]
        for metric in METRICS:
            ends = ", ".join(f"{r['curve'][-1][metric]:.3f}" for r in runs[name])
            gains = ", ".join(f"{gain:+.3f}" for gain in slopes[name][metric])
            change = f"change over the last quarter of the steps: {gains}"
            report.say(f"{name} after {plan.steps} steps, {metric} by seed: {ends}; {change}")
    draw(report, runs, grams)
    results = {"plan": dataclasses.asdict(plan), "runs": runs, "tuning": tuning, "last_quarter": slopes}
    length = float(np.mean([len(row.tokens) for row in rows]))
    facts = {"tokens_per_sequence": length, "chance_loss": math.log(automata.SYMBOLS)}
    return report.finish(results | {"ngrams": grams} | facts)


def draw(report: Report, runs: dict, grams: dict) -> None:
    """Draw figure 11's two scores against training steps."""
    figure, axes = report.figure("regbench.png", 2, figsize=(11, 3.8))
    for axis, metric, label in zip(axes, METRICS, ("allowed predictions", "total variation")):
        for name, colour in zip(MODELS, ("tab:blue", "tab:orange")):
            for i, r in enumerate(runs[name]):
                points = [(point["step"], point[metric]) for point in r["curve"]]
                axis.plot(*zip(*points), color=colour, label=name if i == 0 else None)
        for (name, score), style in zip(grams.items(), (":", "-.", "--", "-")):
            axis.axhline(score[metric], color="grey", linestyle=style, linewidth=0.8, label=name)
        axis.set(xlabel="training steps", ylabel=label, ylim=(0, 1))
    axes[0].legend(fontsize="small")
    figure.save()
