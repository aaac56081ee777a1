"""AdamW, its parameter groups, and the schedule of its learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from retro_model.base import checks

AUTOCAST = (None, "bfloat16", "float16")  # types of matrix products; None: the parameters' own

TRAINING_TOKENS = 419_430_400_000  # of every model of the paper
WINDOW = 2048
#: preset -> (largest learning rate, sequences a batch) of the paper. Source: Table 10 and appendix C.1; Table 12
#: retrofits at the same rates.
TABLE_10 = {"172m": (2e-4, 256), "425m": (2e-4, 256), "1.5b": (2e-4, 256), "7.5b": (1e-4, 1024)}


@dataclass(frozen=True)
class Settings:
    """Hyper-parameters of the optimiser and its schedule. Source: appendix C.1 and Table 10 of arXiv 2112.04426.

    steps: length of the schedule, warm-up included. max_lr: learning rate after the warm-up. min_lr_ratio: last rate of
    the cosine, as a share of max_lr. warmup_steps: steps of the linear ramp from warmup_from. clip: largest norm of the
    whole gradient. autocast: type of matrix products, None for the parameters' own (the paper trains in bfloat16).

    Raises: TypeError, ValueError naming the field.
    """

    steps: int
    max_lr: float = 2e-4
    min_lr_ratio: float = 0.1
    warmup_steps: int = 750
    warmup_from: float = 1e-7
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float = 1.0
    autocast: str | None = None

    @classmethod
    def preset(cls, name: str, batch_size: int | None = None) -> Settings:
        """Return the paper's settings for a preset of `RetroConfig`, or for "wikitext103".

        batch_size: sequences a batch; None: `TABLE_10`'s. On Wikitext103 (appendix C.2), step 35,000 is the best.
        """
        if name == "wikitext103":
            return cls(100_000, max_lr=2.5e-4, min_lr_ratio=0.08, warmup_steps=4000)
        if name not in TABLE_10:
            raise ValueError(f"name: expected one of {', '.join(TABLE_10)}, wikitext103; got {name!r}")
        max_lr, sequences = TABLE_10[name]
        return cls(TRAINING_TOKENS // (WINDOW * (batch_size or sequences)), max_lr=max_lr, autocast="bfloat16")

    def __post_init__(self):
        checks.integer("steps", self.steps, low=1)
        checks.integer("warmup_steps", self.warmup_steps, low=0, high=self.steps)
        for name in ("max_lr", "clip", "eps"):
            if checks.number(name, getattr(self, name)) <= 0:
                raise ValueError(f"{name}: expected a positive number; got {getattr(self, name)}")
        for name in ("warmup_from", "weight_decay"):
            if checks.number(name, getattr(self, name)) < 0:
                raise ValueError(f"{name}: expected a number that is not negative; got {getattr(self, name)}")
        if not 0 <= checks.number("min_lr_ratio", self.min_lr_ratio) <= 1:
            raise ValueError(f"min_lr_ratio: expected a share from 0 to 1; got {self.min_lr_ratio}")
        if not isinstance(self.betas, (tuple, list)) or len(self.betas) != 2:
            raise ValueError(f"betas: expected two decay rates; got {self.betas!r}")
        for beta in self.betas:
            if not 0 <= checks.number("betas", beta) < 1:
                raise ValueError(f"betas: expected decay rates in [0, 1); got {self.betas}")
        if self.autocast not in AUTOCAST:
            raise ValueError(f"autocast: expected one of {AUTOCAST}; got {self.autocast!r}")


def learning_rate(step: int, settings: Settings) -> float:
    """Return the rate at a step: a linear ramp to max_lr, a cosine to min_lr_ratio * max_lr, then constant."""
    s, step = settings, checks.integer("step", step, low=0)
    if step < s.warmup_steps:
        return s.warmup_from + (s.max_lr - s.warmup_from) * step / s.warmup_steps
    done = min(1.0, (step - s.warmup_steps) / max(1, s.steps - s.warmup_steps))
    low = s.min_lr_ratio * s.max_lr
    return low + (s.max_lr - low) * 0.5 * (1 + math.cos(math.pi * done))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Return two groups of the trainable parameters: with weight decay, and without.

    Matrices of linear maps decay: the next norm or softmax can undo their scale. Gains of norms, biases, u and v set
    scales and offsets, so they do not decay. Embeddings do not: a row gets a gradient only when its token occurs, and
    decay at every step would erase rare tokens. An output matrix tied to an embedding is treated as the embedding. A
    module lists other parameters that decay in `decayed`.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    matrices = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)} - embeddings
    matrices |= {id(getattr(m, name)) for m in model.modules() for name in getattr(m, "decayed", ())}
    decayed = [p for p in trainable if id(p) in matrices]
    others = [p for p in trainable if id(p) not in matrices]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def by_mesh(parameters: Iterable[nn.Parameter]) -> dict[Any, list[nn.Parameter]]:
    """Group parameters by their device mesh; None: parameters that are whole in every process."""
    meshes: dict[Any, list[nn.Parameter]] = {}
    for p in parameters:
        meshes.setdefault(getattr(p, "device_mesh", None), []).append(p)
    return meshes


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """Return AdamW over `parameter_groups`. Call it after the model is on its device and sharded.

    Each device mesh (tensor parallelism beside FSDP2) has groups of its own: a fused step takes parameters of one mesh.
    """
    groups = []
    for group in parameter_groups(model, settings.weight_decay):
        groups += [{**group, "params": params} for params in by_mesh(group["params"]).values()]
    if not groups:
        raise ValueError("model: expected trainable parameters; got none")
    return torch.optim.AdamW(groups, lr=settings.warmup_from, betas=settings.betas, eps=settings.eps, fused=True)
