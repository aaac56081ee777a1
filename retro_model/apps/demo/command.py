"""RETRO end to end on the sources of Python's standard library: corpus, tokeniser, database, training, evaluation, a
sample.

    retro-model demo                                  # minutes on two cores
    retro-model demo --preset 172m --device cuda      # the same code at the paper's sizes

A RETRO and its baseline (the same decoder, no retrieval) take the same steps over the same data in the same order; then
both are scored on packages that training, tokeniser and database never saw.
"""

from __future__ import annotations

import dataclasses
import io
import json
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from retro_model import Retro, RetroConfig, checkpoint, evaluation, generate, training
from retro_model.apps.serve import folder as folders
from retro_model.evaluation import colouring
from retro_model.retro import copying

from .corpus import Corpus, prepare, stream
from .options import parser
from .plan import DEFAULT, SMOKE, Plan, preset


@contextmanager
def stage(console: Console, timings: dict[str, float], name: str):
    """Prints what begins, and keeps how long it took."""
    console.print(f"[bold]{name}[/bold]")
    start = time.perf_counter()
    yield
    timings[name] = round(time.perf_counter() - start, 1)
    console.print(f"  {timings[name]} s")


def make_model(config: RetroConfig, plan: Plan, seed: int, device: str, **options) -> Retro:
    """A model with weights drawn from `seed`, and as `plan` says."""
    torch.manual_seed(seed)
    model = Retro(config, **options)
    if plan.start_copying:
        copying.start_copying(model, seed)
    return model.to(device)


def fit(
    config: RetroConfig, corpus: Corpus, plan: Plan, seed: int, device: str, title: str, quiet: bool, shown=None
) -> tuple[Retro, dict]:
    """Trains one model; the batches depend on the seed only, so that every model sees the same. shown: see `stream`."""
    model = make_model(config, plan, seed, device)
    settings = training.Settings(plan.steps, max_lr=plan.max_lr, warmup_steps=plan.warmup_steps, autocast=plan.autocast)
    optimizer = training.make_optimizer(model, settings)
    start = time.perf_counter()
    with training.progress(title, plan.steps, quiet) as report:
        history = training.train(
            torch.compile(model) if plan.compile else model,
            optimizer,
            stream(corpus, plan, seed, config.retrieves, shown),
            settings,
            report=report,
        )
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


def steps_within(seconds: float, corpus: Corpus, plan: Plan, config: RetroConfig, seed: int, device: str) -> int:
    """Steps that both models together take in `seconds`, from the time of a few."""
    spent = 0.0
    for c in (config, config.baseline()):
        few = dataclasses.replace(plan, steps=3, warmup_steps=0)
        fit(c, corpus, dataclasses.replace(few, steps=1), seed, device, "warm-up", quiet=True)
        spent += fit(c, corpus, few, seed, device, "calibration", quiet=True)[1]["seconds"] / few.steps
    return max(2, int(seconds / spent))


def score_all(retro: Retro, baseline: Retro, corpus: Corpus, plan: Plan) -> dict[str, evaluation.Scores]:
    """Scores of the validation store: RETRO with each number of neighbours, RETRO off, the baseline."""
    options = {"window": plan.window, "stride": plan.stride, "autocast": plan.autocast}
    scores = {
        f"RETRO on, {k} neighbours": evaluation.score(
            retro, corpus.validation, corpus.validation_neighbours[:, :k], corpus.database, **options
        )
        for k in plan.evaluation_neighbours
    }
    scores["RETRO off"] = evaluation.score(retro, corpus.validation, **options)
    scores["baseline"] = evaluation.score(baseline, corpus.validation, **options)
    return scores


def draw_sample(retro: Retro, corpus: Corpus, plan: Plan, folder: Path, console: Console, seed: int) -> None:
    """Continues the beginning of a held-out document with and without retrieval; sample.html and the terminal."""
    m, device = corpus.train.chunk_len, next(retro.parameters()).device
    entry = max(corpus.validation.documents, key=lambda e: e.num_chunks)
    prompt = corpus.validation.tokens[entry.first_chunk : entry.first_chunk + 2].reshape(-1).astype(np.int64)
    prompt = torch.from_numpy(prompt).to(device)[None]

    def retrieve(chunks):
        return corpus.database.values(corpus.database.search(chunks, plan.neighbours))

    texts = []
    for how in (retrieve, None):
        generator = torch.Generator(device).manual_seed(seed)
        texts.append(
            generate(retro, prompt, plan.sample_tokens, retrieve=how, temperature=0.7, top_p=0.9, generator=generator)[
                0
            ].cpu()
        )
    on, off = texts
    neighbours, mask = retrieve(on[: len(on) // m * m].view(-1, m))
    rows = colouring.rows(on.numpy(), m, neighbours.numpy(), mask.numpy())
    decode, title = corpus.tokenizer.decode, f"{entry.name}, continued"
    without = [decode(part) for part in np.split(off.numpy(), range(m, len(off), m))]
    (folder / "sample.html").write_text(
        colouring.to_html(rows, decode, title=title, prompt_chunks=2, off=without), encoding="utf-8"
    )
    console.print(colouring.to_terminal(rows, decode, title=title))


def speeds(retro: Retro, corpus: Corpus, plan: Plan, seed: int, new_tokens: int = 32) -> dict[str, dict[str, float]]:
    """Tokens per second of training (forward, backward, optimiser)
    and of decoding (batch 4, neighbours at hand), by backend.
    """
    device, settings = (
        next(retro.parameters()).device,
        training.Settings(10, warmup_steps=0, max_lr=1e-9, autocast=plan.autocast),
    )
    fused = "triton" if device.type == "cuda" else "cpu"
    batch = next(stream(corpus, plan, seed, True))
    prompts = corpus.train.chunks(np.arange(4)).tolist()
    rates = {}
    for name in (fused, "reference"):
        model = make_model(retro.config, plan, seed, str(device), backend=name)
        model.load_state_dict(retro.state_dict())
        optimizer = training.make_optimizer(model, settings)
        values = corpus.database.values(torch.zeros(1, plan.neighbours, dtype=torch.int64))

        def at_hand(chunks, values=values):
            return tuple(v.expand(len(chunks), *v.shape[1:]) for v in values)

        def train_once(model=model, optimizer=optimizer):
            training.train_step(model, optimizer, [batch], settings, 0)

        def decode_once(model=model, at_hand=at_hand):
            generate(model, prompts, new_tokens, retrieve=at_hand)

        rates[name] = {
            "training": plan.batch_size * plan.window / _seconds(train_once, device),
            "decoding": 4 * new_tokens / _seconds(decode_once, device),
        }
    return rates


def _seconds(call, device: torch.device, repeats: int = 3) -> float:
    """The fastest of `repeats` calls after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _tables(results: dict, scores: dict[str, evaluation.Scores], leakage: np.ndarray) -> list[Table]:
    models = Table(
        "model",
        "weights",
        "parameters",
        "steps",
        "seconds",
        "tokens/s",
        title="Training, same batches in the same order",
    )
    for name, f in results["training"].items():
        models.add_row(name, *(f"{f[k]:,}" for k in ("weights", "parameters", "steps", "seconds", "tokens_per_second")))
    rates = Table("backend", "training, tokens/s", "decoding, tokens/s", title="RETRO's speed by backend")
    for name, f in results["speeds"].items():
        rates.add_row(name, *(f"{f[k]:,.0f}" for k in ("training", "decoding")))
    return [models, evaluation.table(scores, leakage, (1.0, 0.5, 0.25, 0.125)), rates]


def run(
    folder: Path, plan: Plan, *, seed: int = 0, device: str = "cpu", minutes: float | None = None, quiet: bool = False
) -> dict:
    """The whole demonstration; everything it makes lies in `folder`.

    minutes: time for training both models together; None: plan.steps.
    Returns: the numbers that it also writes to results.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    console, timings = Console(record=True, file=io.StringIO() if quiet else None), {}
    with stage(console, timings, "corpus, tokeniser, database, neighbours"):
        corpus = prepare(folder, plan, console)
    config = RetroConfig.from_dict({**plan.config, "vocab_size": corpus.tokenizer.vocab_size})
    if minutes is not None:
        with stage(console, timings, "step times"):
            steps = steps_within(60 * minutes, corpus, plan, config, seed, device)
            plan = dataclasses.replace(plan, steps=steps, warmup_steps=min(plan.warmup_steps, steps // 10))
    models: dict[str, nn.Module] = {}
    results: dict = {
        "plan": dataclasses.asdict(plan),
        "config": config.to_dict(),
        "seed": seed,
        "corpus": corpus.facts,
        "training": {},
    }
    for name, c in (("RETRO", config), ("baseline", config.baseline())):
        with stage(console, timings, f"training {name}"):
            models[name], results["training"][name] = fit(c, corpus, plan, seed, device, name, quiet)
        checkpoint.save(folder / name.lower(), models[name], step=plan.steps, position=plan.steps)
    with stage(console, timings, "evaluation"):
        scores = score_all(models["RETRO"], models["baseline"], corpus, plan)
        leakage = evaluation.leakage(corpus.validation, corpus.validation_neighbours, corpus.database)
        best = scores[f"RETRO on, {plan.neighbours} neighbours"]
        others = {name: scores[name] for name in ("RETRO off", "baseline")}
        evaluation.plot_gains(best, others, corpus.validation, leakage, folder / "leakage.png")
    results["bits_per_byte"] = {name: evaluation.bits_per_byte(s) for name, s in scores.items()}
    results["curves"] = {name: evaluation.curve(s, leakage) for name, s in scores.items()}
    results["difference"] = {n: evaluation.bootstrap(best, scores[n], corpus.validation) for n in others}
    results["gains"] = {n: evaluation.gains(best, other, corpus.validation, leakage) for n, other in others.items()}
    results["verdicts"] = evaluation.verdicts(*results["difference"].values())
    keep(folder, plan, corpus, best, scores["RETRO off"], results["verdicts"])
    with stage(console, timings, "a sample"):
        draw_sample(models["RETRO"], corpus, plan, folder, console, seed)
    with stage(console, timings, "speed of the backends"):
        results["speeds"] = speeds(models["RETRO"], corpus, plan, seed)
    for table in _tables(results, scores, leakage):
        console.print(table)
    for sentence in results["verdicts"]:
        console.print(f"[bold]{sentence[:1].upper()}{sentence[1:]}[/bold]")
    results["seconds"] = timings
    console.print(
        f"{sum(timings.values()):.0f} s in all; results.json, leakage.png, sample.html and the models lie in {folder}",
        soft_wrap=True,
    )
    console.print(
        f"See what it looks up, and change that: retro-model serve {folder}   (in the terminal: retro-model ask "
        f"{folder})",
        soft_wrap=True,
    )
    (folder / "results.json").write_text(json.dumps(results, indent=1, default=float) + "\n")
    (folder / "report.txt").write_text(console.export_text(), encoding="utf-8")
    return results


def keep(
    folder: Path, plan: Plan, corpus: Corpus, on: evaluation.Scores, off: evaluation.Scores, verdicts: list[str]
) -> None:
    """Makes of what lies in `folder` a model folder: `retro-model ask` and `serve` use it."""
    passages = folders.passages(corpus.validation, plan.window, on, off)
    facts = {"neighbours": plan.neighbours, "bos": True, "verdict": " ".join(verdicts), "passages": passages}
    parts = {
        "model": "retro",
        "tokenizer": "tokenizer.json",
        "held_out": "validation",
        "store": corpus.database.store.folder.name,
        "keys": "embeddings",
        "embedder": "embedder.npz",
    }
    folders.describe(folder, "retro", "RETRO, trained on Python's standard library", parts, plan.window, facts)


def _no_device(name: str) -> str | None:
    """Why nothing can run on the device; None where it can."""
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or not (index or "0").isdigit():
        return "expected cpu, cuda or cuda:N"
    if kind == "cuda" and not int(index or 0) < torch.cuda.device_count():
        return f"torch sees {torch.cuda.device_count()} CUDA devices on this machine"
    return None


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    made = parser()
    options = made.parse_args(arguments)
    if options.smoke and options.preset:
        made.error("--smoke and --preset exclude each other")
    if why := _no_device(options.device):  # before minutes of preparation, not after
        made.error(f"--device {options.device}: {why}")
    plan = SMOKE if options.smoke else preset(options.preset) if options.preset else DEFAULT
    changes = {k: v for k, v in (("steps", options.steps), ("batch_size", options.batch_size)) if v is not None}
    if options.steps is not None:
        changes["warmup_steps"] = min(plan.warmup_steps, options.steps // 10)
    run(
        options.out,
        dataclasses.replace(plan, **changes),
        seed=options.seed,
        device=options.device,
        minutes=options.minutes,
    )
