"""profile kernels: roofline, memory, launches, traces

Checks kernels first and times only those that pass. --trace writes a trace for each kernel, case, type and mode, with
the profiler's table next to it; chrome://tracing and Perfetto open them. --calls measures no time; it is for Nsight
Compute and Nsight Systems. --cuda-graph times and traces the replay of each call. --stages shows where the time of a
CPU kernel goes: the share of each stage of its pass, and the rate of its products as a share of the library's product,
in the case and in a small case whose operands stay in the cache. The exit code is 3 if the GPU throttled its clock, or
if a share of the roofline exceeds 100%, which means that the ceiling is wrong.
"""

from __future__ import annotations

import argparse
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from ..records import environment
from ..records.record import Writer, replace
from ..registry import CASES, CONTENDERS
from ..report import summary, tables, terminal
from . import exits, measuring, options
from .progress import say

if TYPE_CHECKING:
    from ..measure import runner

COLUMNS = ("time", "floor", "bound", "roofline", "TFLOP/s", "GB/s", "MB extra", "launches")
#: columns that a narrow terminal drops, in this order
DROP = ("launches", "MB extra", "GB/s", "floor", "TFLOP/s", "bound")
STEPS = 3  # traced calls
ROWS = 40  # rows of the profiler's table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_selection(parser)
    options.add_effort(parser)
    parser.set_defaults(baselines=("none",))
    add, calls = parser.add_argument, "only call each kernel N times for a profiler, in an NVTX range of its id"
    add("--json", type=options.output, metavar="FILE", help="append records to this file")
    add("--cuda-graph", action="store_true", help="GPU: time and trace the replay of each call as a CUDA graph")
    add("--calls", type=options.positive, metavar="N", help=calls)
    add("--stages", action="store_true", help="CPU: show the time of each stage of a pass")
    add("--trace", type=Path, metavar="DIR", help="write Chrome traces to this folder")


def execute(arguments: argparse.Namespace) -> int:
    from ..measure import ceilings, profilers

    selection = options.selection(arguments)
    if arguments.cuda_graph and selection.device != "cuda":
        raise exits.UsageError(f"--cuda-graph: needs a GPU; this runs on {selection.device}")
    if arguments.stages and selection.device != "cpu":
        raise exits.UsageError(f"--stages: measures CPU kernels; this runs on {selection.device}")
    if arguments.calls:
        seed = secrets.randbits(31) if arguments.seed is None else arguments.seed
        called = profilers.calls(selection, arguments.calls, seed, arguments.quiet)
        return exits.OK if called else exits.NOTHING_MEASURED
    writer = Writer(arguments.json)  # fails before the measurements if the file can't be written
    best = ceilings.measure(selection.device)
    run = measuring.start(arguments, selection, ceilings=best, graphs=arguments.cuda_graph)
    latest, slow = {}, set()

    def append(measured: dict) -> None:
        if measured["time"] and (why := environment.throttled(selection.device)):
            slow.add(why)
            return
        if arguments.stages and measured["time"] and measured["backend"] == "cpu":
            measured["counters"] = _stages(measured)
        latest[measured["id"]] = measured
        writer.write(measured)

    measuring.walk(run, selection, arguments, writer, append)
    records = list(latest.values())
    if arguments.json:
        replace(arguments.json, records)
    if slow:
        say(f"the GPU's clock was throttled ({'; '.join(sorted(slow))}): the times are not the kernels' own")
        return exits.INCONCLUSIVE
    timed = [r for r in records if r["time"] and r["role"] != "baseline"]
    print("\n".join(tables.notes(summary.machine(timed or records))) + "\n")
    header = ("case", "type", "mode", "backend", summary.statistic(timed), *COLUMNS[1:])
    for op in dict.fromkeys(record["op"] for record in timed):
        own = [record for record in timed if record["op"] == op]
        print(f"{op}\n{tables.align([header, *map(_cells, own)], DROP)}\n")
    for record in timed:
        if record["counters"]:
            print(f"{record['id']}\n{tables.align(_stage_table(record))}\n")
    if not timed:
        print("nothing was timed")
    if arguments.trace:
        arguments.trace.mkdir(parents=True, exist_ok=True)
        for record in timed:
            _trace(record, run, arguments.trace / f"{record['id'].replace('/', '-')}.json")
    if wrong := summary.beyond(timed):
        say("\n".join(tables.notes([wrong])))
    print(terminal.verdict(records, writer.requested, arguments.json))
    code = measuring.exit_code(records)
    # other work may lower the ceiling of a rehearsal
    return exits.INCONCLUSIVE if wrong and code == exits.OK and not environment.rehearsing() else code


def _cells(record: dict) -> tuple[str, ...]:
    """Return the record's case, type, mode and backend, and a cell for each of COLUMNS."""
    row, roofline = summary.rows([record])[0], record["roofline"] or {}
    times = (summary.duration(row.seconds), summary.duration(roofline.get("floor_s")), roofline.get("bound") or "-")
    flops, moved = (record["work"][name] / row.seconds for name in ("flops", "bytes"))
    launches = "-" if record["launches"] is None else str(record["launches"])
    rates = (f"{flops / 1e12:.3g}", f"{moved / 1e9:.3g}", summary.megabytes(record), launches)
    names = (record["case"]["name"], record["dtype"], record["mode"], record["backend"])
    return (*names, *times, summary.percent(row.fraction), *rates)


def _stages(record: dict) -> dict:
    """Return {"case", "in cache"}: the times of the stages, in the case of the record and in a case that fits in
    cache.
    """
    from ..measure import profilers, stages

    contender, case = CONTENDERS[record["op"], record["backend"]], CASES[record["op"], record["case"]["name"]]
    rest = (record["dtype"], record["mode"], "cpu", record["seed"])
    cases = {"case": case, "in cache": stages.small(case)}
    return {name: stages.of(profilers.warmed(contender, one, *rest)) for name, one in cases.items()}


def _stage_table(record: dict) -> list[tuple[str, ...]]:
    """Return the rows of a record's stages. A product's rate counts all threads, like the ceiling."""
    from ..measure import ceilings

    product = ceilings.rate(record["ceilings"], record["dtype"]) if record["ceilings"] else None
    threads = record["environment"]["threads"]
    case, small = record["counters"]["case"], record["counters"]["in cache"]
    total = sum(stage["seconds"] for stage in case.values())

    def share(stage: dict | None) -> str:
        if product is None or not stage or not stage["flops"]:
            return "-"
        return f"{stage['flops'] / stage['seconds'] * threads / product:.0%}"

    header = ("stage", "ms", "of the time", "of the library's rate", "the same in cache")
    rows = [
        (name, f"{stage['seconds'] / threads * 1e3:.3f}", summary.percent(stage["seconds"] / total), share(stage))
        for name, stage in sorted(case.items(), key=lambda item: -item[1]["seconds"])
    ]
    return [header, *((*row, share(small.get(row[0]))) for row in rows)]


def _trace(record: dict, run: runner.Run, path: Path) -> None:
    """Run a few calls under the profiler. Write a Chrome trace, and its table to a .txt file next to it."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from ..measure import profilers, timing

    op, device = record["op"], run.device
    contender, case = CONTENDERS[op, record["backend"]], CASES[op, record["case"]["name"]]
    call = profilers.warmed(contender, case, record["dtype"], record["mode"], device, record["seed"])
    call = timing.captured(call) if run.graphs else call
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities, record_shapes=True) as trace:
        for _ in range(STEPS):
            call()
        if device == "cuda":
            torch.cuda.synchronize()
    trace.export_chrome_trace(str(path))
    order = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    table = trace.key_averages().table(sort_by=order, row_limit=ROWS)
    path.with_suffix(".txt").write_text(f"{table}\n", encoding="utf-8")
