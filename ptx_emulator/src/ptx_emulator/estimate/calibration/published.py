"""Times that others measured, with their source. `how`: "ncu" is the kernel alone, "events" includes event overhead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCES = {
    "PROFILING": "github.com/XAheli/Kernel-Profiling, data_dashboard/data.js",
    "PILOT": "github.com/BBuf/KDA-Pilot, kernels/h200_diffusion_*__multi_shape, Triton 3.6.0",
    "LIGER": "github.com/linkedin/Liger-Kernel, benchmark/data/all_benchmark_data.csv",
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
    options: dict = {}  # noqa: RUF012  a NamedTuple's default is never written


def _lines(name: str) -> list[str]:
    lines = Path(__file__).with_name(name).read_text().replace("\n    ", " ").splitlines()
    return [line for line in lines if not line.startswith("#")]


def _rows() -> Iterator[PublishedTime]:
    for line in _lines("times.txt"):
        what, _, times = line.partition(": ")
        kernel, machine, how, dtype, source = what.split()
        for time in times.split(", "):
            sizes, microseconds, *options = time.split()
            shape = tuple(map(int, sizes.split("x")))
            known = {name: int(value) for name, value in (option.split("=") for option in options)}
            yield PublishedTime(kernel, machine, dtype, shape, float(microseconds), how, SOURCES[source], known)


ROWS = list(_rows())


def _tiled() -> Iterator[tuple[tuple[int, ...], dict[tuple[int, ...], float]]]:
    for line in _lines("tiles.txt"):
        size, _, tiles = line.partition(": ")
        pairs = (tile.split() for tile in tiles.split(", "))
        numbers = {tuple(map(int, tile.replace("/", "x").split("x"))): float(us) for tile, us in pairs}
        yield tuple(map(int, size.split("x"))), numbers


#: size -> tile, as `kernels.product` takes them -> microseconds
TILED = dict(_tiled())
