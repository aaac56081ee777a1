"""bound a CPU case by the parts that it is made of

Every part is measured on this machine by itself, with the instruction set that is active (RETRO_KERNELS_ISA chooses),
at the sizes that the kernel gives it and from memory that stays in the caches; the sum stands beside the case as it
ran in the same minutes. "share" is of the best library product's rate, the highest of those measured before, between
and after the cases, or, for a step of decoding, of the rate at which the bytes it must read are read where they lie;
"at bound" is the share that the sum of the parts would reach.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..records import environment, record
from ..registry import cases_of, contenders_of
from . import exits, options

HEADLINES = {
    "chunked_cross_attention": ("retro-172m", "rpt-2k", "eval-k10", "masked-k4", "decode-1", "decode-16"),
    "relative_attention": ("decode",),
    "topk_chunks": ("rpt-retriever", "sampling-200k", "precompute-100k"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", type=options.names, default=(), metavar="NAME[,NAME]", help="select cases")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=options.positive, help="CPU threads of a call (default: what torch chose)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")


def execute(arguments: argparse.Namespace) -> int:
    from retro_kernels.core import native

    if why := native.unavailable("_cpu"):
        raise exits.UsageError(why)
    import torch

    from ..measure import ceilings, parts

    arguments.threads = arguments.threads or torch.get_num_threads()
    torch.set_num_threads(arguments.threads)
    known = {name for names in HEADLINES.values() for name in names}
    if unknown := set(arguments.case) - known:
        raise exits.UsageError(f"--case: expected some of {', '.join(sorted(known))}; got {', '.join(sorted(unknown))}")
    measured = parts.Parts(arguments.threads)
    product = "float32" if native.cpu_isa() == "avx2" else arguments.dtype
    rows, rate = [], ceilings.products("cpu", product) or 0.0
    for kernel, names in HEADLINES.items():
        for case in cases_of(kernel):
            if case.name in names and (not arguments.case or case.name in arguments.case):
                embeddings = kernel == "topk_chunks"
                modes = [mode for mode in case.modes if not embeddings or (mode, arguments.dtype) == ("fwd", "float32")]
                rows += [_row(measured, case, mode, arguments.dtype) for mode in modes]
                rate = max(rate, ceilings.products("cpu", product) or 0.0)
    print(f"{native.cpu_isa()}, {arguments.threads} threads, {arguments.dtype}; best library product {rate:.3g} FLOP/s")
    columns = f"{'measured':>10} {'its parts':>10} {'reached':>8} {'share':>6} {'at bound':>9}"
    print(f"{'case':<16} {'mode':<7} {columns}  parts")
    for row in rows:
        least = row["parts"].get("reading", row["flops"] / rate)
        row |= {"share": least / row["seconds"], "at_bound": least / row["bound"]}
        _show(row)
    if arguments.json:
        where = {"git": environment.git_state(), "device": environment.device("cpu"), "isa": native.cpu_isa()}
        report = {"at": record.now(), "dtype": arguments.dtype, **where, "flops_per_s": rate, "rows": rows}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return exits.OK if rows else exits.NOTHING_MEASURED


def _row(measured, case, mode: str, dtype: str) -> dict:
    import torch

    from ..measure import parts, runner, timing

    arguments = case.make(0, "cpu", getattr(torch, dtype))
    bound = parts.bound(measured, case, dtype, mode, arguments)
    ours = next(c for c in contenders_of(case.kernel) if c.name == "cpu")
    call = runner.step(ours, case, arguments, mode == "fwdbwd", 0)
    times = timing.measure({"cpu": call}, "cpu", timing.Effort(most=100, seconds=0.5))["cpu"]
    if isinstance(times, Exception):
        raise times
    row = {"kernel": case.kernel, "case": case.name, "mode": mode, "seconds": times["minimum"]}
    return row | {"bound": bound.seconds, "parts": bound.parts, "flops": bound.flops}


def _show(row: dict) -> None:
    listed = ", ".join(f"{name} {value * 1e3:.3g}" for name, value in row["parts"].items())
    spent = f"{row['seconds'] * 1e3:7.3g} ms {row['bound'] * 1e3:7.3g} ms {row['bound'] / row['seconds']:8.0%}"
    print(f"{row['case']:<16} {row['mode']:<7} {spent} {row['share']:6.0%} {row['at_bound']:9.0%}  {listed} ms")
