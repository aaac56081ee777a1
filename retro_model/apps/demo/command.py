"""RETRO end to end on the sources of Python's standard library: corpus, tokeniser, database, training, evaluation.

A RETRO and its baseline, the same decoder without retrieval, train for the same steps on the same batches in the same
order. Both are scored on packages that are in neither training data, tokeniser nor database.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from pathlib import Path

import torch

from retro_model import Retro, RetroConfig, checkpoint, evaluation, training
from retro_model.apps.report import Report, as_json
from retro_model.apps.serve import folder as folders
from retro_model.apps.serve import reader
from retro_model.base import disk
from retro_model.base.progress import counting
from retro_model.layers import copying

from .corpus import Corpus, prepare, stream
from .options import DEFAULT, SMOKE, Plan, parser


def make_model(config: RetroConfig, plan: Plan, seed: int, device: str) -> Retro:
    """Return a model with weights drawn from `seed`, or for the plan's `start_copying` with those of `copying`."""
    torch.manual_seed(seed)
    model = Retro(config)
    if plan.start_copying:
        copying.start_copying(model, seed)
    return model.to(device)


def fit(
    config: RetroConfig, corpus: Corpus, plan: Plan, seed: int, device: str, title: str, quiet: bool
) -> tuple[Retro, dict]:
    """Train one model; return it and the facts of its training. The batches depend on the seed alone."""
    model, start = make_model(config, plan, seed, device), time.perf_counter()
    settings = training.Settings(plan.steps, max_lr=plan.max_lr, warmup_steps=plan.warmup_steps)
    optimizer, batches = training.make_optimizer(model, settings), stream(corpus, plan, seed, config.retrieves)
    with training.progress(title, plan.steps, quiet) as report:
        history = training.train(model, optimizer, batches, settings, report=report, keep_memory=True)
    seconds = time.perf_counter() - start
    tokens = plan.steps * plan.batch_size * plan.window
    facts = {
        "steps": plan.steps,
        "tokens": tokens,
        "seconds": round(seconds, 1),
        "tokens_per_second": round(tokens / seconds),
        "weights": config.num_parameters(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "last_losses": [round(h["loss"], 4) for h in history[-10:]],
    }
    return model, facts


PASSES = 8  # readings of the held-out text after training: five scores, and the page's figures with their control
LEAST_SHARE = 0.1  # of the minutes: training gets at least this share


def fitted(
    name: str, config: RetroConfig, corpus: Corpus, plan: Plan, seed: int, device: str, folder: Path, quiet: bool
) -> tuple[Retro, dict]:
    """Return a model and its facts: the checkpoint of an earlier run with this plan and seed, or train and save one."""
    path, wanted = folder / name.lower(), as_json({"plan": dataclasses.asdict(plan), "seed": seed})
    with contextlib.suppress(checkpoint.CheckpointError):
        kept = checkpoint.read_state(path)
        if kept["extra"].get("run") == wanted and kept["config"] == config.to_dict():
            model = make_model(config, plan, seed, device)
            checkpoint.load(path, model)
            return model, kept["extra"]["facts"]
    model, facts = fit(config, corpus, plan, seed, device, name, quiet)
    checkpoint.save(path, model, step=plan.steps, position=plan.steps, extra={"run": wanted, "facts": facts})
    return model, facts


def within(
    minutes: float, gone: float, corpus: Corpus, plan: Plan, config: RetroConfig, seed: int, device: str
) -> tuple[Plan, str]:
    """Return the plan whose whole run takes `minutes`, and a sentence about their use.

    gone: seconds that have passed. A few steps and the score of one document give the times of training and scoring.
    """
    begin, step = time.perf_counter(), 0.0
    for c in (config, config.baseline()):
        few = dataclasses.replace(plan, steps=3, warmup_steps=0)
        fit(c, corpus, dataclasses.replace(few, steps=1), seed, device, "warm-up", quiet=True)
        model, facts = fit(c, corpus, few, seed, device, "calibration", quiet=True)
        step += facts["seconds"] / few.steps
        if c.retrieves:
            scoring = PASSES * _seconds_of_a_pass(model, corpus, plan)
    gone += time.perf_counter() - begin
    left = max(60 * minutes - gone - scoring, LEAST_SHARE * 60 * minutes)
    steps = max(2, int(left / step))
    parts = {"passed": gone, f"of training ({steps} steps of each model)": steps * step, "of scoring": scoring}
    listed = ", ".join(f"{seconds / 60:.1f} {name}" for name, seconds in parts.items())
    said = f"about {sum(parts.values()) / 60:.1f} min in all: {listed}"
    return dataclasses.replace(plan, steps=steps, warmup_steps=min(plan.warmup_steps, steps // 10)), said


def _seconds_of_a_pass(model: Retro, corpus: Corpus, plan: Plan) -> float:
    """Estimate the seconds of one score of the held-out text from its longest document."""
    held, near = corpus.validation, corpus.validation_neighbours[:, : plan.neighbours]
    longest = max(range(len(held.documents)), key=lambda number: held.documents[number].num_tokens)
    begin = time.perf_counter()
    evaluation.score(model, held, near, corpus.database, window=plan.window, stride=plan.stride, documents=[longest])
    return (time.perf_counter() - begin) * held.num_tokens / held.documents[longest].num_tokens


RANDOM = "RETRO on, random neighbours"


def score_all(
    retro: Retro, baseline: Retro, corpus: Corpus, plan: Plan, seed: int, quiet: bool
) -> dict[str, evaluation.Scores]:
    """Score the validation store: RETRO with each number of neighbours, with random ones, with none; the baseline."""
    near, database = corpus.validation_neighbours, corpus.database
    given = {f"RETRO on, {k} neighbours": (retro, near[:, :k], database) for k in plan.evaluation_neighbours}
    given[RANDOM] = (retro, evaluation.random_neighbours(near[:, : plan.neighbours], database, seed), database)
    given |= {"RETRO off": (retro,), "baseline": (baseline,)}
    scores, windows = {}, {"window": plan.window, "stride": plan.stride}
    for name, (model, *neighbours) in given.items():
        with counting(f"scoring {name}", quiet) as report:
            scores[name] = evaluation.score(model, corpus.validation, *neighbours, **windows, report=report)
    return scores


def run(
    folder: Path, plan: Plan, *, seed: int = 0, device: str = "cpu", minutes: float | None = None, quiet: bool = False
) -> dict:
    """Run the whole demonstration in `folder`. A second call continues a stopped one, with its trained models.

    minutes: of the whole run; None: train for plan.steps.
    Returns: the numbers of results.json.
    """
    report = Report(folder, quiet=quiet)
    with report.stage("corpus, tokeniser, database, neighbours"):
        corpus = prepare(folder, plan, report.say, not quiet)
    config = RetroConfig.small(corpus.tokenizer.vocab_size, **plan.config)
    if minutes is not None:
        with report.stage("times of a step and a score"):
            plan = _planned(report, minutes, corpus, plan, config, seed, device)
    models, results = [], {"plan": dataclasses.asdict(plan), "config": config.to_dict(), "seed": seed}
    results |= {"corpus": corpus.facts, "training": {}}
    for name, c in (("RETRO", config), ("baseline", config.baseline())):
        with report.stage(f"training {name}"):
            model, results["training"][name] = fitted(name, c, corpus, plan, seed, device, folder, quiet)
            models.append(model)
    describe(folder, plan, corpus, "Not scored yet.")  # `serve` can read the folder from here on
    with report.stage("evaluation"):
        scores = score_all(*models, corpus, plan, seed, quiet)
        leakage = evaluation.leakage(corpus.validation, corpus.validation_neighbours, corpus.database)
        best = scores[f"RETRO on, {plan.neighbours} neighbours"]
        others = {name: scores[name] for name in (RANDOM, "RETRO off", "baseline")}
        evaluation.plot_gains(best, others, corpus.validation, leakage, folder / "leakage.png")
    results["bits_per_byte"] = {name: evaluation.bits_per_byte(s) for name, s in scores.items()}
    results["curves"] = {name: evaluation.curve(s, leakage) for name, s in scores.items()}
    difference = {n: evaluation.bootstrap(best, other, corpus.validation) for n, other in others.items()}
    results["difference"] = difference
    results["gains"] = {n: evaluation.gains(best, other, corpus.validation, leakage) for n, other in others.items()}
    results["verdicts"] = [
        evaluation.gain_of_retrieval(best, scores[RANDOM], corpus.validation),
        evaluation.verdicts(difference["RETRO off"], difference["baseline"])[1],
    ]
    describe(folder, plan, corpus, " ".join(results["verdicts"]))
    with report.stage("figures of the page"), counting("held-out passages", quiet) as progress:
        reader.measure(folder, progress)
    columns = ("weights", "parameters", "steps", "seconds", "tokens_per_second")
    rows = [[name, *(f"{facts[c]:,}" for c in columns)] for name, facts in results["training"].items()]
    report.table("Training, same batches in the same order", ["model", *columns[:-1], "tokens/s"], rows)
    report.console.print(evaluation.table(scores, leakage, (1.0, 0.5, 0.25, 0.125)))
    for sentence in results["verdicts"]:
        report.say(f"[bold]{sentence[:1].upper()}{sentence[1:]}[/bold]")
    report.say(f"See what it looks up, and change that: retro-model serve {folder}, or retro-model ask {folder}")
    return report.finish(results)


def _planned(
    report: Report, minutes: float, corpus: Corpus, plan: Plan, config: RetroConfig, seed: int, device: str
) -> Plan:
    """Return the plan for `minutes`: an earlier run's for the same arguments, or make one and keep it."""
    path = report.folder / "minutes.json"
    asked = as_json({"plan": dataclasses.asdict(plan), "minutes": minutes, "seed": seed})
    kept = json.loads(path.read_text()) if path.exists() else {}
    if kept.get("asked") != asked:
        made, said = within(minutes, sum(report.timings.values()), corpus, plan, config, seed, device)
        report.say(f"  {said}")
        kept = {"asked": asked, "steps": made.steps, "warmup_steps": made.warmup_steps}
        disk.write_json(path, kept)
    return dataclasses.replace(plan, steps=kept["steps"], warmup_steps=kept["warmup_steps"])


def describe(folder: Path, plan: Plan, corpus: Corpus, verdict: str) -> None:
    """Write `model.json`, which `retro-model ask` and `serve` read."""
    facts = {"neighbours": plan.neighbours, "bos": True, "verdict": verdict}
    parts = {"model": "retro", "tokenizer": "tokenizer.json", "store": corpus.database.store.folder.name}
    title = "A small RETRO with the sources of Python's standard library"
    folders.describe(folder, "retro", title, parts | folders.LIBRARY, plan.window, facts)


def _no_device(name: str) -> str | None:
    """Return the reason why nothing can run on a device, or None."""
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or not (index or "0").isdigit():
        return "expected cpu, cuda or cuda:N"
    if kind == "cuda" and not int(index or 0) < torch.cuda.device_count():
        return f"torch sees {torch.cuda.device_count()} CUDA devices on this machine"
    return None


def main(arguments: list[str] | None = None) -> None:
    """Run `retro-model demo`."""
    made = parser()
    options = made.parse_args(arguments)
    if why := _no_device(options.device):  # before minutes of preparation, not after
        made.error(f"--device {options.device}: {why}")
    plan = SMOKE if options.smoke else DEFAULT
    if options.steps is not None:
        warmup = min(plan.warmup_steps, options.steps // 10)
        plan = dataclasses.replace(plan, steps=options.steps, warmup_steps=warmup)
    run(options.out, plan, seed=options.seed, device=options.device, minutes=options.minutes)
