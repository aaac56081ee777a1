"""profile kernels: roofline, memory, launches, traces

On a CPU the same without launches, with the instructions of a call where valgrind is installed. Kernels are checked
first; one that fails is not timed. One trace a kernel, case, type and mode goes to --trace DIR, with the profiler's
table beside it; open it in chrome://tracing or Perfetto. --recipes prints command lines for Nsight Compute, Nsight
Systems and Proton; they run --calls, which times nothing. --cuda-graph times and traces the replay of each call.
Nothing is reported (exit code 3) where the GPU throttled its clock meanwhile; a share above 100% is an error of the
ceiling, and exit code 3 too.
"""

from __future__ import annotations

import argparse
import csv
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..records import environment
from ..records import record as record_module
from ..registry import CASES, CONTENDERS
from ..report import summary, tables
from . import exits, measuring, options

if TYPE_CHECKING:
    from ..measure import runner

#: what --metrics chooses from, and the column of each
METRICS = {
    "time": "time",
    "floor": "floor",
    "bound": "bound",
    "roofline": "roofline",
    "tflops": "TFLOP/s",
    "gbs": "GB/s",
    "extra": "MB extra",
    "launches": "launches",
    "instructions": "instructions",
    "clock": "other clock",
}
CSV = (
    "id",
    "seconds",
    "floor_s",
    "bound",
    "roofline",
    "flops",
    "bytes",
    "extra_bytes",
    "launches",
    "instructions",
    "other_clock_s",
)
WARMUPS, STEPS = 2, 3
ROWS = 40  # of the profiler's table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_selection(parser)
    options.add_effort(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append records to this file")
    parser.add_argument("--no-instructions", action="store_true", help="CPU: don't replay calls under valgrind")
    parser.add_argument(
        "--cuda-graph", action="store_true", help="GPU: time and trace the replay of each call as a CUDA graph"
    )
    parser.add_argument(
        "--metrics", type=options.names, metavar="NAME[,NAME]", help=f"show these columns, of {', '.join(METRICS)}"
    )
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="the same numbers, unrounded and in SI units, one line a measurement"
    )
    parser.add_argument(
        "--cross-check",
        action="store_true",
        help="time each call by triton.testing.do_bench too (CPU: torch.utils.benchmark)",
    )
    parser.add_argument(
        "--recipes",
        action="store_true",
        help="print command lines for Nsight Compute, Nsight Systems and Proton; run nothing",
    )
    parser.add_argument(
        "--calls",
        type=options.positive,
        metavar="N",
        help="only call each kernel N times, in an NVTX range of its id, for a profiler",
    )
    parser.add_argument("--proton", metavar="FILE", help="with --calls: under triton's profiler, to FILE.hatchet")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="leave Chrome traces there")


def execute(arguments: argparse.Namespace) -> int:
    from ..measure import ceilings, instructions, profilers

    if unknown := [name for name in arguments.metrics or () if name not in METRICS]:
        raise exits.UsageError(f"--metrics {unknown[0]}: expected some of {', '.join(METRICS)}")
    if arguments.proton and not arguments.calls:
        raise exits.UsageError("--proton: needs --calls N")
    if arguments.recipes:
        return _recipes(arguments)
    narrowed = argparse.Namespace(**{**vars(arguments), "baselines": arguments.baselines or ("none",)})
    selection = options.selection(narrowed)
    if arguments.cuda_graph and selection.device != "cuda":
        raise exits.UsageError(f"--cuda-graph: needs a GPU; this runs on {selection.device}")
    if arguments.calls:
        seed = secrets.randbits(31) if arguments.seed is None else arguments.seed
        return (
            exits.OK
            if profilers.calls(selection, arguments.calls, seed, arguments.proton, arguments.quiet)
            else exits.NOTHING_MEASURED
        )
    # a file that can't be written is no news for the end
    writer = record_module.Writer(arguments.json) if arguments.json else None
    run = measuring.start(
        arguments, selection, ceilings=ceilings.measure(selection.device), graphs=arguments.cuda_graph
    )
    records, slow = [], set()

    def keep(measured: dict) -> None:
        records.append(measured)
        if why := environment.throttled(selection.device):
            slow.add(why)

    counts = measuring.walk(run, selection, keep, quiet=arguments.quiet, limit=arguments.deadline)
    if slow:
        print(
            f"the GPU's clock was throttled ({'; '.join(sorted(slow))}): its times say nothing of the kernels",
            file=sys.stderr,
        )
        return exits.INCONCLUSIVE
    timed = [r for r in records if r["time"] and r["role"] != "baseline"]
    counted = selection.device == "cpu" and not arguments.no_instructions
    for record in timed if counted else ():
        record["counters"] = instructions.count(_call(record, selection.device))
    clocks = (
        {r["id"]: profilers.other_clock(_call(r, selection.device), selection.device) for r in timed}
        if arguments.cross_check
        else {}
    )
    print("\n".join(summary.machine(timed or records)) + "\n")
    shown = arguments.metrics or tuple(name for name in METRICS if name != "clock" or clocks)
    print(_table(timed, clocks, shown) if timed else "no kernel was timed")
    if arguments.csv:
        _write_csv(arguments.csv, timed, clocks)
    if counted and (why := instructions.unavailable()):
        print(f"instructions: {why}")
    for record in records if writer else ():
        writer.write(record)
    if arguments.trace:
        arguments.trace.mkdir(parents=True, exist_ok=True)
        for record in timed:
            _trace(record, run, arguments.trace / f"{record['id'].replace('/', '-')}.json")
    if wrong := summary.beyond(timed):
        print(wrong, file=sys.stderr)
        if not environment.rehearsing():  # a ceiling that other work pulled down says nothing of the commands
            return exits.INCONCLUSIVE
    return measuring.exit_code(counts, len(timed))


def _recipes(arguments: argparse.Namespace) -> int:
    """Prints the command lines of other profilers for what was selected."""
    from ..measure import profilers

    named = ("device", "kernel", "backend", "case", "dtype", "mode")
    words = [(f"--{name}", getattr(arguments, name)) for name in named if getattr(arguments, name)]
    for title, line in profilers.recipes(
        [w for n, v in words for w in (n, v if isinstance(v, str) else ",".join(v))]
    ).items():
        print(f"# {title}\n{line}\n")
    return exits.OK


def _table(records: list[dict], clocks: dict[str, float], metrics: tuple[str, ...]) -> str:
    rows = []
    for record in records:
        cells = _cells(record, clocks.get(record["id"]))
        rows.append((record["id"], *(cells[name] for name in metrics)))
    return tables.align([("measurement", *(METRICS[name] for name in metrics)), *rows])


def _cells(record: dict, clock: float | None) -> dict[str, str]:
    """A cell for each of METRICS."""
    row = summary.rows([record])[0]
    floor, bound = (record["roofline"]["floor_s"], record["roofline"]["bound"]) if record["roofline"] else (None, "-")
    return {
        "time": summary.duration(row.seconds),
        "floor": summary.duration(floor),
        "bound": bound,
        "roofline": summary.percent(row.fraction),
        "tflops": f"{record['work']['flops'] / row.seconds / 1e12:.3g}",
        "gbs": f"{record['work']['bytes'] / row.seconds / 1e9:.3g}",
        "extra": summary.megabytes(record),
        "launches": "-" if record["launches"] is None else str(record["launches"]),
        "instructions": f"{record['counters']['instructions'] / 1e6:.2f} M ({record['counters']['isa']})"
        if record["counters"]
        else "-",
        "clock": "-" if clock is None else f"{clock / row.seconds:.2f}x",
    }


def _write_csv(path: Path, records: list[dict], clocks: dict[str, float]) -> None:
    """One line a measurement; what is missing is empty."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(CSV)
        for record in records:
            roofline, memory, counters = record["roofline"] or {}, record["memory"] or {}, record["counters"] or {}
            writer.writerow(
                [
                    record["id"],
                    summary.rows([record])[0].seconds,
                    roofline.get("floor_s"),
                    roofline.get("bound"),
                    roofline.get("fraction"),
                    record["work"]["flops"],
                    record["work"]["bytes"],
                    memory.get("peak_extra_bytes"),
                    record["launches"],
                    counters.get("instructions"),
                    clocks.get(record["id"]),
                ]
            )


def _call(record: dict, device: str):
    """The timed call again, from the record's seed; its first, untimed work is done."""
    import torch

    from ..measure import runner

    case = CASES[(record["kernel"], record["case"]["name"])]
    tensors = case.make(record["seed"], device, getattr(torch, record["dtype"]))
    call = runner.step(
        CONTENDERS[(record["kernel"], record["backend"])], case, tensors, record["mode"] == "fwdbwd", record["seed"]
    )
    for _ in range(WARMUPS):
        call()
    return call


def _trace(record: dict, run: runner.Run, path: Path) -> None:
    """A few calls under the profiler: a Chrome trace, and its table in a .txt beside it."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from ..measure import timing

    device, call = run.device, _call(record, run.device)
    call = timing.captured(call) if run.graphs else call
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities, record_shapes=True) as trace:
        for _ in range(STEPS):
            call()
        if device == "cuda":
            torch.cuda.synchronize()
    trace.export_chrome_trace(str(path))
    order = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    path.with_suffix(".txt").write_text(
        trace.key_averages().table(sort_by=order, row_limit=ROWS) + "\n", encoding="utf-8"
    )
