"""Training of the parameters that a retrofit adds, for some steps. It continues after a kill."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import nn

from retro_model import training
from retro_model.training import checkpoint

from .options import Fit, Sizes

SAVED_EVERY = 5  # steps
ENCODER = 256  # width of the encoder of new layers


def changes(attention: str, sizes: Sizes, decoder_layers: int, layers: tuple[int, ...] | None, rank: int) -> dict:
    """Return the arguments of `retrofit`.

    attention: "own", in all layers, or "new": an encoder of one layer, and cross-attention after every fourth layer of
    the upper third. layers: layers that attend neighbours, instead of these. rank: an option of own attention.
    """
    lengths = {"chunk_len": sizes.chunk_len, "neighbour_len": sizes.passage_chunks * sizes.chunk_len}
    if attention == "own":
        return {"neighbours": "own", "cca_layers": layers, **lengths, "rank": rank}
    layers = layers or tuple(range(max(1, decoder_layers * 2 // 3), decoder_layers + 1, 4))
    encoder = {"layers": 1, "d_model": ENCODER, "d_ff": 2 * ENCODER, "heads": 4, "head_dim": ENCODER // 4}
    return {"cca_layers": layers, **lengths, **{f"encoder_{name}": n for name, n in encoder.items()}}


def fit(
    model: nn.Module,
    stream: Callable[[int], Iterator[training.Batch]],
    how: Fit,
    sizes: Sizes,
    folder: Path,
    show=print,
) -> dict:
    """Train the parameters that are not frozen. Continue from the last step if the folder has the same training.

    stream: returns the batches from a position on. sizes: sizes of the windows. With 0 steps nothing is trained.
    Returns: steps, tokens, CPU seconds and the last losses.
    """
    trained = nn.ParameterList(p for p in model.parameters() if p.requires_grad)
    added = nn.ModuleDict({"added": trained})  # checkpoints do not hold the decoder
    state = checkpoint.read_state(folder) if (folder / "state.json").exists() else None
    of = {"how": dataclasses.asdict(how), "plan": dataclasses.asdict(sizes)}
    if state and {name: state["extra"].get(name) for name in of} != of:
        state = None  # it belongs to another training
    done = of | {"cpu_seconds": 0.0, "tokens": 0, "losses": []} | (state["extra"] if state else {})
    if how.steps == 0:
        return done | {"steps": 0}
    steps, rates = how.steps, {"max_lr": how.max_lr, "warmup_steps": min(10, how.steps // 5)}
    settings = training.Settings(steps, **rates, weight_decay=0.01, autocast=how.autocast)
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
        done["steps"] = steps
        done["tokens"] += sum(h["tokens"] for h in history)
        done["cpu_seconds"] += time.process_time() - began
        done["losses"] = [*done["losses"], *(round(h["loss"], 4) for h in history)]
        checkpoint.save(folder, added, optimizer, step=stop, position=stop, extra=done)
        left = done["cpu_seconds"] / stop * (steps - stop)
        mean = sum(h["loss"] for h in history) / len(history)
        show(f"  step {stop} of {steps}: loss {mean:.3f}, {left:.0f} s left")
    return done
