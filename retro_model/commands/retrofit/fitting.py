"""Training of the parameters that a retrofit adds, for some steps. It continues after a kill."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import nn

from retro_model import training
from retro_model.training import checkpoint

SAVED_EVERY = 5  # steps
MAX_LR = 0.05


def fit(
    model: nn.Module,
    stream: Callable[[int], Iterator[training.Batch]],
    steps: int,
    of: dict,
    folder: Path,
    show: Callable[[str], None] = print,
) -> dict:
    """Train the parameters that are not frozen. Continue from the last step if the folder has the same training.

    stream: returns the batches from a position on. steps: with 0 nothing is trained. of: the settings of the training,
    as JSON.
    Returns: steps, tokens, CPU seconds and the last losses.
    """
    added = nn.ModuleDict({"added": nn.ParameterList(p for p in model.parameters() if p.requires_grad)})
    state = checkpoint.read_state(folder) if (folder / "state.json").exists() else None
    of = of | {"steps": steps}
    if state and state["extra"].get("of") != of:
        state = None  # it belongs to another training
    done = state["extra"] if state else {"of": of, "steps": 0, "cpu_seconds": 0.0, "tokens": 0, "losses": []}
    if steps == 0:
        return done
    settings = training.Settings(steps, max_lr=MAX_LR, warmup_steps=min(10, steps // 5), weight_decay=0.01)
    optimizer, first = training.make_optimizer(model, settings), 0
    if state:
        checkpoint.load(folder, added, optimizer)
        first = state["step"]
        show(f"  continues after step {first} of {steps}")
    batches = stream(first)
    stops = {1, *range(SAVED_EVERY, steps, SAVED_EVERY), steps}  # the first step shows that the training runs
    for start, stop in itertools.pairwise([first, *sorted(stop for stop in stops if stop > first)]):
        began = time.process_time()
        history = training.train(model, optimizer, batches, settings, start=start, stop=stop)
        done["steps"] = stop
        done["tokens"] += sum(h["tokens"] for h in history)
        done["cpu_seconds"] += time.process_time() - began
        done["losses"] = [*done["losses"], *(round(h["loss"], 4) for h in history)]
        checkpoint.save(folder, added, optimizer, step=stop, position=stop, extra=done)
        left = done["cpu_seconds"] / stop * (steps - stop)
        mean = sum(h["loss"] for h in history) / len(history)
        show(f"  step {stop} of {steps}: loss {mean:.3f}, {left:.0f} s left")
    return done
