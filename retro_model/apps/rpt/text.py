"""Real text: long documents that return to what they said.

Three models for equal steps: the window alone, which is then the reference language model; RPT; RETRO-BM25. Scored on
documents of groups (packages, books) that training has not seen, in nats a token, with the differences' intervals. What
was trained is kept: a run that was stopped goes on where it was.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from retro_model.apps.serve import folder as folders
from retro_model.data.store import Document
from retro_model.evaluation import rpt as evaluation
from retro_model.rpt import RPT, RPTConfig
from retro_model.rpt.supervision import Supervision, build_supervision, stack
from retro_model.training import Settings
from retro_model.training.rpt import Lessons, make_optimizer, train_step

from .parts import train_in_parts
from .start import start_copying
from .text_corpus import Corpus, prepare

TITLES = {"stdlib": "packages of Python's standard library", "kjv": "books of the King James Bible"}


@dataclass(frozen=True)
class Plan:
    """Sizes of a run.

    corpus: "stdlib" or "kjv". length: tokens of a document. train, scored: documents; those scored are the first of
    each group.
    candidates: chunks that the reference language model scores for each (the paper: 20).
    """

    corpus: str = "stdlib"
    length: int = 2048
    train: int = 96
    scored: int = 20
    vocab_size: int = 1024
    steps: int = 200
    batch_size: int = 2
    d_model: int = 64
    num_heads: int = 2
    num_layers: int = 4
    chunk_len: int = 16
    segment: int = 128
    candidates: int = 6
    max_lr: float = 3e-3
    tau: float = 2.0

    def config(self, vocab_size: int) -> RPTConfig:
        """RPT's."""
        upper = tuple(range(self.num_layers // 2 + 1, self.num_layers + 1))
        return RPTConfig(
            vocab_size,
            self.d_model,
            4 * self.d_model,
            self.num_heads,
            self.num_layers,
            upper,
            self.chunk_len,
            segment=self.segment,
            excluded_chunks=2 * self.segment // self.chunk_len,
            score_scale=self.d_model**-0.5,
        )


def fit(
    config: RPTConfig,
    plan: Plan,
    corpus: Corpus,
    taught: Supervision | None,
    seed: int,
    place: Path,
    until: float = math.inf,
    report=None,
) -> tuple[RPT, float]:
    """Trains one model, from the checkpoint at `place` where there is one; gives it and the seconds it took.

    Raises: Stopped after `until` (of `time.monotonic`), with a checkpoint at `place`.
    """
    torch.manual_seed(seed)
    model = RPT(config)
    start_copying(model)
    settings = Settings(
        plan.steps, max_lr=plan.max_lr, warmup_steps=plan.steps // 10, weight_decay=0.0, betas=(0.9, 0.99)
    )
    lessons = Lessons(plan.steps, alpha_ret=0.1, retriever_alpha=0.1, alpha_steps=0, tau=plan.tau)
    optimizer = make_optimizer(model, settings, lessons, "adamw")
    order = torch.randperm(len(corpus.train), generator=torch.Generator().manual_seed(seed))

    def step_once(step: int) -> dict:
        draw = torch.Generator().manual_seed(seed * plan.steps + step)
        rows = order[torch.arange(step * plan.batch_size, (step + 1) * plan.batch_size) % len(order)]
        part = None if taught is None else taught.rows(rows)
        neighbours = {"index": corpus.train_index[rows]} if config.uses_neighbours and not config.retriever else {}
        return train_step(
            model, optimizer, corpus.train[rows], part, settings, lessons, step, generator=draw, **neighbours
        )

    def look(step: int, seconds: float, results: dict | None) -> None:
        if results is not None and report is not None:
            report(step, results)

    every = max(1, plan.steps // 8)
    return model, train_in_parts(model, optimizer, plan.steps, step_once, look, place, every=every, until=until)[1]


@torch.no_grad()
def nats(model: RPT, tokens: Tensor, index: Tensor | None = None, **options) -> Tensor:
    """float64 [n,N], of every token; a document's first is 0."""
    rows = []
    for at in range(len(tokens)):
        neighbours = {} if index is None else {"index": index[at : at + 1]}
        logits = model(tokens[at : at + 1], **neighbours, **options)[:, :-1]
        rows.append(F.cross_entropy(logits.flatten(0, 1), tokens[at, 1:], reduction="none").double())
    return F.pad(torch.stack(rows), (1, 0))


def difference(a: Tensor, b: Tensor, groups: list[str], samples: int = 2000) -> dict[str, tuple[float, float, float]]:
    """Mean of a - b [n,N] in nats a token, with the 2.5% and 97.5% percentiles over documents drawn with replacement,
    and over groups of them."""
    gap = (a - b)[:, 1:].mean(1).numpy()
    found = {}
    for name, keys in (("documents", list(range(len(gap)))), ("groups", groups)):
        units = [gap[[k == key for k in keys]] for key in dict.fromkeys(keys)]
        random = np.random.default_rng(0)
        drawn = [
            np.concatenate([units[u] for u in random.integers(len(units), size=len(units))]).mean()
            for _ in range(samples)
        ]
        found[name] = (float(gap.mean()), *(float(p) for p in np.percentile(drawn, [2.5, 97.5])))
    return found


def run(folder: Path, plan: Plan, seed: int = 0, report=print, minutes: float = math.inf) -> dict:
    """Everything: corpus, the three models, their scores; the numbers. The models stay in `folder`.

    Raises: Stopped after `minutes`; the same call goes on.
    """
    until = time.monotonic() + 60 * minutes
    start = time.perf_counter()
    corpus = prepare(plan)
    config = plan.config(corpus.tokenizer.vocab_size)
    seconds = {"corpus": time.perf_counter() - start}

    def trained(name: str, config: RPTConfig, taught: Supervision | None = None) -> RPT:
        def told(step, r):
            losses = f"loss {r['loss']:.3f}, retrieval loss {r['retrieval_loss']:.3f}"
            report(f"{name}: step {step} of {plan.steps}, {losses}")

        place = folder / f"{name.replace(' ', '-')}-{seed}"
        model, seconds[name] = fit(config, plan, corpus, taught, seed, place, until, told)
        return model

    window = trained("window alone", config.baseline())
    start = time.perf_counter()
    taught, wanted = (
        lessons_of(window, folder / f"{name}-lessons-{seed}", documents, config, plan, f"window-{seed}")
        for name, documents in (("train", corpus.train), ("scored", corpus.scored))
    )
    seconds["lessons"] = time.perf_counter() - start
    report(f"lessons: {seconds['lessons']:.0f} s")
    rpt = trained("RPT", config, taught)
    keep(folder / "model", corpus, rpt, plan)
    bm25 = trained("RETRO-BM25", config.replace(retriever=False))
    results = compare(window, rpt, bm25, corpus, wanted)
    results["retrieval's share"] = evaluation.retrieval_share(rpt, corpus.train[:1], taught.rows([0]))
    return results | {
        "retrieval": _retrieval(rpt, corpus, wanted, results.pop("cost"), plan),
        "seconds": {name: round(s, 1) for name, s in seconds.items()},
        "documents": len(corpus.scored),
    }


def lessons_of(window: RPT, folder: Path, documents: Tensor, config: RPTConfig, plan: Plan, name: str) -> Supervision:
    """Candidates and target scores by the window's model, stored."""
    sizes = {"chunk_len": plan.chunk_len, "excluded_chunks": config.excluded_chunks, "candidates": plan.candidates}
    return stack(build_supervision(folder, documents, window, name=name, **sizes))


def compare(window: RPT, rpt: RPT, bm25: RPT, corpus: Corpus, wanted: Supervision) -> dict:
    """Nats a token of every model, by whose neighbours it reads, and the differences; `cost`: RPT's of every token."""
    costs = {
        "window alone": nats(window, corpus.scored),
        "RPT": nats(rpt, corpus.scored),
        "RPT, off": nats(rpt, corpus.scored, retrieval=False),
        "RPT, BM25's neighbours": nats(rpt, corpus.scored, corpus.scored_index),
        "RPT, teacher's neighbours": nats(rpt, corpus.scored, wanted.teacher(2)),
        "RETRO-BM25": nats(bm25, corpus.scored, corpus.scored_index),
        "RETRO-BM25, off": nats(bm25, corpus.scored, retrieval=False),
    }
    pairs = [("RPT", "window alone"), ("RPT", "RPT, off"), ("RPT", "RETRO-BM25"), ("RETRO-BM25", "window alone")]
    return {
        "nats": {name: float(cost[:, 1:].mean()) for name, cost in costs.items()},
        "differences": {f"{a} minus {b}": difference(costs[a], costs[b], corpus.groups) for a, b in pairs},
        "cost": costs["RPT"],
    }


def keep(folder: Path, corpus: Corpus, model: RPT, plan: Plan) -> None:
    """The model and the scored documents, as a folder for `retro-model ask` and `serve`."""
    documents = [
        Document(f"{name}, part {number}", name, ids.numpy())
        for number, (name, ids) in enumerate(zip(corpus.groups, corpus.scored), 1)
    ]
    title = f"RPT, trained on {TITLES[plan.corpus]}"
    folders.keep(
        folder,
        "rpt",
        title,
        model,
        corpus.tokenizer,
        documents,
        chunk_len=plan.chunk_len,
        window=plan.length,
        bos=False,
    )


@torch.no_grad()
def _retrieval(model: RPT, corpus: Corpus, wanted: Supervision, cost: Tensor, plan: Plan) -> dict:
    """Table 3 among the scored candidates, and nats by whether a positive one was retrieved, means over documents."""
    dense, rankings, split = wanted.dense(), [], {}
    for at, tokens in enumerate(corpus.scored):
        scores, index = model.retrieve(tokens[None])
        rankings.append(evaluation.ranking(scores[0], dense[at]))
        document = evaluation.Document(cost[at], index[0])
        for name, (mean, count) in evaluation.by_success(document, dense[at], plan.chunk_len).items():
            total = split.setdefault(name, [0.0, 0])
            total[0], total[1] = total[0] + (mean * count if count else 0.0), total[1] + count
    means = {name: float(np.nanmean([f[name] for f in rankings])) for name in rankings[0]}
    return {"ranking": means, "nats by success": {name: [total / max(1, n), n] for name, (total, n) in split.items()}}
