"""Static metrics of the CUDA C++ kernels: nvcc compiles csrc/cuda/*.cu of the imported tree. None without nvcc."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import retro_kernels
from ptx_emulator import machines
from ptx_emulator.estimate import machine_code, sass

from . import entry, fingerprint

TARGET = {80: "sm_80", 86: "sm_86", 89: "sm_89", 90: "sm_90a", 100: "sm_100a", 120: "sm_120a"}
#: a header's declaration of a launch: constexpr LaunchShape NAME_OF_THE_KERNEL{threads, bytes};
LAUNCH_SHAPE = re.compile(r"constexpr LaunchShape (\w+)\{(\d+), (\d+)\};")


@dataclass(frozen=True)
class Source:
    """One .cu for one architecture: compiled as a whole."""

    path: Path
    arch: int
    fingerprint: str

    @property
    def id(self) -> str:
        return entry.identity(self.path.stem, "cuda", f"{self.path.name}:sm{self.arch}", "any")


def sources(arches: list[int | str], parts: tuple[str, ...] | None) -> list[Source]:
    """Return every source that `parts` select by the name of its op."""
    folder = Path(retro_kernels.__file__).resolve().parent.parent / "csrc" / "cuda"
    if not folder.is_dir() or shutil.which("nvcc") is None:
        return []
    mark = fingerprint.of_files(folder, (".cu", ".cuh", ".h"))
    every = [Source(path, arch, mark) for path in sorted(folder.glob("*.cu")) for arch in arches if arch in TARGET]
    return [source for source in every if entry.selected(source.id, parts)]


def rows(source: Source, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each __global__ function. Raises NoToolchain with nvcc's last line of output."""
    cubin = folder / f"{source.path.stem}-cuda-sm{source.arch}.cubin"
    flags = ["-std=c++17", "-O3", "-cubin", "-DRETRO_CUDA_HOPPER=1", f"-arch={TARGET[source.arch]}", "-o", str(cubin)]
    done = subprocess.run(["nvcc", *flags, str(source.path)], capture_output=True, text=True)
    if done.returncode:
        raise entry.NoToolchain(
            f"nvcc {source.path.name} for sm_{source.arch}: {(done.stderr.strip() or 'failed').splitlines()[-1]}"
        )
    shapes = launch_shapes(source.path.parent)
    for name, function in machine_code.functions(cubin).items():
        if not sass.writes(function.code):
            continue  # its body is for another architecture
        # a mangled name holds the function's own name behind its length
        threads, dynamic = next((shapes[own] for own in shapes if f"{len(own)}{own}" in name), (None, None))
        warps = None if threads is None else threads // machines.LANES
        metrics = machine_code.metrics(name, source.arch, function, dynamic, warps)
        yield entry.row(source.path.stem, "cuda", f"{name}:sm{source.arch}", "any", metrics)


def launch_shapes(folder: Path) -> dict[str, tuple[int, int]]:
    """Read kernel -> (threads per block, dynamic shared bytes) from the headers next to the sources."""
    text = "\n".join(path.read_text() for path in sorted(folder.glob("*.h")))
    return {name.lower(): (int(threads), int(size)) for name, threads, size in LAUNCH_SHAPE.findall(text)}
