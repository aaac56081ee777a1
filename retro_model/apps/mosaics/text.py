"""Real text: Memory Mosaics beside transformers of equal size and steps, within the training length and beyond it.

Within the training length the paper claims equal validation loss. Beyond it there are no learned positions, and rotary
ones were not trained; a Memory Mosaic has no positions.

Source: Zhang et al., arXiv 2405.06394, section 5, figures 9, 10 and 13; bounded memories: its section 6.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retro_model import training
from retro_model.apps.report import Report
from retro_model.apps.serve import folder as folders
from retro_model.data.store import Document
from retro_model.data.tokens import BOS, Tokenizer
from retro_model.memory_mosaics import MemoryMosaics, inspection

from . import contest
from .contest import MOSAICS
from .corpora import CORPORA
from .options import TextPlan as Plan

NAMES = _, LEARNED, ROTARY = MOSAICS, "transformer, learned positions", "transformer, rotary"
SCORED_STEPS = 20  # scores of a run on a few held-out windows
BUCKETS = 16  # spans of positions in a curve
PIECE = 16  # tokens that a bounded memory reads at a time
SHOWN = 512  # tokens that the page shows at once


def make(name: str, plan: Plan, vocab_size: int) -> nn.Module:
    """Return the model of this name, with as many learned positions as the training length."""
    positions = "rotary" if name == ROTARY else "learned"
    return contest.make(name, plan, vocab_size, plan.seed, positions=positions, max_len=plan.context)


def encode(tokenizer: Tokenizer, documents: list[str]) -> np.ndarray:
    """Return the tokens of all documents in a row, with BOS before each."""
    return np.concatenate([np.concatenate([[BOS], ids]) for ids in tokenizer.encode_batch(documents)])


def stream(ids: np.ndarray, plan: Plan):
    """Iterate over batches of random windows for ever, the same for every model."""
    random = np.random.default_rng(plan.seed)
    while True:
        starts = random.integers(len(ids) - plan.context, size=plan.batch_size)
        tokens = torch.from_numpy(np.stack([ids[s : s + plan.context] for s in starts]))
        yield training.Batch(tokens, torch.ones_like(tokens, dtype=torch.bool))


def windows(ids: np.ndarray, plan: Plan) -> Tensor:
    """Return [windows,longest] tokens, evenly spaced over the text."""
    count = min(plan.windows, len(ids) // plan.longest)
    if count == 0:
        raise ValueError(f"longest: expected at most the {len(ids)} tokens held out; got {plan.longest}")
    starts = np.linspace(0, len(ids) - plan.longest, count).astype(np.int64)
    return torch.from_numpy(np.stack([ids[s : s + plan.longest] for s in starts]))


@torch.no_grad()
def losses(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the nats [W,N-1] of each token of windows [W,N] but the first."""
    model.eval()
    logits = ((model(part)[:, :-1].transpose(1, 2), part[:, 1:]) for part in tokens.split(4))
    return torch.cat([F.cross_entropy(predicted, wanted, reduction="none") for predicted, wanted in logits])


@torch.no_grad()
def bounded(model: MemoryMosaics, tokens: Tensor, plan: Plan, capacity: int | None, evict: str) -> dict:
    """Return nats a token beyond the training length, milliseconds a token and bytes of the cache at a capacity."""
    model.eval()
    cache, start = model.make_cache(len(tokens), capacity, evict=evict), time.perf_counter()
    logits = [model(piece, cache=cache) for piece in tokens.split(PIECE, 1)]
    ms = 1e3 * (time.perf_counter() - start) / tokens.numel()
    nats = F.cross_entropy(torch.cat(logits, 1)[:, plan.context - 1 : -1].transpose(1, 2), tokens[:, plan.context :])
    return {"capacity": capacity, "evict": evict, "nats": float(nats), "ms_per_token": ms, "bytes": cache.nbytes}


def curve(losses: Tensor) -> list[float]:
    """Return the mean nats in BUCKETS equal spans of positions."""
    return [float(part.mean()) for part in losses.tensor_split(BUCKETS, 1)]


def difference(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Return the mean of a - b in nats a token, and its standard error over windows [W,N]."""
    gap = (a - b).mean(1)
    return float(gap.mean()), float(gap.std() / len(gap) ** 0.5)


def fit(
    name: str, plan: Plan, vocab_size: int, rate: float, ids: np.ndarray, few: Tensor, quiet: bool
) -> tuple[nn.Module, dict]:
    """Train a model for plan.steps; return it and the facts of `contest.fit`, with the loss on windows `few`."""
    model = make(name, plan, vocab_size)
    points = np.linspace(0, plan.steps, min(plan.steps, SCORED_STEPS) + 1).astype(int).tolist()
    look = lambda model: {"held_out": float(losses(model, few).mean())}  # noqa: E731
    return model, contest.fit(model, stream(ids, plan), plan, rate, points, look, f"{name}, rate {rate:g}", quiet)


def trained(name: str, plan: Plan, vocab_size: int, ids: np.ndarray, scored: dict[str, Tensor], quiet: bool) -> dict:
    """Train one model at its best rate. Returns: the facts of its training, its losses of each corpus within the
    training length and beyond, its weights."""
    rate, tried, few = plan.rates[0], {}, scored[plan.corpus][:4].reshape(-1, plan.context)
    if len(plan.rates) > 1:
        short = dataclasses.replace(plan, steps=plan.tuning_steps)
        tried = {r: fit(name, short, vocab_size, r, ids, few[:1], quiet)[1]["curve"][-1]["loss"] for r in plan.rates}
        rate = min(tried, key=tried.get)
    model, facts = fit(name, plan, vocab_size, rate, ids, few, quiet)
    tables = {corpus: {"within": losses(model, t.reshape(-1, plan.context))} for corpus, t in scored.items()}
    for corpus, tokens in scored.items():
        tables[corpus]["whole"] = None if name == LEARNED else losses(model, tokens)  # learned positions end
    facts["tuning"] = {f"{r:g}": loss for r, loss in tried.items()}
    return {"facts": facts, "losses": tables, "weights": model.state_dict()}


def run(folder: Path, plan: Plan, *, quiet: bool = False, minutes: float = math.inf) -> dict:
    """Train, score and draw; return the numbers of results.json. No training begins after `minutes`."""
    report = Report(folder, plan, quiet, minutes)
    documents, held_out = CORPORA[plan.corpus]()
    shuffled = [documents[i] for i in np.random.default_rng(0).permutation(len(documents))]
    ends = itertools.accumulate(map(len, shuffled))
    kept = [text for text, end in zip(shuffled, ends) if end <= plan.train_characters]
    tokenizer = Tokenizer.train(kept, plan.vocab_size)
    ids, scored = encode(tokenizer, kept), {plan.corpus: windows(encode(tokenizer, held_out), plan)}
    try:
        scored[plan.other] = windows(encode(tokenizer, CORPORA[plan.other]()[1]), plan)
    except FileNotFoundError as why:
        report.say(f"{plan.other} is left out: {why}")
    runs, losses_of, weights = {}, {}, {}
    for name in NAMES:
        made = report.part(name, lambda name=name: trained(name, plan, tokenizer.vocab_size, ids, scored, quiet))
        runs[name], losses_of[name], weights[name] = (made[key] for key in ("facts", "losses", "weights"))
    _tables(report, plan, runs, losses_of, len(ids))
    few = scored[plan.corpus][: plan.bounded_windows]
    limits = [(None, "oldest"), *((c, evict) for c in plan.capacities for evict in ("oldest", "least_read"))]
    mosaics = make(MOSAICS, plan, tokenizer.vocab_size)
    mosaics.load_state_dict(weights[MOSAICS])
    keep(folder, mosaics, tokenizer, held_out, plan)
    rows_of = lambda: {"rows": [bounded(mosaics, few, plan, c, evict) for c, evict in limits]}  # noqa: E731
    forgetting, rows = report.part("bounded", rows_of)["rows"], []
    for f in forgetting:
        kept_and_gone = [f["capacity"], f["evict"]] if f["capacity"] else ["all", ""]
        rows.append([*kept_and_gone, f["nats"], f["ms_per_token"], f["bytes"] / 1e6])
    title = f"Memories of bounded capacity: {len(few)} windows of {plan.longest} tokens in pieces of {PIECE}, scored"
    columns = ["pairs kept", "which go", "nats", "ms a token", "cache, MB"]
    report.table(f"{title} from token {plan.context} on", columns, rows)
    blocks = inspection.inspect(mosaics, few[:4, : plan.context])
    title = "Skill of each memory: 1 - squared error of its prediction / that of the mean of all values before"
    rows = [[str(number), *block.skill.tolist()] for number, block in enumerate(blocks, 1)]
    report.table(title, ["block", *(f"head {h}" for h in range(plan.num_heads))], rows)
    inspection.draw(blocks, folder / "memories.png")
    draw(report, plan, losses_of)
    nats = {name: {corpus: _means(**t) for corpus, t in tables.items()} for name, tables in losses_of.items()}
    facts = {"vocab_size": tokenizer.vocab_size, "training_tokens": len(ids), "bounded": forgetting}
    memories = {name: [getattr(block, name).tolist() for block in blocks] for name in ("skill", "decay")}
    return report.finish({"plan": dataclasses.asdict(plan), "runs": runs, "nats": nats} | facts | memories)


def _means(within: Tensor, whole: Tensor | None) -> dict:
    """Return the numbers of results.json for a model's losses of one corpus."""
    beyond = {"whole": None, "curve": None}
    if whole is not None:
        beyond = {"whole": float(whole.mean()), "curve": curve(whole)}
    return {"within": float(within.mean()), "curve_within": curve(within)} | beyond


def keep(folder: Path, model: MemoryMosaics, tokenizer: Tokenizer, held_out: list[str], plan: Plan) -> None:
    """Write the model and the beginnings of the held-out documents as a folder for `retro-model ask` and `serve`."""
    starts = enumerate((tokenizer.encode(text)[: plan.longest - 1] for text in held_out), 1)
    documents = [Document(f"held-out text {number}", plan.corpus, ids) for number, ids in starts if len(ids)]
    sizes = {"chunk_len": PIECE, "window": min(plan.longest, SHOWN), "bos": True}
    folders.keep(folder, "mosaics", f"Memory Mosaics, trained on {plan.corpus}", model, tokenizer, documents, **sizes)


def _tables(report: Report, plan: Plan, runs: dict, losses_of: dict, training_tokens: int) -> None:
    rows = []
    for name, r in runs.items():
        cells = [name, f"{r['parameters']:,}", f"{r['rate']:g}", f"{r['seconds']:.0f}"]
        rows.append(cells + [float(t["within"].mean()) for t in losses_of[name].values()])
    corpora = list(losses_of[MOSAICS])
    trained_on = (
        f"{plan.steps} steps of {plan.batch_size} windows, {training_tokens:,} training tokens of {plan.corpus}"
    )
    title = f"Nats a token on held-out windows of {plan.context}, the training length; {trained_on}"
    report.table(title, ["model", "parameters", "rate", "seconds", *corpora], rows)
    spans = np.linspace(0, plan.longest, BUCKETS + 1).astype(int)[:-1:2]
    for corpus in corpora:
        for other in (LEARNED, ROTARY):
            gap, error = difference(losses_of[MOSAICS][corpus]["within"], losses_of[other][corpus]["within"])
            said = f"{gap:+.3f} nats a token (standard error over windows {error:.3f})"
            report.say(f"{corpus}: {MOSAICS} minus {other}: {said}")
        title = f"Nats a token by position on windows of {plan.longest} of {corpus}; trained to position {plan.context}"
        rows = [[name, *curve(losses_of[name][corpus]["whole"])[::2]] for name in (MOSAICS, ROTARY)]
        report.table(title, ["model", *(f"{start}-" for start in spans)], rows)


def draw(report: Report, plan: Plan, losses_of: dict) -> None:
    """Draw figures 10 and 13 in one: loss by position, a panel a corpus, a line at the training length."""
    corpora = list(losses_of[MOSAICS])
    figure, axes = report.figure("text.png", len(corpora), figsize=(5.5 * len(corpora), 3.8))
    for axis, corpus in zip(axes, corpora):
        for name, colour in zip((MOSAICS, LEARNED, ROTARY), ("tab:blue", "tab:green", "tab:orange")):
            t = losses_of[name][corpus]
            values, reach = (t["within"], plan.context) if t["whole"] is None else (t["whole"], plan.longest)
            middles = (np.arange(BUCKETS) + 0.5) * reach / BUCKETS
            axis.plot(middles, curve(values), label=name, color=colour)
        axis.axvline(plan.context, color="grey", linestyle="--", linewidth=0.8)
        axis.set(title=corpus, xlabel="position (dashed: training length)", ylabel="nats a token")
        axis.legend(fontsize="small")
    figure.save()
