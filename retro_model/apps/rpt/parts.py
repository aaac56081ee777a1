"""A training that may be stopped anywhere and goes on where it was."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from retro_model.training import checkpoint


class Stopped(Exception):
    """Time is up; what was trained is on disk."""


def train_in_parts(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    step_once: Callable[[int], dict],
    look: Callable[[int, float, dict | None], dict | None],
    place: Path,
    *,
    every: int,
    until: float,
) -> tuple[list[dict], float]:
    """Steps 0 to steps - 1, or those that the checkpoint at `place` has not seen.

    Args:
        step_once: one step of the model, by its number; what it draws depends on the number alone.
        look: called before the first step (results None), after every `every` steps and the last, with the steps done,
            the seconds they took and the last one's results; what it gives is kept.
        until: of `time.monotonic`.

    Returns:
        What `look` gave, and the seconds of the steps.

    Raises:
        Stopped: after `until`, with a checkpoint at `place`.
    """
    first, seconds, kept = 0, 0.0, []

    def looked(step: int, results: dict | None) -> None:
        row = look(step, seconds, results)
        if row is not None:
            kept.append(row)

    if place.exists():
        state = checkpoint.load(place, model, optimizer)
        first, seconds, kept = state["step"], state["extra"]["seconds"], state["extra"]["kept"]
    else:
        looked(0, None)
    for step in range(first, steps):
        start = time.perf_counter()
        results = step_once(step)
        seconds += time.perf_counter() - start
        done, late = step + 1, time.monotonic() > until
        if done == steps or done % every == 0:
            looked(done, results)
        if done == steps or done % every == 0 or late:
            checkpoint.save(place, model, optimizer, step=done, extra={"seconds": seconds, "kept": kept})
        if late and done < steps:
            raise Stopped(f"{place.name}: step {done} of {steps}")
    model.eval()
    return kept, seconds
