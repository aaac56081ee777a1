"""Machine and tree of a record: versions, processor, threads, git state. An unknown value is None, never a guess.

Only the functions that need torch import it, so that reports don't.
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
ISA_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16")
#: NVML's reasons for a clock below the requested one (nvmlClocksEventReasons). The power cap, 0x4, is left out, because
#: a loaded GPU usually meets it.
THROTTLED = {
    0x08: "hardware slow-down",
    0x20: "heat, by the driver",
    0x40: "heat, by the hardware",
    0x80: "power brake",
}
REHEARSAL = "RETRO_KERNELS_REHEARSAL"  # variable that marks records as no results
#: variables that a record notes if they are set
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "KMP_AFFINITY", "GOMP_CPU_AFFINITY", "TRITON_INTERPRET")


def ours(root: Path) -> bool:
    """Whether a tree is one of this project: it has its own `retro_kernels`."""
    return (root / "retro_kernels" / "__init__.py").exists()


#: file of the plug-in that is measured
measured: Path | None = None


def git_state(root: Path | None = None) -> dict[str, Any]:
    """Return {"sha", "dirty"} of a tree (default: of the plug-in or `retro_kernels`). None: no repository."""
    nothing = {"sha": None, "dirty": None}
    if root is None:
        file = measured or Path(importlib.import_module("retro_kernels").__file__).resolve()
        root = file.parent
        if not _output(["git", "-C", str(root), "ls-files", file.name]):
            return nothing  # the repository around an installed package is not its own
    sha = _output(["git", "-C", str(root), "rev-parse", "HEAD"])
    status = _output(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return {"sha": sha, "dirty": bool(status)} if sha and status is not None else nothing


def environment() -> dict[str, Any]:
    """Return the versions, the processor, and the present number of threads."""
    import torch

    return {**_versions(), "threads": torch.get_num_threads()}


@functools.cache
def _versions() -> dict[str, Any]:
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _triton_version(),
        "cuda": torch.version.cuda,
        **({"rocm": torch.version.hip} if torch.version.hip else {}),
        "ptxas": ptxas_version(),
        "retro_kernels": getattr(importlib.import_module("retro_kernels"), "__version__", None),
        "cores": available_cores(),
        "cpu": cpu_model(),
        "isa": [flag for flag in ISA_FLAGS if flag in (_field("/proc/cpuinfo", "flags") or "").split()],
        "variables": {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
    } | ({"rehearsal": True} if rehearsing() else {})


def rehearsing() -> bool:
    """Whether this process rehearses its command, for `gpu --rehearse`."""
    return bool(os.environ.get(REHEARSAL))


def device(kind: str) -> dict[str, Any]:
    """Describe the measured device."""
    if kind == "cuda":
        import torch

        from retro_kernels.compile.target import current_target

        p = torch.cuda.get_device_properties(torch.cuda.current_device())
        driver = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]) or ""
        return {
            "type": "cuda",
            "name": p.name,
            "arch": current_target(torch.device("cuda", torch.cuda.current_device())).name,
            "multiprocessors": p.multi_processor_count,
            "memory_bytes": p.total_memory,
            "l2_bytes": p.L2_cache_size,
            "driver": driver.partition("\n")[0].strip() or None,
        }
    cpu = {"type": "cpu", "name": cpu_model(), "arch": platform.machine(), "multiprocessors": None}
    return cpu | {"memory_bytes": _meminfo("MemTotal"), "caches": caches()}


def _triton_version() -> str | None:
    for package in ("triton", "pytorch-triton-rocm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return None


def ptxas_version() -> str | None:
    """Return the release of triton's ptxas, which assembles its kernels."""
    spec = importlib.util.find_spec("triton")
    if spec is None or not spec.submodule_search_locations:
        return None
    return _release([str(Path(spec.submodule_search_locations[0], "backends", "nvidia", "bin", "ptxas")), "--version"])


def nvcc_version() -> str | None:
    return _release(["nvcc", "--version"])


def compiler_version() -> str | None:
    return (_output([os.environ.get("CXX", "g++"), "--version"]) or "").partition("\n")[0] or None


def throttled(kind: str) -> str | None:
    """Return why the GPU's clock is lower than requested. None if it is not, or if the driver does not tell."""
    import torch

    if kind != "cuda" or torch.version.hip:  # nvidia-smi tells, and AMD's tool has no such field
        return None
    device = ["-i", f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"]
    for field in ("clocks_event_reasons.active", "clocks_throttle_reasons.active"):  # the name before driver 535
        text = _output(["nvidia-smi", *device, f"--query-gpu={field}", "--format=csv,noheader"])
        if text and text.startswith("0x"):
            return ", ".join(words for bit, words in THROTTLED.items() if int(text.split()[0], 16) & bit) or None
    return None


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def cpu_model() -> str | None:
    return _field("/proc/cpuinfo", "model name") or platform.processor() or None


@functools.cache
def caches() -> dict[str, int] | None:
    """Return the bytes of the caches of core 0: {"L1 Data": ..., "L2 Unified": ...}."""
    caches, units = {}, {"K": 2**10, "M": 2**20, "G": 2**30}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
        caches[f"L{level} {kind}"] = int(size.rstrip("KMG")) * units.get(size[-1], 1)
    return caches or None


def free_memory(kind: str) -> int | None:
    """Return the bytes that can still be allocated on a device."""
    if kind != "cuda":
        return _meminfo("MemAvailable")
    import torch

    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def _field(file: str, name: str) -> str | None:
    """Return the text behind "NAME:" in a file of /proc; None on other systems."""
    try:
        with open(file) as f:
            return next((line.split(":", 1)[1].strip() for line in f if line.startswith(name)), None)
    except OSError:
        return None


def _meminfo(name: str) -> int | None:
    kib = _field("/proc/meminfo", name)
    return int(kib.split()[0]) * 1024 if kib else None


def _release(command: list[str]) -> str | None:
    """Return the last word of the line in a CUDA tool's --version that names its release: "V13.0.88"."""
    return next((line.split()[-1] for line in (_output(command) or "").splitlines() if "release" in line), None)


def _output(command: list[str]) -> str | None:
    """Return the output of a command; None if it is not installed or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
