"""`python -m retro_kernels.info`: the sources of the compiled libraries, and the backends that this machine can run.

The report gives the reason for each backend that cannot run here.
"""

from __future__ import annotations

import contextlib
import os
import platform
from importlib import metadata

import torch

from . import built_from, extensions
from ._version import __version__
from .compile import target
from .core import dispatch


def lines() -> list[str]:
    """Return the lines of the report."""
    threads, python, rocm = torch.get_num_threads(), platform.python_version(), torch.version.hip
    triton = _version("triton", "pytorch-triton-rocm")  # the second is ROCm's wheel
    out = [
        f"retro_kernels {__version__}, torch {torch.__version__}, triton {triton}, python {python}",
        f"cpu: {_cpu_name()}, {os.cpu_count()} cores, {threads} threads, kernels for {extensions.cpu_isa()}",
    ]
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            p, gpu = torch.cuda.get_device_properties(i), target.current_target(torch.device("cuda", i))
            units = "SMs" if gpu.backend == "cuda" else f"CUs, warps of {gpu.warp_size}"
            size = f"{gpu.multiprocessors} {units}, {p.total_memory / 2**30:.0f} GiB"
            out.append(f"cuda:{i}: {p.name}, {gpu.name}, {size}" + f", ROCm {rocm}" * bool(rocm))
    else:
        platform_of_torch = target.platform() if rocm or torch.version.cuda else "the CPU alone"
        out.append(f"cuda: none (torch.cuda.is_available() is False; torch is built for {platform_of_torch})")
    out.append(f"cuda extension: {extensions.cuda_built()}")
    out += ["", "libraries", *(f"  {line}" for line in built_from.lines())]
    for op, statuses in dispatch.backends().items():
        out += ["", op]
        for name, status in statuses.items():
            out.append(f"  {name:<10} {'yes' if status else 'no:  ' + str(status.reason)}")
    return out


def _version(*packages: str) -> str:
    """Return the version of the first of these distributions that is installed."""
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(package)
    return "not installed"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            return next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    print("\n".join(lines()))
