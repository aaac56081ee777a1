"""Memory Mosaics beside transformers of equal size: the models, and one training with scores along the way."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import torch
from torch import nn

from retro_model import training
from retro_model.memory_mosaics import MemoryMosaics, MosaicsConfig

from .transformer import Transformer, TransformerConfig

MOSAICS = "Memory Mosaics"
SIZES = ("d_model", "num_heads", "num_layers")  # of a plan


def make(name: str, plan, vocab_size: int, seed: int, **options) -> nn.Module:
    """Return the model of this name, with weights drawn from `seed`. options: of a transformer."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": vocab_size} | {size: getattr(plan, size) for size in SIZES}
    if name == MOSAICS:
        return MemoryMosaics(MosaicsConfig(**sizes, persistent_slots=7 * plan.d_model // 2))
    return Transformer(TransformerConfig(**sizes, **options))


def fit(
    model: nn.Module, batches: Iterator, plan, rate: float, points: list[int], look: Callable, title: str, quiet: bool
) -> dict:
    """Train up to the last of the steps `points`, the first of which is 0; return the facts of the run.

    Its `curve` has a row for each later point: step, mean training loss since the point before, and `look(model)`.
    """
    settings = training.Settings(plan.steps, rate, warmup_steps=plan.steps // 20, weight_decay=plan.weight_decay)
    optimizer, curve, seconds = training.make_optimizer(model, settings), [], 0.0
    with training.progress(title, plan.steps, quiet) as progress:
        how = {"report": progress, "keep_memory": True}
        for first, stop in itertools.pairwise(points):
            start = time.perf_counter()
            history = training.train(model, optimizer, batches, settings, start=first, stop=stop, **how)
            seconds += time.perf_counter() - start
            loss = sum(h["loss"] for h in history) / len(history)
            curve.append({"step": stop, "loss": loss} | look(model))
    parameters = sum(p.numel() for p in model.parameters())
    return {"parameters": parameters, "seconds": round(seconds, 1), "rate": rate, "curve": curve}
