"""Time launches on a GPU next to their estimates: the step "predictions" of `retro-bench gpu fast`.

    python -m retro_bench.measure.predictions DEVICE SECONDS FILE [PART]

Takes the newest estimate of each launch for this GPU (bench/results/predicted-*.jsonl), makes the launch on random data
of the shipped shape, times it, and appends both times to FILE. Names a launch whose code is not the estimated code any
more. On the device "cpu" launches go nowhere: a rehearsal. PART selects launches by their ids.
"""

import contextlib
import json
import statistics
import sys
from pathlib import Path

import torch

from ptx_emulator.memory import elements, replaced
from retro_kernels.testing import stub

from ..records import environment, record
from ..report.tables import align
from ..static import triton_kernels
from . import timing
from .pace import Pace

WITHIN = 0.25
HEADER = ("launch", "estimated us", "measured us", "ratio", "bound", "code")


def newest(folder: Path, device: str) -> dict[str, dict]:
    """Return the newest estimate of each launch for a GPU, named in full. On "cpu": for any GPU."""
    found = {}
    for file in sorted(folder.glob("predicted-*.jsonl"), key=lambda file: file.stem):
        for row in map(json.loads, file.read_text().splitlines()):
            if row["mode"] == "model" and (device == "cpu" or row["machine"] in device.split()):
                found[row["id"]] = row
    return found


def measured(one: triton_kernels.CompiledCase, estimate: dict, device: str) -> dict:
    """Time one launch on data of its own. Return its row."""

    def fill(like: torch.Tensor) -> torch.Tensor:
        flat = torch.full((elements(like),), like.dtype in (torch.bool, torch.uint8), device=device, dtype=like.dtype)
        return (flat.normal_() if like.is_floating_point() else flat).as_strided(like.shape, like.stride())

    effort = timing.Effort(most=3, seconds=0.0) if device == "cpu" else timing.Effort()
    stand_in = stub.device(int(one.arch)) if device == "cpu" else contextlib.nullcontext()
    with stand_in:
        found = timing.one(replaced(one.launch, fill).run, device, effort)
    same = {"same_code": one.fingerprint == estimate["fingerprint"], "bound": estimate["bound"]}
    times = {"predicted_us": estimate["predicted_us"], "measured_us": round(1e6 * found["median"], 2)}
    return {"mode": "predicted", "id": one.id, **times, **same, "device": environment.device(device)}


def summary(rows: list[dict]) -> str:
    """Say how many estimates are within WITHIN, and how well they order the launches.

    >>> summary([{"predicted_us": p, "measured_us": m} for p, m in [(10, 11), (20, 40), (30, 33)]])
    '2 of 3 within 25%; rank correlation 0.50'
    """
    times = [(row["predicted_us"], row["measured_us"]) for row in rows]
    said = f"{sum(abs(b / a - 1) <= WITHIN for a, b in times)} of {len(rows)} within {WITHIN:.0%}"
    ranked = len(rows) > 2 and all(len(set(column)) > 1 for column in zip(*times))
    return said + (f"; rank correlation {statistics.correlation(*zip(*times), method='ranked'):.2f}" if ranked else "")


def main(device: str, seconds: str, file: str, part: str = "") -> int:
    """Return 0, 3 if the deadline left launches out, or 5 without estimates for this GPU."""
    name = device if device == "cpu" else environment.device("cuda")["name"]
    estimates = {i: row for i, row in newest(environment.ROOT / "bench" / "results", name).items() if part in i}
    arches = sorted({int(i.split(":sm")[1].split("/")[0]) for i in estimates})
    shipped = {one.id: one for one in triton_kernels.launches(arches, tuple(estimates)) if one.wanted}
    rows, pace = [], Pace([], float(seconds))
    for identity, estimate in estimates.items():
        if identity not in shipped:
            print(f"{identity}: not launched by this tree any more", file=sys.stderr)
        elif not pace.over():
            rows.append(row := measured(shipped[identity], estimate, device))
            record.append(Path(file), row)
    if not rows:
        print(f"no estimates for {name}" if not estimates else "nothing was timed", file=sys.stderr)
        return 3 if estimates and pace.over() else 5
    lines = [HEADER]
    for row in rows:
        before, now = row["predicted_us"], row["measured_us"]
        name, code = row["id"].split("/", 2)[2].removesuffix("/static"), "" if row["same_code"] else "changed since"
        lines.append((name, f"{before:.1f}", f"{now:.1f}", f"{now / before:.2f}", row["bound"], code))
    print(align(lines))
    print(summary(rows))
    return 3 if pace.over() else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
