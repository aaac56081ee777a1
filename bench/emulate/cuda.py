"""PTX of a CUDA C++ source by nvcc, for `program.Program`."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

from .program import cache_folder

TARGET = {80: "sm_80", 86: "sm_86", 89: "sm_89", 90: "sm_90a"}


def ptx(source: Path, arch: int) -> str:
    """Return the module of one .cu, with its source's lines. It is compiled once and kept in the cache folder.

    Raises:
        OSError: there is no nvcc, or it does not compile the source.
    """
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise OSError("nvcc is not on PATH")
    flags = ["-std=c++17", "-O3", "-ptx", "-lineinfo", "-DRETRO_CUDA_HOPPER=1", f"-arch={TARGET[arch]}"]
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    headers = sorted([*source.parent.glob("*.h"), *source.parent.glob("*.cuh")])
    parts = [version, *flags, *(path.read_text() for path in (source, *headers))]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    target = cache_folder() / f"{source.stem}-sm{arch}-{digest}.ptx"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / "module.ptx"
            done = subprocess.run([nvcc, *flags, "-o", str(made), str(source)], capture_output=True, text=True)
            if done.returncode:
                raise OSError(f"nvcc {source.name} for {TARGET[arch]}:\n{done.stderr.strip()}")
            made.replace(target)
    return target.read_text()
