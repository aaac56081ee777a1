"""Training of what a retrofit adds: for so many steps or minutes, saved now and then, resumed where it was stopped."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import nn

from retro_model import training
from retro_model.training import checkpoint

from .options import Fit

SAVED_EVERY = 5  # steps


class Added(nn.Module):
    """The parameters of a model that train, as a module of their own: a checkpoint without the decoder."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.added = nn.ParameterList(p for p in model.parameters() if p.requires_grad)


def fit(
    model: nn.Module, stream: Callable[[int], Iterator[training.Batch]], how: Fit, folder: Path, show=print
) -> dict:
    """Trains what is not frozen. A folder that holds a training goes on from its last step.

    stream: gives the batches from a position on. Returns: steps, tokens, CPU seconds and the last losses.
    """
    added = Added(model)
    state = checkpoint.read_state(folder) if (folder / "state.json").exists() else None
    done = dict(state["extra"]) if state else {"cpu_seconds": 0.0, "tokens": 0, "losses": []}
    steps = done.get("steps") or (how.steps if how.minutes is None else _steps_within(model, stream, how))
    settings = training.Settings(
        steps, max_lr=how.max_lr, warmup_steps=min(10, steps // 5), weight_decay=0.01, autocast=how.autocast
    )
    optimizer, first = training.make_optimizer(model, settings), 0
    if state:
        checkpoint.load(folder, added, optimizer)
        first = state["step"]
    batches = stream(first)
    for start in range(first, steps, SAVED_EVERY):
        began, stop = time.process_time(), min(steps, start + SAVED_EVERY)
        history = training.train(model, optimizer, batches, settings, start=start, stop=stop)
        done["steps"] = steps
        done["tokens"] += sum(h["tokens"] for h in history)
        done["cpu_seconds"] += time.process_time() - began
        done["losses"] = [*done["losses"], *(round(h["loss"], 4) for h in history)]
        checkpoint.save(folder, added, optimizer, step=stop, position=stop, extra=done)
        left = done["cpu_seconds"] / stop * (steps - stop)
        mean = sum(h["loss"] for h in history) / len(history)
        show(f"  step {stop} of {steps}: loss {mean:.3f}, {left:.0f} s left")
    return done


def _steps_within(model: nn.Module, stream, how: Fit) -> int:
    """Steps that fit into `minutes`, from the time of two whose learning rate moves nothing."""
    settings = training.Settings(2, max_lr=1e-12, warmup_steps=0, weight_decay=0.0, autocast=how.autocast)
    history = training.train(model, training.make_optimizer(model, settings), stream(0), settings)
    return max(1, math.floor(60 * how.minutes / min(h["seconds"] for h in history)))
