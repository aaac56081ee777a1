"""Static metrics of every kernel and configuration we ship: Triton by `retro_kernels.aot`, CUDA C++ by nvcc. Needs no GPU."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import environment, record, sass

#: +5% issue slots in the hot loop is a regression
SLOTS_SLACK = 1.05
CUDA_TARGET = {80: "sm_80", 90: "sm_90a", 100: "sm_100a"}
CUDA_WARPS = 8  # a .cu without __launch_bounds__ says nothing of its block: 256 threads are assumed for CTAs per SM


class NoToolchain(RuntimeError):
    """What is missing to compile without a GPU."""


def rows(arches: list[int], kernel: str | None, keep: Path | None, jobs: int | None, cuda: bool = True) -> list[dict[str, Any]]:
    """Static records of everything shipped for `arches`, their `static` part filled in. Raises NoToolchain."""
    folder = keep or Path(tempfile.mkdtemp(prefix="retro-static-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        found = list(_triton(arches, kernel, folder, jobs))
        if cuda:
            found += _cuda(arches, kernel, folder)
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    return _unique(found)


def _triton(arches: list[int], kernel: str | None, folder: Path, jobs: int | None) -> Iterator[dict[str, Any]]:
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec("retro_kernels.aot") is None:
        raise NoToolchain("static: needs triton and retro_kernels.aot; pip install triton")
    from retro_kernels import aot

    tool = aot.tool("cuobjdump")
    for row in aot.compile_all(arches, kernel, folder, jobs):
        cubin = next(folder.glob(f"*-sm{row.arch}-{row.cubin[:8]}.cubin"))
        code = max(sass.functions(sass.disassemble(cubin, tool)).values(), key=len)
        shared = row.shared_static + row.shared_dynamic
        metrics = {
            "kernel": row.kernel,
            "arch": row.arch,
            "config": row.config,
            "registers": row.registers,
            "stack_bytes": row.stack,
            "shared_static_bytes": row.shared_static,
            "shared_dynamic_bytes": row.shared_dynamic,
            "warps": row.num_warps,
            "stages": row.num_stages,
            "blocks_per_sm": sass.blocks_per_sm(row.registers, shared, row.num_warps, row.arch),
            "cubin_sha256": row.cubin,
        }
        yield _record(
            row.op, "triton", f"{row.kernel}:{row.case}:sm{row.arch}", row.dtype, metrics | sass.summarise(code, row.num_warps, row.arch)
        )


def _cuda(arches: list[int], kernel: str | None, folder: Path) -> Iterator[dict[str, Any]]:
    """Every __global__ function of csrc/cuda/*.cu, as nvcc compiles it; nothing where there is no nvcc."""
    import retro_kernels

    sources = sorted((Path(retro_kernels.__file__).resolve().parent.parent / "csrc" / "cuda").glob("*.cu"))
    if not sources or shutil.which("nvcc") is None:
        return
    from retro_kernels import aot

    for source in sources:
        for arch in arches:
            cubin = folder / f"{source.stem}-cuda-sm{arch}.cubin"
            flags = ["-std=c++17", "-O3", "-cubin", f"-arch={CUDA_TARGET[arch]}", "-o", str(cubin)]
            done = subprocess.run(["nvcc", *flags, str(source)], capture_output=True, text=True)
            if done.returncode:
                raise NoToolchain(f"nvcc {source.name} for sm_{arch}: {done.stderr.strip().splitlines()[-1]}")
            code = sass.functions(sass.disassemble(cubin, aot.tool("cuobjdump")))
            for function, usage in _usage(cubin, aot.tool("cuobjdump")).items():
                if kernel is None or kernel in f"{source.stem}/{function}":
                    yield _cuda_row(source.stem, function, usage, code.get(function, []), arch)


def _cuda_row(op: str, function: str, usage: dict[str, int], code: list[sass.Instruction], arch: int) -> dict[str, Any]:
    metrics = {
        "kernel": function,
        "arch": arch,
        "config": None,
        "registers": usage["REG"],
        "stack_bytes": usage["STACK"],
        "shared_static_bytes": usage["SHARED"],
        "shared_dynamic_bytes": None,
        "warps": CUDA_WARPS,
        "stages": None,
        "blocks_per_sm": sass.blocks_per_sm(usage["REG"], usage["SHARED"], CUDA_WARPS, arch),
        "cubin_sha256": None,
    }
    return _record(op, "cuda", f"{function}:sm{arch}", "any", metrics | sass.summarise(code, CUDA_WARPS, arch))


def _usage(cubin: Path, tool: str) -> dict[str, dict[str, int]]:
    """function -> REG, STACK, SHARED, LOCAL."""
    text = subprocess.run([tool, "-res-usage", str(cubin)], capture_output=True, text=True, check=True).stdout
    found, name = {}, None
    for line in text.splitlines():
        if match := re.search(r"Function (\S+):", line):
            name = match[1]
        elif name and "REG:" in line:
            found[name] = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", line)}
    return found


def _record(op: str, backend: str, case: str, dtype: str, metrics: dict[str, Any]) -> dict[str, Any]:
    empty = dict.fromkeys(record.FIELDS)
    return empty | {
        "schema": record.SCHEMA,
        "run": "",
        "at": record.now(),
        "id": record.identity(op, backend, case, dtype, "static"),
        "kernel": op,
        "backend": backend,
        "role": "kernel",
        "dtype": dtype,
        "mode": "static",
        "status": "ok",
        "git": environment.git_state(),
        "environment": environment.environment() | {"nvcc": environment.nvcc_version()},
        "device": {"type": "none", "name": f"compiled for sm_{metrics['arch']}"},
        "case": {"name": case, "shape": {}},
        "static": metrics,
    }


def _unique(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One run id for all; several launches of one kernel in one case get #2, #3 after the case."""
    run, seen = record.new_run(), {}
    for found in records:
        found["run"] = run
        seen[found["id"]] = seen.get(found["id"], 0) + 1
        if (count := seen[found["id"]]) > 1:
            found["case"]["name"] += f"#{count}"
            found["id"] = record.identity(found["kernel"], found["backend"], found["case"]["name"], found["dtype"], "static")
    return records


def regressions(base: list[dict[str, Any]], head: list[dict[str, Any]]) -> list[str]:
    """What got worse from `base` to `head`, a line each; both must come from one toolchain."""
    after = {r["id"]: r["static"] for r in head if r["static"]}
    found = []
    for before in base:
        if not before["static"]:
            continue
        old, new = before["static"], after.get(before["id"])
        found += [f"{before['id']}: {what}" for what in (_worse(old, new) if new else ["no longer compiled"])]
    return found


def _worse(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    if (new["stack_bytes"] or 0) > (old["stack_bytes"] or 0):
        yield f"spills: {new['stack_bytes']} stack bytes, were {old['stack_bytes']}"
    if new["blocks_per_sm"] < old["blocks_per_sm"]:
        yield f"CTAs per SM: {new['blocks_per_sm']}, were {old['blocks_per_sm']} ({new['registers']} registers, were {old['registers']})"
    for name, words in (("tensor_instructions", "tensor instructions"), ("async_copies", "asynchronous copies")):
        if old[name] and not new[name]:
            yield f"{words} gone: were {old[name]}"
    slots, before = new["loop_issue_slots"], old["loop_issue_slots"]
    if slots and before and slots > SLOTS_SLACK * before and _per_product(new) > SLOTS_SLACK * _per_product(old):
        yield f"hot loop: {slots} issue slots, were {before}"


def _per_product(metrics: dict[str, Any]) -> float:
    """Issue slots a tensor instruction: a larger tile has more of both and is no regression."""
    return metrics["loop_issue_slots"] / max(metrics["loop_tensor_instructions"] or 0, 1)
