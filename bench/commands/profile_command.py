"""GPU: ceilings, roofline fraction, peak memory, launches, and a Chrome trace of each kernel

On a CPU the same without launches, with the instructions of a call where valgrind is installed. Kernels are checked first; one that fails
is not timed. One trace a kernel, case, type and mode goes to --trace DIR, with the profiler's table beside it; open it in chrome://tracing
or Perfetto. --cuda-graph times and traces the replay of each call. Nothing is reported (exit code 3) where the GPU throttled its clock meanwhile; a share above 100% is an error of the ceiling, and exit code 3 too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from .. import environment, exits
from .. import record as record_module
from ..measure import ceilings, instructions, runner, timing
from ..registry import CASES, CONTENDERS
from ..report import summary, tables
from . import _measure, _options

HEADER = ("measurement", "time", "floor", "bound", "roofline", "TFLOP/s", "GB/s", "MB extra", "launches", "instructions")
WARMUPS, STEPS = 2, 3
ROWS = 40  # of the profiler's table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _options.add_selection(parser)
    _options.add_effort(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append records to this file")
    parser.add_argument("--no-instructions", action="store_true", help="CPU: don't replay calls under valgrind")
    parser.add_argument("--cuda-graph", action="store_true", help="GPU: time and trace the replay of each call as a CUDA graph")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="leave Chrome traces there")


def execute(arguments: argparse.Namespace) -> int:
    narrowed = argparse.Namespace(**{**vars(arguments), "baselines": arguments.baselines or ("none",)})
    selection = _options.selection(narrowed)
    if arguments.cuda_graph and selection.device != "cuda":
        raise exits.UsageError(f"--cuda-graph: needs a GPU; this runs on {selection.device}")
    writer = record_module.Writer(arguments.json) if arguments.json else None  # a file that can't be written is no news for the end
    run = _measure.start(arguments, selection, ceilings=ceilings.measure(selection.device), graphs=arguments.cuda_graph)
    records, slow = [], set()

    def keep(measured: dict) -> None:
        records.append(measured)
        if why := environment.throttled(selection.device):
            slow.add(why)

    counts = _measure.walk(run, selection, keep, quiet=arguments.quiet, limit=arguments.deadline)
    if slow:
        print(f"the GPU's clock was throttled ({'; '.join(sorted(slow))}): its times say nothing of the kernels", file=sys.stderr)
        return exits.INCONCLUSIVE
    timed = [r for r in records if r["time"] and r["role"] != "baseline"]
    counted = selection.device == "cpu" and not arguments.no_instructions
    for record in timed if counted else ():
        record["counters"] = instructions.count(_call(record, selection.device))
    print("\n".join(summary.machine(timed or records)) + "\n")
    print(tables.align([HEADER, *map(_row, timed)]) if timed else "no kernel was timed")
    if counted and (why := instructions.missing()):
        print(f"instructions: {why}")
    for record in records if writer else ():
        writer.write(record)
    if arguments.trace:
        arguments.trace.mkdir(parents=True, exist_ok=True)
        for record in timed:
            _trace(record, run, arguments.trace / f"{record['id'].replace('/', '-')}.json")
    if wrong := summary.beyond(timed):
        print(wrong, file=sys.stderr)
        return exits.INCONCLUSIVE
    return _measure.exit_code(counts, len(timed))


def _row(record: dict) -> tuple[str, ...]:
    row = summary.rows([record])[0]
    floor, bound = (record["roofline"]["floor_s"], record["roofline"]["bound"]) if record["roofline"] else (None, "-")
    rates = (f"{record['work']['flops'] / row.seconds / 1e12:.3g}", f"{record['work']['bytes'] / row.seconds / 1e9:.3g}")
    shown = (record["id"], summary.duration(row.seconds), summary.duration(floor), bound, summary.percent(row.fraction))
    counted = f"{record['counters']['instructions'] / 1e6:.2f} M ({record['counters']['isa']})" if record["counters"] else "-"
    return (*shown, *rates, summary.megabytes(record), "-" if record["launches"] is None else str(record["launches"]), counted)


def _call(record: dict, device: str):
    """The timed call again, from the record's seed; its first, untimed work is done."""
    case = CASES[(record["kernel"], record["case"]["name"])]
    tensors = case.make(record["seed"], device, getattr(torch, record["dtype"]))
    call = runner.step(CONTENDERS[(record["kernel"], record["backend"])], case, tensors, record["mode"] == "fwdbwd", record["seed"])
    for _ in range(WARMUPS):
        call()
    return call


def _trace(record: dict, run: runner.Run, path: Path) -> None:
    """A few calls under the profiler: a Chrome trace, and its table in a .txt beside it."""
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
    path.with_suffix(".txt").write_text(trace.key_averages().table(sort_by=order, row_limit=ROWS) + "\n", encoding="utf-8")
