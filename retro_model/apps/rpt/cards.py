"""Cards: documents whose content returns beyond the window. Does the model find it again by itself?

Every variant trains for equal steps on the same documents. The score is the nats of far tokens in new documents: with
the model's own neighbours, with random ones, with the teacher's and with retrieval off. A token is far if the card of
its content was shown before, but not within the window.
"""

from __future__ import annotations

import functools
import itertools
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from retro_model.apps.serve import folder as folders
from retro_model.apps.serve.symbols import Symbols
from retro_model.data.store import Document
from retro_model.evaluation.rpt import random_chunks
from retro_model.layers.copying import start_rpt_copying
from retro_model.rpt import RPT, RPTConfig
from retro_model.rpt.supervision import CANDIDATES, Supervision, bm25_index, stack, supervise
from retro_model.training import Settings, checkpoint
from retro_model.training.rpt import Lessons, make_optimizer, train_step

from .deck import Copyist, Deck, Reader
from .options import Variant


@dataclass(frozen=True)
class Plan:
    """Sizes of a run.

    documents, scored: numbers of documents to train on, in turn, and to score. reader: the reference language model is
    `Reader`, not `Copyist`. candidates: chunks that it scores for each chunk. rates: learning rates by name, see
    `training.rpt.make_optimizer`.
    """

    deck: Deck = field(default_factory=Deck)
    documents: int = 512
    scored: int = 24
    steps: int = 250
    batch_size: int = 4
    d_model: int = 64
    num_heads: int = 2
    num_layers: int = 4
    segment: int = 64
    excluded_chunks: int = 8
    max_lr: float = 3e-3
    tau: float = 4.0
    alpha: float = 1.0  # weight of the retrieval loss
    every: int = 50  # steps between two scores
    reader: bool = False
    candidates: int = CANDIDATES
    rates: dict[str, float] = field(default_factory=dict)

    def config(self, **changes) -> RPTConfig:
        """Return the model's configuration with some fields changed."""
        same = ("d_model", "num_heads", "num_layers", "segment", "excluded_chunks")
        sizes = {name: getattr(self, name) for name in same} | {"d_ff": 4 * self.d_model}
        sizes |= {"vocab_size": self.deck.vocab_size, "chunk_len": self.deck.chunk_len}
        upper = tuple(range(self.num_layers // 2 + 1, self.num_layers + 1))
        return RPTConfig(**sizes | {"cca_layers": upper, "score_scale": self.d_model**-0.5} | changes)


class Documents(NamedTuple):
    """Documents with their labels.

    tokens: [n,N]. far: bool [n,L]. right: bool [n,L,L]. lessons, lexical: supervision by the reference language model
    and by BM25. with_target, without: BM25's neighbours [n,L,K] of (c_i, c_{i+1}) and of c_i.
    """

    tokens: Tensor
    far: Tensor
    right: Tensor
    lessons: Supervision
    lexical: Supervision
    with_target: Tensor
    without: Tensor

    @classmethod
    def draw(cls, plan: Plan, count: int, seed: int) -> Documents:
        """Draw `count` documents and label them."""
        deck, sizes = plan.deck, {"chunk_len": plan.deck.chunk_len, "excluded_chunks": plan.excluded_chunks}
        tokens, shown = deck.documents(count, seed)
        far, right = (torch.from_numpy(f(shown, plan.excluded_chunks)) for f in (deck.far, deck.right))
        chunks = tokens.reshape(count, -1, deck.chunk_len)
        bm25 = functools.partial(bm25_index, k=2, excluded_chunks=plan.excluded_chunks)
        rows = [torch.from_numpy(np.stack([bm25(c, with_target=t)[0] for c in chunks])) for t in (True, False)]
        tokens, sizes["candidates"] = torch.from_numpy(tokens), plan.candidates
        reference = (Reader if plan.reader else Copyist)(deck)
        lessons = [stack([supervise(t, lm, **sizes) for t in tokens]) for lm in (reference, None)]
        return cls(tokens, far, right, *lessons, *rows)

    def rows(self, which) -> Documents:
        """Return some of the documents."""
        return Documents(*(part.rows(which) if isinstance(part, Supervision) else part[which] for part in self))


def symbols(deck: Deck) -> Symbols:
    """Return a word for every token: a syllable for contents and noise, a capitalised pair of syllables for names."""
    syllables = [c + v for c in "bdfghklmnprstvwz" for v in "aeiou"]
    pairs = (f"{a}{b}".capitalize() for b in syllables for a in syllables)
    contents = [*itertools.islice(itertools.chain(syllables, pairs), deck.contents)]
    return Symbols([*contents, *itertools.islice(pairs, deck.vocab_size - deck.contents)])


def keep(folder: Path, plan: Plan, model: RPT, scored: Documents) -> None:
    """Write the model and some scored documents as a folder for `retro-model ask` and `serve`."""
    shown = enumerate(scored.tokens[:12].numpy(), 1)
    documents = [Document(f"made-up document {number}", "cards", ids) for number, ids in shown]
    sizes = {"chunk_len": plan.deck.chunk_len, "window": scored.tokens.shape[1], "bos": False}
    title = "RPT, trained on made-up cards that return"
    folders.keep(folder, "rpt", title, model, symbols(plan.deck), documents, **sizes)


@torch.no_grad()
def score(model: RPT, documents: Documents, variant: Variant) -> dict[str, float]:
    """Return the nats a far token and the nats a token for each source of neighbours, and the recall: the share of far
    cues with a right chunk among the K neighbours."""
    model.eval()
    results, kinds = {}, {"off": {"retrieval": False}}
    if variant.neighbours != "none":
        teacher = documents.lessons.teacher(model.config.num_neighbours)
        kinds["random"] = {"index": random_chunks(teacher, model.config.excluded_chunks)}
        kinds["teacher"] = {"index": teacher}
        kinds["own"] = {"index": documents.without} if variant.neighbours == "bm25" else {}
    for name, options in kinds.items():
        results[name], results[f"{name}, all"] = _nats(model, documents, options)
    if variant.neighbours != "none":
        index = documents.without
        if variant.neighbours == "own":
            index = torch.cat([model.retrieve(t)[1] for t in documents.tokens.split(8)])
        hit = documents.right.gather(2, index.clamp(min=0)) & (index >= 0)
        results["recall"] = hit.any(-1)[documents.far].double().mean().item()
    return results


def _nats(model: RPT, documents: Documents, options: dict) -> tuple[float, float]:
    losses = []
    for at in range(0, len(documents.tokens), 8):
        tokens = documents.tokens[at : at + 8]
        block = {n: v[at : at + 8] if isinstance(v, Tensor) else v for n, v in options.items()}
        logits = model(tokens, **block)[:, :-1]
        nats = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(len(tokens), -1)
        losses.append(F.pad(nats, (1, 0)).unflatten(1, (-1, model.config.chunk_len)))
    losses = torch.cat(losses)
    return losses[:, 1:][documents.far[:, :-1]].mean().item(), losses.flatten(1)[:, 1:].mean().item()


class Stopped(Exception):
    """Time is up; a checkpoint is on disk."""


def fit(
    variant: Variant, plan: Plan, train: Documents, scored: Documents, place: Path, *, seed: int, until: float, report
) -> tuple[RPT, list[dict]]:
    """Train a variant, from the checkpoint at `place` if there is one; return the model and the scores along the way.

    until: time of `time.monotonic` at which to stop. report: called with each row of scores.
    Raises: Stopped, with a checkpoint at `place`.
    """
    torch.manual_seed(seed)
    model = RPT(plan.config(**variant.changes))
    start_rpt_copying(model)
    rates = {"max_lr": plan.max_lr, "warmup_steps": min(20, plan.steps // 10)}
    settings = Settings(plan.steps, **rates, weight_decay=0.0, betas=(0.9, 0.99))
    weights = {"alpha_ret": variant.trunk_share * plan.alpha, "retriever_alpha": plan.alpha, "alpha_steps": 0}
    lessons = Lessons(plan.steps, **weights, tau=plan.tau)
    optimizer = make_optimizer(model, settings, lessons, "adamw", plan.rates)
    order = torch.randperm(len(train.tokens), generator=torch.Generator().manual_seed(seed))
    first, seconds, history = 0, 0.0, []

    def look(step: int) -> None:
        history.append({"step": step, "seconds": round(seconds, 1)} | score(model, scored, variant))
        report(history[-1])

    if place.exists():
        state = checkpoint.load(place, model, optimizer)
        first, seconds, history = state["step"], state["extra"]["seconds"], state["extra"]["history"]
    else:
        look(0)
    for step in range(first, plan.steps):
        start = time.perf_counter()
        draw = torch.Generator().manual_seed(seed * plan.steps + step)  # the same draws in a resumed run
        part = train.rows(order[torch.arange(step * plan.batch_size, (step + 1) * plan.batch_size) % len(order)])
        taught = None if variant.neighbours != "own" else part.lexical if variant.lexical else part.lessons
        options = {"index": part.with_target} if variant.neighbours == "bm25" else {}
        train_step(model, optimizer, part.tokens, taught, settings, lessons, step, generator=draw, **options)
        seconds += time.perf_counter() - start
        done, late = step + 1, time.monotonic() > until
        whole = done == plan.steps or done % plan.every == 0
        if whole:
            look(done)
        if whole or late:
            checkpoint.save(place, model, optimizer, step=done, extra={"seconds": seconds, "history": history})
        if late and done < plan.steps:
            raise Stopped(f"{place.name}: step {done} of {plan.steps}")
    return model.eval(), history
