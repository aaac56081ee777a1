"""Compile every shipped Triton kernel without a GPU. Print registers, stack (spills) and shared memory as JSON lines.

    python -m retro_kernels.compile.aot --arch 80,90,gfx942 [--kernel NAME] [--combinations] [--keep DIR]
    python -m retro_kernels.compile.aot --arch 90 --cache DIR

Each `ops/<op>/triton` yields its launches from `aot_cases(target)`. Where tiles depend on options, `aot_combinations`
yields the launches of every set of options. Both make them on meta tensors by the code that launches on a GPU;
signature and divisibility come from Triton's own launch path. A process under TRITON_INTERPRET can't compile.

--cache compiles into a folder that another machine takes over by `retro_kernels.warm_up(cache=DIR)`, if it has the same
versions of triton, Python and this package. An interrupted export goes on where it stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ..core.dispatch import OPS, exists
from . import amdgcn, triton_private
from .target import KNOWN, Target, arch_named


@dataclasses.dataclass(frozen=True)
class Resources:
    """Resources of a compiled kernel. stack: bytes a thread, 0 unless registers spill. shared_*: bytes a block.

    registers: per thread, on AMD VGPRs with the `agprs`. spills, matrix: see `amdgcn.Usage`; None for NVIDIA.
    """

    op: str
    kernel: str
    case: str
    config: str
    dtype: str
    arch: int | str
    registers: int
    stack: int
    shared_static: int
    shared_dynamic: int
    num_warps: int
    num_stages: int
    binary: str  # sha256
    agprs: int | None = None
    spills: int | None = None
    matrix: int | None = None
    waves: int | None = None


@dataclasses.dataclass(frozen=True)
class CompileCase:
    """One launch to compile. case: name of its call. launch: a `triton_lib.launch.Launch` on meta tensors."""

    case: str
    dtype: str
    launch: object
    call: tuple = ()  # a NamedTuple of tensors and options


def ops() -> list[str]:
    """Return the ops that have Triton kernels with `aot_cases`."""
    return [op for op in OPS if exists(op, "triton") and hasattr(_module(op), "aot_cases")]


def cases(target: Target, only: str | None = None, listing: str = "aot_cases") -> Iterator[tuple[str, CompileCase]]:
    """Yield (op, case) of every shipped launch; launches with the same compiled code are yielded once.

    only: part of the kernels' op/name. listing: name of the function of an op's module that yields them.
    """
    seen = set()
    for op in ops():
        if only and "/" in only and not op.endswith(only.partition("/")[0]):
            continue
        for case in getattr(_module(op), listing, lambda target: ())(target):
            if only and only not in f"{op}/{case.launch.name}":
                continue
            key = _key(case, target)
            if key not in seen:
                seen.add(key)
                yield op, case


def compile_case(op: str, case: CompileCase, target: Target, keep: Path | None = None) -> Resources:
    """Compile one launch and read its resources. keep: folder for the cubin, or for AMD's assembly."""
    launch, asm = case.launch, (compiled := triton_private.compiled(case.launch, target)).asm
    amd = target.backend == "hip"
    binary, kind = (asm["hsaco"], "amdgcn") if amd else (asm["cubin"], "cubin")
    digest, more = hashlib.sha256(binary).hexdigest(), {}
    if keep is not None:
        place = target.name.replace("_", "")
        name = f"{op}-{launch.name}-{case.case}-{case.dtype}-{place}-{digest[:8]}.{kind}".replace(" ", "_")
        (keep / name).write_bytes(asm[kind].encode() if amd else binary)
    if amd:
        read = amdgcn.usage(asm["amdgcn"])
        used = read.registers, read.stack, read.lds
        more = {name: getattr(read, name) for name in ("agprs", "spills", "matrix", "waves")}
    else:
        usage = resources(binary)
        used = usage["REG"], usage["STACK"], usage["SHARED"]
    named = op, launch.name, case.case, _config(launch), case.dtype, target.arch
    options = compiled.metadata.shared, launch.num_warps, launch.num_stages
    return Resources(*named, *used, *options, digest, **more)


def resources(cubin: bytes) -> dict[str, int]:
    """Return REG, STACK, SHARED and LOCAL of the kernel in a cubin, by the cuobjdump that Triton bundles."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool("cuobjdump"), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}


def tool(name: str) -> str:
    """Return the path of a CUDA binary tool that comes with Triton: cuobjdump, nvdisasm, ptxas."""
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def compile_each(
    arches: Iterable[int | str],
    only: str | None = None,
    keep: Path | None = None,
    jobs: int | None = None,
    select: Callable[[str, CompileCase], bool] | None = None,
    listing: str = "aot_cases",
) -> Iterator[Resources]:
    """Yield the rows of every shipped launch on every architecture, in order, each as soon as it is compiled.

    select: `select(op, case)` says which launches are compiled; None: all.
    """
    listed = [(op, case, KNOWN[arch], keep) for arch in arches for op, case in cases(KNOWN[arch], only, listing)]
    work = [item for item in listed if select is None or select(item[0], item[1])]
    jobs = min(jobs or os.cpu_count() or 1, len(work))
    if jobs <= 1:
        yield from (compile_case(*item) for item in work)
        return
    # forked children inherit the work, so only indices and rows are sent
    global _WORK
    _WORK = work
    # the terminal sends Ctrl-C to the children, too, but the parent ends them
    with multiprocessing.get_context("fork").Pool(jobs, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        yield from pool.imap(_compile_nth, range(len(work)))


_WORK: list[tuple] = []


def _compile_nth(index: int) -> Resources:
    return compile_case(*_WORK[index])


def _module(op: str):
    return importlib.import_module(f"retro_kernels.ops.{op}.triton")


def _key(case: CompileCase, target: Target):
    src, options = triton_private.source(case.launch, target)
    return case.launch.name, src.hash(), str(sorted(options.__dict__.items(), key=str))


def _config(launch) -> str:
    blocks = {k.removeprefix("BLOCK_").lower(): v for k, v in launch.arguments.items() if k.startswith("BLOCK_")}
    return " ".join(f"{k}{v}" for k, v in blocks.items()) + f" w{launch.num_warps} s{launch.num_stages}"


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer from 1; got {text}")
    return number


def main(argv: list[str] | None = None) -> int:
    description = "Compile every Triton kernel without a GPU. Each line of the output is the JSON of a launch."
    parser = argparse.ArgumentParser(prog="python -m retro_kernels.compile.aot", description=description)
    parser.add_argument("--arch", default="80,90,100", help="comma-separated, of " + ",".join(map(str, KNOWN)))
    parser.add_argument("--kernel", help="part of the op/name of the kernels to compile")
    parser.add_argument(
        "--combinations",
        action="store_true",
        help="compile every set of options of both attentions instead of the shipped launches",
    )
    parser.add_argument("--keep", type=Path, help="folder for the cubins, and for AMD's assembly")
    parser.add_argument("--cache", type=Path, help="compile into this folder for warm_up(cache=), and list nothing")
    parser.add_argument("--jobs", type=_positive, help="number of processes; default: one for each core")
    options = parser.parse_args(argv)
    try:
        arches = [arch_named(word) for word in options.arch.split(",")]
    except ValueError as error:
        parser.error(f"--arch: {error}")
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 is set: kernels are interpreted in this process, not compiled")
    if options.cache and options.keep:
        parser.error("--cache, --keep: a cache holds what --keep would; name one of them")
    for option in ("cache", "keep"):
        try:
            if folder := getattr(options, option):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--{option}: {error}")
    if options.cache:
        from . import shipped

        count = shipped.export(options.cache, arches, options.kernel, options.jobs)
        if not count:
            parser.error(f"--kernel: expected part of the op/name of a kernel; got {options.kernel!r}")
        print(f"{count} launches in {options.cache}")
        return 0
    listing = "aot_combinations" if options.combinations else "aot_cases"
    stacks = []
    for row in compile_each(arches, options.kernel, options.keep, options.jobs, listing=listing):
        print(json.dumps(dataclasses.asdict(row)), flush=True)
        stacks.append(row.stack)
    if not stacks:
        parser.error(f"--kernel: expected part of the op/name of a kernel; {listing} has no {options.kernel!r}")
    print(f"{len(stacks)} launches, {sum(map(bool, stacks))} with stack", file=sys.stderr)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # `head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
