"""what a CPU case would take of its parts alone: products, softmax, packing, hand-over

Every part is measured on this machine by itself, with the instruction set that is active (RETRO_KERNELS_ISA chooses),
at the sizes that the kernel gives it and from memory that stays in the caches; the sum stands beside the case as it
ran in the same minutes. "at bound" is the share of the best library product's rate that the sum would reach.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from .. import environment, exits, record
from ..registry import cases_of, contenders_of
from . import _options

HEADLINES = {
    "chunked_cross_attention": ("retro-172m", "rpt-2k", "eval-k10", "masked-k4", "decode-1", "decode-16"),
    "topk_chunks": ("rpt-retriever", "sampling-200k", "precompute-100k"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", type=_options.names, default=(), metavar="NAME[,NAME]", help="only these")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")


def execute(arguments: argparse.Namespace) -> int:
    from retro_kernels import _native

    if why := _native.unavailable("_cpu"):
        raise exits.UsageError(why)
    from ..measure import ceilings, parts

    torch.set_num_threads(arguments.threads)
    known = {name for names in HEADLINES.values() for name in names}
    if unknown := set(arguments.case) - known:
        raise exits.UsageError(f"--case: expected some of {', '.join(sorted(known))}; got {', '.join(sorted(unknown))}")
    measured = parts.Parts(arguments.threads)
    ceiling = ceilings.better(*(ceilings.measure("cpu") for _ in range(2)))
    rate = ceilings.rate(ceiling, "float32" if _native.cpu_isa() == "avx2" else arguments.dtype)
    print(
        f"{_native.cpu_isa()}, {arguments.threads} threads, {arguments.dtype}; best library product {rate:.3g} FLOP/s"
    )
    columns = f"{'measured':>10} {'its parts':>10} {'reached':>8} {'share':>6} {'at bound':>9}"
    print(f"{'case':<16} {'mode':<7} {columns}  parts")
    rows = []
    for kernel, names in HEADLINES.items():
        for case in cases_of(kernel):
            if case.name in names and (not arguments.case or case.name in arguments.case):
                attention = kernel == "chunked_cross_attention"
                modes = [mode for mode in case.modes if attention or (mode == "fwd" and arguments.dtype == "float32")]
                rows += [_row(measured, case, mode, arguments.dtype, rate) for mode in modes]
    if arguments.json:
        where = {"git": environment.git_state(), "device": environment.device("cpu"), "isa": _native.cpu_isa()}
        report = {"at": record.now(), "dtype": arguments.dtype, **where, "flops_per_s": rate, "rows": rows}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return exits.OK if rows else exits.NOTHING_MEASURED


def _row(measured, case, mode: str, dtype: str, rate: float) -> dict:
    from ..measure import parts, runner, timing

    arguments = case.make(0, "cpu", getattr(torch, dtype))
    bound = parts.bound(measured, case, dtype, mode, arguments)
    ours = next(c for c in contenders_of(case.kernel) if c.name == "cpu")
    call = runner.step(ours, case, arguments, mode == "fwdbwd", 0)
    times = timing.measure({"cpu": call}, "cpu", timing.Effort(most=100, seconds=0.5))["cpu"]
    if isinstance(times, Exception):
        raise times
    seconds = times["minimum"]
    shares = {"share": bound.flops / seconds / rate, "at_bound": bound.flops / bound.seconds / rate}
    listed = ", ".join(f"{name} {value * 1e3:.3g}" for name, value in bound.parts.items())
    spent = f"{seconds * 1e3:7.3g} ms {bound.seconds * 1e3:7.3g} ms {bound.seconds / seconds:8.0%}"
    print(f"{case.name:<16} {mode:<7} {spent} {shares['share']:6.0%} {shares['at_bound']:9.0%}  {listed} ms")
    row = {"kernel": case.kernel, "case": case.name, "mode": mode, "seconds": seconds}
    return row | {"bound": bound.seconds, "parts": bound.parts, "flops": bound.flops, **shares}
