"""time launches on a GPU next to their estimates

Reads the records of `bench estimate` (bench/results/predicted-*.jsonl), makes each launch on random data of the shipped
shape, and times it by device events with a cold L2. Prints both times and their ratio, then how many are within 25% and
how well the order agrees. A launch is marked where its code is not the predicted code any more.
"""

import argparse
import contextlib
import json
from pathlib import Path

from ..measure.pace import Pace
from ..records import environment
from ..report.tables import align
from . import exits, options
from .progress import say

WITHIN = 0.25
HEADER = ("launch", "case", "type", "predicted us", "measured us", "ratio", "predicted bound", "code")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, given = parser.add_argument, "compare with these predictions (default: all in bench/results)"
    add("--device", choices=("cpu", "cuda"), default="cuda", help="cpu: launches go nowhere (rehearsal)")
    add("--predictions", type=Path, metavar="FILE", help=given)
    options.add_ops(parser, cases=False)
    options.add_launches(parser)
    add("--once", action="store_true", help="launch each once and time nothing: for a profiler")
    add("--json", type=Path, metavar="FILE", help="append what was measured here")
    options.add_deadline(parser)


def execute(arguments: argparse.Namespace) -> int:
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise exits.UsageError("--device cuda: torch.cuda.is_available() is False on this machine")
    name = None if arguments.device == "cpu" else environment.device("cuda")["name"]
    predicted = predictions(arguments.predictions, name)
    wanted = options.parts(arguments)
    chosen = [i for i in predicted if wanted is None or any(part in i for part in wanted)]
    if not chosen:
        raise exits.UsageError(f"--launch {','.join(wanted or ())}: no prediction of such a launch")
    shipped = launches(chosen)
    for identity in chosen:
        if identity not in shipped:
            say(f"{identity}: not launched by this tree any more")
    if arguments.once:
        return run_once(list(shipped.values()), arguments.device)
    rows, pace, late = [], Pace([], arguments.deadline), 0
    for identity in chosen:
        if pace.over():
            late += 1
            continue
        if identity not in shipped:
            continue
        same = [row for row in predicted[identity] if row["fingerprint"] == shipped[identity].fingerprint]
        rows.append(row := measured(shipped[identity], (same or predicted[identity])[-1], arguments.device))
        if arguments.json:
            with arguments.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    print(align([HEADER, *(line(row) for row in rows)]))
    print(summary(rows))
    if late:
        say(f"the deadline is over: {late} of {len(chosen)} are left")
        return exits.INCONCLUSIVE
    return exits.OK if rows else exits.NOTHING_MEASURED


def predictions(path: Path | None, device: str | None) -> dict[str, list[dict]]:
    """Return the predictions by id, oldest first, of one file or of bench/results, and of a device by its full name.

    Raises UsageError if the record lacks a prediction for it.
    """
    folder = environment.ROOT / "bench" / "results"
    paths = [path] if path else sorted(folder.glob("predicted-*.jsonl"), key=lambda file: file.stem)
    rows = [row for file in paths for row in map(json.loads, file.read_text().splitlines()) if row["mode"] == "model"]
    if not rows:
        raise exits.UsageError("--predictions: found none; `retro-bench estimate --json FILE` makes some")
    ours = [row for row in rows if device is None or row["machine"] in device.split()]
    if not ours:
        have = ", ".join(sorted({row["machine"] for row in rows}))
        raise exits.UsageError(f"no predictions for {device}; have {have}")
    found: dict[str, list[dict]] = {}
    for row in ours:
        found.setdefault(row["id"], []).append(row)
    return found


def run_once(shipped: list, device: str) -> int:
    """Launch each once, for a profiler to look at."""
    import torch

    for one in shipped:
        with on(device, one):
            filled(one.launch, device).run()
        if device == "cuda":
            torch.cuda.synchronize()
    return exits.OK if shipped else exits.NOTHING_MEASURED


def launches(identities: list[str]) -> dict:
    """Return the launches with these identities that this tree ships, by id."""
    from ..static import triton_kernels

    arches = sorted({int(identity.split(":sm")[1].split("/")[0]) for identity in identities})
    return {one.id: one for one in triton_kernels.launches(arches, tuple(identities)) if one.wanted}


def measured(one, prediction: dict, device: str) -> dict:
    """Time one shipped launch. Return its row, with the prediction."""
    from ..measure import timing

    identity = one.id
    launch, effort = filled(one.launch, device), timing.Effort()
    if device == "cpu":
        effort = timing.Effort(most=3, seconds=0.0)
    with on(device, one):
        found = timing.measure({identity: launch.run}, device, effort)[identity]
    if isinstance(found, Exception):
        raise found
    return {
        "mode": "predicted",
        "id": identity,
        "predicted_us": prediction["predicted_us"],
        "measured_us": round(1e6 * found["median"], 2),
        "bound": prediction["bound"],
        "same_code": one.fingerprint == prediction["fingerprint"],
        "device": environment.device(device),
        "environment": environment.environment(),
    }


def filled(launch, device: str):
    """Return the launch on data of its own: random floats, zero integers, true masks."""
    import torch

    from ptx_emulator.memory import elements, replaced

    def fill(like: torch.Tensor) -> torch.Tensor:
        flat = torch.full((elements(like),), like.dtype in (torch.bool, torch.uint8), device=device, dtype=like.dtype)
        if like.is_floating_point():
            flat.normal_()
        return flat.as_strided(like.shape, like.stride())

    return replaced(launch, fill)


def on(device: str, one) -> contextlib.AbstractContextManager:
    """Context in which a launch runs: a stub of its device where the machine has only a CPU."""
    if device == "cuda":
        return contextlib.nullcontext()
    from retro_kernels.testing import stub

    return stub.device(int(one.id.split(":sm")[1].split("/")[0]))


def line(row: dict) -> tuple[str, ...]:
    kernel, case, rest = row["id"].split("/", 2)[2].split(":", 2)
    predicted, measured = row["predicted_us"], row["measured_us"]
    times = (f"{predicted:.1f}", f"{measured:.1f}", f"{measured / predicted:.2f}")
    return (kernel, case, rest.split("/")[1], *times, row["bound"], "" if row["same_code"] else "changed since")


def summary(rows: list[dict]) -> str:
    """Say how good the predictions are: how many are within WITHIN, and the rank correlation of the two times.

    >>> pairs = [(10, 11), (20, 40), (30, 33)]
    >>> summary([{"predicted_us": p, "measured_us": m} for p, m in pairs])
    '2 of 3 within 25%; rank correlation 0.50'
    """
    close = sum(abs(row["measured_us"] / row["predicted_us"] - 1) <= WITHIN for row in rows)
    said = f"{close} of {len(rows)} within {WITHIN:.0%}"
    if len(rows) < 3:
        return said
    columns = ([row[name] for row in rows] for name in ("predicted_us", "measured_us"))
    ranks = [[sorted(column).index(time) for time in column] for column in columns]
    n, squares = len(rows), sum((a - b) ** 2 for a, b in zip(*ranks))
    return f"{said}; rank correlation {1 - 6 * squares / (n * (n * n - 1)):.2f}"
