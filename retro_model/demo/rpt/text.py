"""Real text: the sources of Python's standard library, the files of a package joined to one document, as CodeParrot's
repositories are.

Three models for equal steps: the window alone, which is then the reference language model; RPT; RETRO-BM25. Scored on
packages that training has not seen, in nats a token, with the differences' intervals over packages.
"""

from __future__ import annotations

import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from retro_model.data.store import Document
from retro_model.data.tokens import Tokenizer
from retro_model.demo.corpus import sources
from retro_model.evaluation import rpt as evaluation
from retro_model.rpt import RPT, RPTConfig
from retro_model.rpt.supervision import Supervision, bm25_index, build_supervision, stack
from retro_model.serving import folder as folders
from retro_model.training import Settings
from retro_model.training.rpt import Lessons, make_optimizer, train_step

from .start import start_copying

#: Packages that are scored and that training does not see: large enough to return to what they said.
HELD_OUT = ("asyncio", "concurrent", "ctypes", "email", "http", "json", "logging", "multiprocessing", "unittest", "xml")


@dataclass(frozen=True)
class Plan:
    """Sizes of a run.

    length: tokens of a document: a package's files joined, cut. train, scored: documents; those scored are the first of
    each package.
    candidates: chunks that the reference language model scores for each (the paper: 20).
    """

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


class Corpus(NamedTuple):
    """tokens int64 [n,length] to train on and to score, the package
    of each that is scored, BM25's neighbours of both [n,L,K].
    """

    tokenizer: Tokenizer
    train: Tensor
    scored: Tensor
    packages: list[str]
    train_index: Tensor
    scored_index: Tensor


def prepare(plan: Plan) -> Corpus:
    """Documents from this Python's own standard library."""
    packages: dict[str, list[str]] = {}
    for document in sorted(sources(Path(sysconfig.get_path("stdlib"))), key=lambda d: d.name):
        packages.setdefault(document.group, []).append(document.content)
    held = {name: packages.pop(name) for name in HELD_OUT if name in packages}
    packages.pop("test", None)
    tokenizer = Tokenizer.train(("\n".join(files) for files in packages.values()), plan.vocab_size)
    random = np.random.default_rng(0)
    train = np.concatenate([_cut("\n".join(files), tokenizer, plan) for _, files in sorted(packages.items())])
    train = train[random.permutation(len(train))[: plan.train]]
    scored, names, each = [], [], -(-plan.scored // len(held))
    for name, files in held.items():
        documents = _cut("\n".join(files), tokenizer, plan)[:each]
        scored.append(documents)
        names += [name] * len(documents)
    scored = np.concatenate(scored)
    index = [
        torch.from_numpy(
            np.stack(
                [
                    bm25_index(
                        d.reshape(-1, plan.chunk_len),
                        2,
                        excluded_chunks=2 * plan.segment // plan.chunk_len,
                        with_target=target,
                    )[0]
                    for d in documents
                ]
            )
        )
        for documents, target in ((train, True), (scored, False))
    ]
    return Corpus(tokenizer, torch.from_numpy(train), torch.from_numpy(scored), names, *index)


def _cut(text: str, tokenizer: Tokenizer, plan: Plan) -> np.ndarray:
    tokens = tokenizer.encode(text)
    return tokens[: len(tokens) // plan.length * plan.length].reshape(-1, plan.length)


def fit(
    config: RPTConfig, plan: Plan, corpus: Corpus, taught: Supervision | None, seed: int, report=None
) -> tuple[RPT, float]:
    """Trains one model; gives it and the seconds it took."""
    torch.manual_seed(seed)
    model = RPT(config)
    start_copying(model)
    settings = Settings(
        plan.steps, max_lr=plan.max_lr, warmup_steps=plan.steps // 10, weight_decay=0.0, betas=(0.9, 0.99)
    )
    lessons = Lessons(plan.steps, alpha_ret=0.1, retriever_alpha=0.1, alpha_steps=0, tau=plan.tau)
    optimizer = make_optimizer(model, settings, lessons, "adamw")
    draw, start = torch.Generator().manual_seed(seed), time.perf_counter()
    order = torch.randperm(len(corpus.train), generator=draw)
    for step in range(plan.steps):
        rows = order[torch.arange(step * plan.batch_size, (step + 1) * plan.batch_size) % len(order)]
        part = None if taught is None else Supervision(*(t[rows] for t in taught))
        neighbours = {"index": corpus.train_index[rows]} if config.uses_neighbours and not config.retriever else {}
        results = train_step(
            model, optimizer, corpus.train[rows], part, settings, lessons, step, generator=draw, **neighbours
        )
        if report is not None and (step + 1) % max(1, plan.steps // 8) == 0:
            report(step + 1, results)
    return model.eval(), time.perf_counter() - start


@torch.no_grad()
def nats(model: RPT, tokens: Tensor, index: Tensor | None = None, **options) -> Tensor:
    """float64 [n,N], of every token; a document's first is 0."""
    rows = []
    for at in range(len(tokens)):
        neighbours = {} if index is None else {"index": index[at : at + 1]}
        logits = model(tokens[at : at + 1], **neighbours, **options)[:, :-1]
        rows.append(F.cross_entropy(logits.flatten(0, 1), tokens[at, 1:], reduction="none").double())
    return F.pad(torch.stack(rows), (1, 0))


def difference(a: Tensor, b: Tensor, packages: list[str], samples: int = 2000) -> tuple[float, float, float]:
    """Mean of a - b [n,N] in nats a token, with the 2.5% and 97.5% percentiles over packages drawn with replacement."""
    gap = (a - b)[:, 1:].mean(1).numpy()
    groups = [gap[[p == name for p in packages]] for name in dict.fromkeys(packages)]
    random = np.random.default_rng(0)
    drawn = [
        np.concatenate([groups[g] for g in random.integers(len(groups), size=len(groups))]).mean()
        for _ in range(samples)
    ]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(gap.mean()), float(low), float(high)


def run(folder: Path, plan: Plan, seed: int = 0, report=print) -> dict:
    """Everything: corpus, the three models, their scores; the numbers."""
    start = time.perf_counter()
    corpus = prepare(plan)
    config = plan.config(corpus.tokenizer.vocab_size)
    seconds = {"corpus": time.perf_counter() - start}

    def told(name):
        return lambda step, r: report(
            f"{name}: step {step}, loss {r['loss']:.3f}, retrieval loss {r['retrieval_loss']:.3f}"
        )

    window, seconds["window alone"] = fit(config.baseline(), plan, corpus, None, seed, told("window alone"))
    start = time.perf_counter()
    sizes = {
        "chunk_len": plan.chunk_len,
        "excluded_chunks": config.excluded_chunks,
        "candidates": plan.candidates,
        "name": f"window-{seed}",
    }
    taught, wanted = (
        stack(build_supervision(folder / f"{name}-lessons", documents, window, **sizes))
        for name, documents in (("train", corpus.train), ("scored", corpus.scored))
    )
    seconds["lessons"] = time.perf_counter() - start
    report(f"lessons: {seconds['lessons']:.0f} s")
    rpt, seconds["RPT"] = fit(config, plan, corpus, taught, seed, told("RPT"))
    keep(folder, corpus, rpt, plan)
    bm25, seconds["RETRO-BM25"] = fit(config.replace(retriever=False), plan, corpus, None, seed, told("RETRO-BM25"))
    costs = {
        "window alone": nats(window, corpus.scored),
        "RPT": nats(rpt, corpus.scored),
        "RPT, off": nats(rpt, corpus.scored, retrieval=False),
        "RPT, BM25's neighbours": nats(rpt, corpus.scored, corpus.scored_index),
        "RPT, teacher's neighbours": nats(rpt, corpus.scored, wanted.teacher(2)),
        "RETRO-BM25": nats(bm25, corpus.scored, corpus.scored_index),
        "RETRO-BM25, off": nats(bm25, corpus.scored, retrieval=False),
    }
    results = {"nats": {name: float(cost[:, 1:].mean()) for name, cost in costs.items()}}
    pairs = [("RPT", "window alone"), ("RPT", "RPT, off"), ("RPT", "RETRO-BM25"), ("RETRO-BM25", "window alone")]
    results["differences"] = {f"{a} minus {b}": difference(costs[a], costs[b], corpus.packages) for a, b in pairs}
    results["retrieval"] = _retrieval(rpt, corpus, wanted, costs["RPT"], plan)
    return results | {"seconds": {name: round(s, 1) for name, s in seconds.items()}, "documents": len(corpus.scored)}


def keep(folder: Path, corpus: Corpus, model: RPT, plan: Plan) -> None:
    """The model and the scored documents, as a folder for `retro-model ask` and `serve`."""
    documents = [
        Document(f"{name}, part {number}", name, ids.numpy())
        for number, (name, ids) in enumerate(zip(corpus.packages, corpus.scored), 1)
    ]
    title = "RPT, trained on packages of Python's standard library"
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
