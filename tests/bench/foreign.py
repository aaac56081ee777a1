"""A repository outside this tree: one C++ kernel and one Triton kernel, registered with the harness by a plug-in."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from tests import trees

ROOT = trees.ROOT
BUILD = "c++ -O2 -shared -fPIC decay.cpp -o libdecay.so"

DECAY = """\
extern "C" void decay(const float* x, float* y, long rows, long width, float keep) {
  const auto row = [&](long r) {
    float state = 0;
    for (long i = 0; i < width; ++i) y[r * width + i] = state = keep * state + x[r * width + i];
  };
  for (long r = 0; r < rows; ++r) row(r);
}
"""

KERNELS = """\
import triton
import triton.language as tl


@triton.jit
def _scale_kernel(x_ptr, y_ptr, factor, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    at = tl.program_id(0) * BLOCK + lane
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, (x - tl.max(x, 0)) * factor)


def scale(x, factor):
    y = x.new_empty(x.shape)
    _scale_kernel[(x.numel() // 2048,)](x, y, factor, BLOCK=2048, num_warps=4)
    return y
"""

PLUGIN = """\
import ctypes
from pathlib import Path

import torch

import retro_bench
from kernels import scale

library = ctypes.CDLL(str(Path(__file__).parent / "libdecay.so"))
library.decay.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_float]
KEEP, FACTOR = 0.5, 3.0


def slow_decay(x):
    columns, state = [], torch.zeros_like(x[:, 0])
    for column in x.unbind(1):
        state = KEEP * state + column
        columns.append(state)
    return torch.stack(columns, 1)


def decay(x):
    y = torch.empty_like(x)
    library.decay(x.data_ptr(), y.data_ptr(), *x.shape, KEEP)
    return y


def operator(name, reference):
    retro_bench.register(
        retro_bench.Operator(
            name,
            ("y",),
            ("x",),
            build=lambda case, draw: {"x": draw.normal(case.shape["B"], case.shape["N"])},
            call=lambda arguments, backend: (reference(**arguments),),
            work=lambda case, itemsize, mode: retro_bench.Work(1.0, 8.0 * case.shape["B"] * case.shape["N"]),
        )
    )
    retro_bench.register(retro_bench.Contender(name, "eager", reference))


FLOAT = {"cpu": ("float32",), "cuda": ("float32",)}
operator("decay", slow_decay)
retro_bench.register(retro_bench.Case("decay", "rows", {"B": 400, "N": 512}, "a test", modes=("fwd",), dtypes=FLOAT))
retro_bench.register(retro_bench.Contender("decay", "cxx", decay, role="ours", devices=("cpu",)))

operator("scale", lambda x: (x - x.amax(-1, keepdim=True)) * FACTOR)
retro_bench.register(retro_bench.Case("scale", "wide", {"B": 8, "N": 2048}, "a test", modes=("fwd",), dtypes=FLOAT))
retro_bench.register(
    retro_bench.Contender("scale", "triton", lambda x: scale(x, FACTOR), role="ours", devices=("cuda",), triton=True)
)
"""

#: name -> (file, old text, new text, exit code of `ab`, words of its output)
FAULTS = {
    "wrong result": ("decay.cpp", "keep * state +", "keep * state * 1.01f +", 2, "numerics"),
    "lost coalescing": (
        "kernels.py",
        "BLOCK + lane",
        "BLOCK + lane % 64 * 32 + lane // 64",
        1,
        "sectors of global memory",
    ),
    "spill": ("kernels.py", "num_warps=4", "num_warps=1, maxnreg=32", 1, "spills"),
}


def repository(folder: Path) -> Path:
    """Make the repository with one commit, and build it."""
    folder.mkdir(parents=True)
    for name, text in (("decay.cpp", DECAY), ("kernels.py", KERNELS), ("plug.py", PLUGIN), (".gitignore", "*.so\n")):
        (folder / name).write_text(text)
    subprocess.run(shlex.split(BUILD), cwd=folder, check=True)
    return trees.commit(folder)


def plant(folder: Path, fault: str) -> None:
    """Put a fault into the working tree."""
    name, old, new, *_ = FAULTS[fault]
    trees.replace(folder / name, old, new)


def restore(folder: Path) -> None:
    subprocess.run([*trees.GIT, "-C", str(folder), "checkout", "-q", "."], check=True)


def bench(folder: Path, *words: str, installed: Path | None = None) -> subprocess.CompletedProcess:
    """Run `retro-bench` in the repository. installed: the program of a wheel; default: this tree's."""
    environ = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTHONPATH")}
    environ |= {} if installed else {"PYTHONPATH": f"{ROOT}:{ROOT / 'bench'}"}
    program = [str(installed)] if installed else [sys.executable, "-m", "retro_bench"]
    return subprocess.run([*program, *words], cwd=folder, env=environ, capture_output=True, text=True)


def gate(folder: Path, *more: str, installed: Path | None = None) -> subprocess.CompletedProcess:
    """Run `retro-bench ab` in the repository: its working tree against the commit."""
    given = ("--plugin", "plug", "--base", "HEAD", "--build", BUILD, *more)
    return bench(folder, "ab", *given, installed=installed)
