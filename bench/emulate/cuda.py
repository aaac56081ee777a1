"""PTX of a CUDA C++ source by nvcc, for `program.Program`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from .program import built

TARGET = {80: "sm_80", 86: "sm_86", 89: "sm_89", 90: "sm_90a"}


def ptx(source: Path, arch: int) -> str:
    """Return the module of one .cu, with its source's lines. It is compiled once and kept in the cache folder.

    Raises:
        OSError: there is no nvcc, or it does not compile the source.
    """
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise OSError("nvcc is not on PATH")
    command = [nvcc, "-std=c++17", "-O3", "-ptx", "-lineinfo", "-DRETRO_CUDA_HOPPER=1", f"-arch={TARGET[arch]}"]
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    headers = sorted([*source.parent.glob("*.h"), *source.parent.glob("*.cuh")])
    return built(f"{source.stem}-sm{arch}.ptx", command, source, headers, version).read_text()
