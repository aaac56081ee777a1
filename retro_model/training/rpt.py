"""Training an RPT: the language model's loss and the retriever's, scheduled sampling, the ramps, two learning rates.

settings = training.Settings(steps, max_lr=5e-3)
lessons = Lessons(steps=settings.steps, alpha_ret=1e-9, tau=4.0)
optimizer = make_optimizer(model, settings, lessons)
for step in range(settings.steps):
    report = train_step(model, optimizer, tokens, supervision, settings, lessons, step)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from retro_model.base import checks
from retro_model.rpt.config import OWN
from retro_model.rpt.loss import lambda_rank
from retro_model.rpt.supervision import CANDIDATES, Supervision

from . import processes
from .adabelief import AdaBelief
from .optimiser import Settings, learning_rate, parameter_groups
from .step import autocast, clipped_step

OPTIMIZERS = ("adabelief", "adamw")
TEACHERS = ("scheduled", "always", "never")


@dataclass(frozen=True)
class Lessons:
    """Schedule of the retriever's training.

    steps: T, of the whole training.
    alpha_ret: weight of the retrieval loss in the decoder; 0: the retriever's inputs are detached.
    retriever_alpha: weight of the same loss in W_Q and W_K; None: alpha_ret. They have no other loss, so under Adam
        it changes their steps only where gradients are as small as eps. `retriever_lr` does change them.
    retriever_lr: learning rate of W_Q and W_K as a multiple of the other parameters'.
    alpha_steps: steps over which both weights rise from 0 (100,000 in the paper); 0: none.
    tau: margin at the end; it rises linearly from `tau_first`. The paper's, by data set: Books3 128, PG19 4,
        CodeParrot 2, ArXiv 8.
    teacher: "scheduled": a sequence gets the teacher's neighbours with a probability that falls from 1 to 0 by a
        cosine over 90% of the steps. "always" (teacher forcing) and "never" are the paper's ablations.
    scored_only: rank only the scored candidates in the loss.
    Source: Rubin and Berant, arXiv 2306.13421, sections 3.3 and 3.4, table 4; tau_first = 1 is the authors' code's.
    """

    steps: int
    alpha_ret: float = 1e-9
    retriever_alpha: float | None = None
    retriever_lr: float = 1.0
    alpha_steps: int = 100_000
    tau: float = 4.0
    tau_first: float = 1.0
    teacher: str = "scheduled"
    scored_only: bool = False

    def __post_init__(self):
        checks.integer("steps", self.steps, low=1)
        checks.integer("alpha_steps", self.alpha_steps, low=0)
        for name in ("tau", "tau_first", "retriever_lr"):
            if not 0 <= checks.number(name, getattr(self, name)) < math.inf:
                raise ValueError(f"{name}: expected a finite number from 0; got {getattr(self, name)}")
        if self.teacher not in TEACHERS:
            raise ValueError(f"teacher: expected one of {TEACHERS}; got {self.teacher!r}")
        if not 0 <= self.alpha_ret <= self.for_retriever:
            why = "the decoder's share comes through W_Q and W_K"
            want = f"a weight from 0 to retriever_alpha = {self.for_retriever}"
            raise ValueError(f"alpha_ret: expected {want}; got {self.alpha_ret} ({why})")

    @property
    def for_retriever(self) -> float:
        """retriever_alpha, or alpha_ret where that is None."""
        return self.alpha_ret if self.retriever_alpha is None else self.retriever_alpha

    @property
    def trunk_share(self) -> float:
        """Factor on the gradient that flows from q and k into the decoder."""
        return self.alpha_ret / self.for_retriever if self.for_retriever else 0.0

    def weight(self, step: int) -> float:
        """Return the weight of the retrieval loss at a step, counted from 0."""
        return self.for_retriever * (min(1.0, step / self.alpha_steps) if self.alpha_steps else 1.0)

    def margin(self, step: int) -> float:
        """Return tau at a step."""
        return self.tau_first + (self.tau - self.tau_first) * min(1.0, step / max(1, self.steps - 1))

    def teacher_share(self, step: int) -> float:
        """Return p_ss, the probability that a sequence's neighbours are the teacher's."""
        if self.teacher != "scheduled":
            return float(self.teacher == "always")
        done = step / (0.9 * self.steps)
        return 0.5 * (1 + math.cos(math.pi * done)) if done < 1 else 0.0


def make_optimizer(
    model: nn.Module, settings: Settings, lessons: Lessons, kind: str = "adabelief", rates: Mapping[str, float] = {}
) -> torch.optim.Optimizer:
    """Return AdaBelief or AdamW over `parameter_groups`, with W_Q and W_K in groups of their own.

    Call it after the model is sharded.
    rates: prefix of parameters' names -> learning rate as a multiple of the others', e.g. {"embedding.": 3.0}.
    """
    if kind not in OPTIMIZERS:
        raise ValueError(f"kind: expected one of {OPTIMIZERS}; got {kind!r}")
    plain = getattr(model, "module", model)
    retriever, scales = getattr(plain, "retriever", None), {}
    for start, scale in rates.items():
        scales |= {id(p): scale for name, p in plain.named_parameters() if name.startswith(start)}
    if retriever is not None:
        scales |= dict.fromkeys((id(retriever.query.weight), id(retriever.key.weight)), lessons.retriever_lr)
    groups = []
    for group in parameter_groups(model, settings.weight_decay):
        for scale in sorted({scales.get(id(p), 1.0) for p in group["params"]}):
            params = [p for p in group["params"] if scales.get(id(p), 1.0) == scale]
            groups.append({**group, "params": params, "lr_scale": scale})
    if kind == "adabelief":
        return AdaBelief(groups, lr=settings.warmup_from, betas=settings.betas)
    return torch.optim.AdamW(groups, lr=settings.warmup_from, betas=settings.betas, eps=settings.eps)


def neighbours_for(
    supervision: Supervision | None, k: int, share: float, generator: torch.Generator | None = None
) -> Tensor | None:
    """Return the `index` of a training step: the teacher's neighbours for a share of the sequences, `OWN` for the rest.

    None, without supervision: the model's own for all.
    """
    if supervision is None:
        return None
    index = supervision.teacher(k)
    taught = torch.rand(len(index), generator=generator) < share
    return torch.where(taught.to(index.device).view(-1, *[1] * (index.dim() - 1)), index, OWN)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    supervision: Supervision | None,
    settings: Settings,
    lessons: Lessons,
    step: int,
    *,
    index: Tensor | None = None,
    generator: torch.Generator | None = None,
    loss_mask: Tensor | None = None,
) -> dict[str, float]:
    """Take one optimiser step on the mean loss a token and the mean retrieval loss a pair, over all processes.

    model: an RPT, or an RPT that DDP or FSDP2 wraps.
    tokens: int64 [B,N], this process's.
    supervision: of the tokens; None: no retrieval loss.
    step: from 0 to lessons.steps - 1; sets rates, weights and the teacher's share.
    index: neighbours [B,L,K] in place of the schedule's; needed, with supervision=None, without a retriever.
    generator: draws the sequences that get the teacher's neighbours.
    loss_mask: [B,N], the tokens whose loss counts (a row's first never does); None: all.
    Returns: loss (nats a token), retrieval_loss (nats a pair), teacher_share, gradient_norm (before clipping),
    learning_rate, pairs.
    Raises: FloatingPointError: the gradient is not finite; ValueError: no token's loss counts. The parameters are
        unchanged then.
    """
    checks.integer("step", step, low=0, high=lessons.steps - 1)
    rate, share, weight = learning_rate(step, settings), lessons.teacher_share(step), lessons.weight(step)
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)
    model.train()
    if index is None:
        index = neighbours_for(supervision, getattr(model, "module", model).config.num_neighbours, share, generator)
    with autocast(tokens.device, settings):
        real = torch.ones_like(tokens, dtype=torch.bool) if loss_mask is None else loss_mask
        options = {"index": index, "trunk_share": lessons.trunk_share, "loss_mask": real}
        out, retrieved = model(tokens, return_retrieved=True, **options)
        nats = out.total
        ranking, pairs = nats.new_zeros(()), nats.new_zeros((), dtype=torch.int64)
        if supervision is not None and retrieved is not None and retrieved.scores is not None:
            scores, margin = retrieved.scores, lessons.margin(step)
            options = {"positives": CANDIDATES, "scored_only": lessons.scored_only}
            ranking, pairs = lambda_rank(scores, supervision.dense(), margin, **options)
    counted = real[:, 1:].sum()
    totals = torch.stack([nats.detach(), ranking.detach(), counted.to(nats.dtype), pairs.to(nats.dtype)])
    count = processes.count()
    if count > 1:
        dist.all_reduce(totals)
    # DDP and FSDP average gradients over processes; the loss is a mean over tokens and pairs instead
    loss = nats * (count / totals[2]) + ranking * (weight * count / totals[3].clamp(min=1))
    loss.backward()
    norm = clipped_step(model, optimizer, settings.clip)
    optimizer.zero_grad(set_to_none=True)
    nats, ranking, tokens_counted, pairs, norm = torch.cat([totals, norm[None].to(totals.dtype)]).tolist()
    if not tokens_counted:
        raise ValueError("loss_mask: expected at least one token behind a row's first; got none")
    loss = nats / tokens_counted
    if not math.isfinite(norm):
        raise FloatingPointError(f"gradient norm is {norm} at step {step}: loss {loss}, learning rate {rate:.3g}")
    report = {"loss": loss, "retrieval_loss": ranking / max(1, pairs), "teacher_share": share}
    return report | {"gradient_norm": norm, "learning_rate": rate, "pairs": pairs}
