"""Rows of every format: one for each op, case, type and mode, with its best rivals of the same run."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..measure.samples import estimate
from ..records.record import pending

#: baselines in older records that computed another function than the op, so they do not compete
NOT_RIVALS = ("sdpa_plain", "retro_pytorch")
INCOMPLETE = "This run is not complete. It was to measure also:"
#: instructions with which a processor multiplies in a half type; without them torch converts to float32 and back
NATIVE = {"bfloat16": ("avx512_bf16", "amx_bf16", "bf16"), "float16": ("avx512_fp16", "asimdhp")}
#: columns of a row in every table
COLUMNS = ("case", "type", "mode", "backend")
COLUMNS += ("time", "vs eager", "vs best baseline", "roofline", "MB extra", "error/limit")
#: columns of a compiled kernel in every table
STATIC_COLUMNS = ("kernel", "case", "type", "sm", "config", "regs", "stack", "shared", "CTAs/SM", "tensor")
STATIC_COLUMNS += ("async", "in flight", "loop slots", "loop cycles >=")
#: the same for AMD's processors, in AMD's words
AMD_COLUMNS = ("kernel", "case", "type", "processor", "config", "VGPRs", "AGPRs", "spills", "stack", "LDS")
AMD_COLUMNS += ("CTAs/CU", "MFMA")


@dataclass(frozen=True)
class ReportRow:
    """Line of a table. `speedup`: over eager. `rival`: fastest baseline that computes the same function, with the
    speed-up over it.
    """

    record: dict[str, Any]
    seconds: float | None
    speedup: float | None
    rival: str | None
    rival_speedup: float | None
    rival_once: bool = False  # the rival's time is a single sample

    @property
    def fraction(self) -> float | None:
        roofline = self.record["roofline"]
        return roofline["fraction"] if roofline else None


def rows(records: list[dict[str, Any]]) -> list[ReportRow]:
    """Return the rows of our backends and references. Baselines appear as their rivals."""
    timed = {(r["run"], r["id"]): r["time"] for r in records if r["time"]}
    return [_row(r, timed) for r in records if r["role"] != "baseline" and r["mode"] not in ("check", "static")]


def _row(record: dict[str, Any], timed: dict[tuple[str, str], dict[str, Any]]) -> ReportRow:
    speedups = record["speedup"] or {}
    rivals = {name: ratio for name, ratio in speedups.items() if name not in NOT_RIVALS}
    rival = min(rivals, key=rivals.get) if rivals else None
    time = record["time"]
    theirs = timed.get((record["run"], record["id"].replace(f"/{record['backend']}/", f"/{rival}/", 1)))
    shown = (estimate(time) if time else None, speedups.get("eager"), rival, rivals.get(rival))
    return ReportRow(record, *shown, once(theirs))


def native(record: dict[str, Any]) -> bool:
    """Whether the device of a record computes in the record's type. Other devices convert to float32 and back."""
    wanted = NATIVE.get(record["dtype"])
    return (
        wanted is None
        or record["device"].get("type") == "cuda"
        or any(name in wanted for name in record["environment"].get("isa") or ())
    )


def left_out(requested: Iterable[str], records: Iterable[dict[str, Any]]) -> list[str]:
    """Return a line per op with its cases and types that were requested and have no record. Contenders are named if
    the case has a record of another contender.
    """
    made = {one["id"] for one in records if not pending(one)}
    parts: dict[str, dict[str, dict[str, list[str]]]] = {}
    some = {(i.split("/")[0], *i.split("/")[2:4]) for i in made}
    for op, name, case, dtype, _ in (i.split("/") for i in requested if i not in made):
        names = parts.setdefault(op, {}).setdefault(case, {}).setdefault(dtype, [])
        if (op, case, dtype) in some and name not in names:
            names.append(name)

    def typed(types: dict[str, list[str]]) -> str:
        return ", ".join(dtype + (f" ({', '.join(names)})" if names else "") for dtype, names in types.items())

    return [f"{op}: {'; '.join(f'{c} {typed(types)}' for c, types in cases.items())}" for op, cases in parts.items()]


def columns(records: Iterable[dict[str, Any]]) -> tuple[str, ...]:
    """Return COLUMNS with the word for the times of these records: the minimum on CPUs, the median on GPUs."""
    word = statistic(records)
    return tuple(word if name == "time" else name for name in COLUMNS)


def statistic(records: Iterable[dict[str, Any]]) -> str:
    """Return the word for the number that the times of these records are."""
    clocks = {record["time"]["method"]["clock"] for record in records if record["time"]}
    return {frozenset({"wall"}): "minimum", frozenset({"device events"}): "median"}.get(frozenset(clocks), "time")


def cells(row: ReportRow) -> tuple[str, ...]:
    """Return the text of every column of COLUMNS."""
    record = row.record
    rival = "-" if row.rival is None else f"{ratio(row.rival_speedup)} {row.rival}{', 1 sample' * row.rival_once}"
    names = (record["case"]["name"], record["dtype"], record["mode"], record["backend"])
    own = duration(row.seconds) + ", 1 sample" * once(record["time"])
    times = (own, ratio(row.speedup), rival, percent(row.fraction))
    return (*names, *times, megabytes(record), number(margin(record)))


def static_cells(record: dict[str, Any]) -> tuple[str, ...]:
    """Return the text of every column of STATIC_COLUMNS."""
    s = record["static"]
    cycles = s.get("loop_cycles_at_least")
    numbers = (s.get("registers"), s["stack_bytes"], _shared(s), s["blocks_per_sm"], s["tensor_instructions"])
    numbers += (s["async_copies"], s.get("copies_in_flight"), s["loop_issue_slots"] or None)
    return (*_static_names(record), *map(_shown, numbers), "-" if cycles is None else f"{cycles:.0f}")


def for_amd(record: dict[str, Any]) -> bool:
    """Whether a static record is of a kernel for an AMD processor."""
    return "agprs" in record["static"]


def amd_cells(record: dict[str, Any]) -> tuple[str, ...]:
    """Return the text of every column of AMD_COLUMNS."""
    s = record["static"]
    numbers = (s["registers"], s["agprs"], s["spilled_registers"], s["stack_bytes"], _shared(s), s["blocks_per_sm"])
    return (*_static_names(record), *map(_shown, (*numbers, s["tensor_instructions"])))


def _static_names(record: dict[str, Any]) -> tuple[str, ...]:
    s = record["static"]
    name, _, rest = record["case"]["name"].partition(":")
    case = rest.split(":")[0] if record["backend"] == "triton" else ""
    return (s.get("kernel") or name)[:44], case, record["dtype"], str(s.get("arch") or "-"), s.get("config") or "-"


def _shared(static: dict[str, Any]) -> int:
    return (static.get("shared_static_bytes") or 0) + (static.get("shared_dynamic_bytes") or 0)


def _shown(value: int | None) -> str:
    return "-" if value is None else str(value)


def once(time: dict[str, Any] | None) -> bool:
    """Whether a time is a single sample."""
    return bool(time) and len(time["samples"]) == 1


def margin(record: dict[str, Any]) -> float | None:
    """Return the worst error over its limit. Above 1 the check failed."""
    if not record["numerics"]:
        return None
    return max(map(relative, record["numerics"]["tensors"].values()), default=None)


def relative(tensor: dict[str, Any]) -> float:
    """Return a tensor's error over its limit."""
    return float("inf") if tensor["frobenius"] is None else tensor["frobenius"] / tensor["limit"]


def duration(seconds: float | None) -> str:
    """Format seconds: 1.23 ms, 45.6 us, 1.20 s; a dash for a missing value."""
    if seconds is None:
        return "-"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def percent(value: float | None) -> str:
    """Format a share of the roofline. One above 1 is marked."""
    return "-" if value is None else f"{100 * value:.0f}%{'!' if value > 1 else ''}"


def beyond(records: list[dict[str, Any]]) -> str | None:
    """Return a warning if an op is faster than the measured ceiling, which is then wrong."""
    above = [r["roofline"]["fraction"] for r in records if r["roofline"] and (r["roofline"]["fraction"] or 0) > 1]
    if not above:
        return None
    count = "a share" if len(above) == 1 else f"{len(above)} shares"
    why = "an error of the ceiling, which was measured too low; the roofline says nothing there"
    return f"{count} above 100% (!), up to {100 * max(above):.0f}%: {why}"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def megabytes(record: dict[str, Any]) -> str:
    return "-" if not record["memory"] else f"{record['memory']['peak_extra_bytes'] / 1e6:.1f}"


def machine(records: list[dict[str, Any]]) -> list[str]:
    """Return a line for each device and tree of the records."""
    lines = []
    for record in records:
        env, git, name, best = record["environment"], record["git"], record["device"].get("name"), record["ceilings"]
        tree = (git["sha"] or "no git")[:10] + (" + changes" if git["dirty"] else "")
        software = f"torch {env.get('torch')}, triton {env.get('triton') or 'none'}, tree {tree}"
        lines.append(f"{name}, {env.get('threads')} threads, {software}")
        if best:
            rates = [f"{kind} {rate / 1e12:.3g} TFLOP/s" for kind, rate in best["flops_per_s"].items() if rate]
            lines.append(f"ceilings measured: copy {best['bytes_per_s'] / 1e9:.3g} GB/s, {', '.join(rates)}")
            if names := ", ".join(best.get("raised", ())):
                lines.append(f"ceilings raised to the rate of a kernel that exceeded them: {names}")
    return list(dict.fromkeys(lines))
