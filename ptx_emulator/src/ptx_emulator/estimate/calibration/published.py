"""Times that others measured, with their source. `how`: "ncu" is the kernel alone, "events" includes event overhead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCES = {
    "PROFILING": "github.com/XAheli/Kernel-Profiling, data_dashboard/data.js",
    "PILOT": "github.com/BBuf/KDA-Pilot, kernels/h200_diffusion_*__multi_shape, Triton 3.6.0",
    "LIGER": "github.com/linkedin/Liger-Kernel, benchmark/data/all_benchmark_data.csv",
    "SGLANG": "github.com/sgl-project/sglang, documentation of speculative decoding; tiles.txt says which",
    "TRITONBENCH": "github.com/pytorch/benchmark, messages of commits 1e6003dd, d5f0a12b, e05b6fa9",
}


class PublishedTime(NamedTuple):
    """One published time. kernel: a function of `kernels`; sizes: its arguments after the type."""

    kernel: str
    machine: str
    dtype: str
    sizes: tuple[int, ...]
    microseconds: float
    how: str
    source: str

    def __str__(self) -> str:
        return f"{self.kernel} {'x'.join(map(str, self.sizes))} {self.dtype}, {self.machine}: {self.microseconds:g} us"


def _rows(name: str) -> Iterator[PublishedTime]:
    lines = Path(__file__).with_name(name).read_text().replace("\n    ", " ").splitlines()
    for line in [line for line in lines if not line.startswith("#")]:
        what, _, times = line.partition(": ")
        kernel, machine, how, dtype, source = what.split()
        for time in times.split(", "):
            sizes, microseconds = time.split()
            numbers = tuple(map(int, re.split("[x/]", sizes)))
            yield PublishedTime(kernel, machine, dtype, numbers, float(microseconds), how, SOURCES[source])


ROWS = list(_rows("times.txt"))
#: products whose tile was published too: M, N, K and the tile are the sizes
TILES = list(_rows("tiles.txt"))
