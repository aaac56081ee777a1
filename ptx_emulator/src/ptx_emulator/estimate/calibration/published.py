"""Times that others measured, with their source. `how`: "ncu" is the kernel alone, "events" includes event overhead."""

from __future__ import annotations

from collections.abc import Iterator
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


#: kernel, machine, how, type, source: sizes and microseconds, ... The sources' K is read as 1000 in the sizes of the
#: vector additions and as 1024 in the sizes of softmax, because only then do bytes and DRAM share fit. Times of flash
#: at a width of 64 follow from 290.0 and 339.3 TFLOP/s and 4 B H N^2 D FLOPs.
TABLE = """
add H200 ncu float32 PROFILING: 32768000 88.42, 262144000 712.51, 524288000 1420, 884736000 2410
add H200 ncu bfloat16 PROFILING: 524288000 734
add H200 ncu float16 PROFILING: 2097152000 2850
softmax H200 ncu float32 PROFILING: 524288x1024 1020, 524288x512 620.6, 65536x1024 131, 65536x4096 524.9,
    65536x8192 1070, 131072x4096 1050, 262144x4096 2140, 131072x256 124.9
softmax H200 ncu bfloat16 PROFILING: 524288x1024 862.2
softmax H200 ncu float16 PROFILING: 524288x1024 796.8
softmax_backward H200 ncu float32 PROFILING: 524288x1024 1550, 524288x512 728.4, 65536x8192 1590, 262144x4096 4200
softmax_backward H200 ncu bfloat16 PROFILING: 524288x1024 733.8
layer_norm H200 ncu float32 PILOT: 8640x5120 85.792 warps=8
rms_norm_rows H200 ncu bfloat16 PILOT: 648720x128 77.664, 4096x128 3.104
rms_norm_rows H200 events bfloat16 PILOT: 650040x128 83.07
layer_norm H100 events float32 LIGER: 4096x1024 18.848, 4096x2048 29.152, 4096x4096 51.04, 4096x8192 94.752,
    4096x16384 184.768
layer_norm A100 events float32 LIGER: 4096x1024 30.272, 4096x2048 49.92, 4096x4096 88.16, 4096x8192 165.216,
    4096x16384 322.304
rms_norm A100 events bfloat16 LIGER: 2048x1024 13.6, 2048x4096 31.072, 2048x8192 51.744, 2048x16384 95.264,
    2048x32768 182.24
relu_squared H100 events bfloat16 LIGER: 4096x1024 11.264, 4096x2048 17.056, 4096x4096 27.936, 4096x8192 50.208,
    4096x16384 94.4
rms_norm H100 events bfloat16 LIGER: 4096x1024 12.16, 4096x4096 29.184, 4096x16384 95.008
swiglu H100 events bfloat16 LIGER: 8192x1024 23.328, 8192x8192 137.088, 8192x32768 527.504
product H100 events bfloat16 TRITONBENCH: 16384x1280x8192 561.899, 16384x8192x1024 576.171, 16384x7168x8192 3133.61,
    16384x8192x3584 1639.95
flash H100 events float16 TRITONBENCH: 1024x1024x128 1555.74, 1024x2048x128 5706.56, 1024x512x64 236.99,
    256x2048x64 810.28
"""


def _rows() -> Iterator[PublishedTime]:
    for line in TABLE.replace("\n    ", " ").strip().splitlines():
        what, _, times = line.partition(": ")
        kernel, machine, how, dtype, source = what.split()
        for time in times.split(", "):
            sizes, microseconds, *options = time.split()
            shape = tuple(map(int, sizes.split("x")))
            known = {name: int(value) for name, value in (option.split("=") for option in options)}
            yield PublishedTime(kernel, machine, dtype, shape, float(microseconds), how, SOURCES[source], known)


ROWS = list(_rows())

#: Products of float16, B as a linear layer's weight, on an H100, by events. A size MxNxK; its tiles, rows x columns x
#: depth/warps/stages, each with its microseconds: the Triton kernels among the ten best that torch's autotuner printed
#: in github.com/sgl-project/sglang, documentation of speculative decoding as built on 2026-02-09. Its runner was
#: labelled 1-gpu-runner, which pull request 21008 renamed to 1-gpu-h100.
TILES = """
128x12288x4096:
    128x128x64/8/5 49.4, 64x128x128/4/4 52.6, 64x64x128/4/5 54.4, 64x64x64/8/3 55.6, 64x128x64/4/3 55.7,
    128x128x64/4/3 58.1, 64x128x32/8/4 66.5, 128x64x32/8/4 68.4, 64x32x128/4/5 71.4
128x4096x4096:
    64x64x128/4/5 23.5, 64x128x128/4/4 26.8, 64x32x128/4/5 30.0, 128x128x64/8/5 32.0, 64x64x64/8/3 39.7,
    64x128x64/4/3 41.1, 64x32x32/8/5 42.0, 32x32x128/4/2 42.1, 128x128x64/4/3 42.8
128x22016x4096:
    64x128x64/4/3 75.4, 128x128x64/4/3 78.1, 64x128x128/4/4 79.8, 128x128x64/8/5 82.7, 64x64x64/8/3 93.4,
    64x128x32/4/3 96.8, 64x64x128/4/5 97.1, 128x64x32/4/3 97.1, 64x128x32/8/4 100.0
128x4096x11008:
    64x64x128/4/5 50.2, 64x128x128/4/4 55.7, 64x32x128/4/5 64.9, 128x128x64/8/5 69.5, 64x64x64/8/3 89.6,
    64x128x64/4/3 92.7, 128x128x64/4/3 96.7, 64x32x32/8/5 97.8, 32x32x128/4/2 100.2
128x32000x4096:
    128x128x64/8/5 104.6, 128x128x64/4/3 104.8, 64x128x128/4/4 108.1, 64x64x64/8/3 116.3, 64x128x64/4/3 116.6,
    128x128x32/4/3 126.4, 64x64x128/4/5 128.7, 64x128x32/4/3 134.6, 128x64x32/4/3 141.3
64x12288x4096:
    64x128x128/4/4 48.4, 64x128x64/8/5 48.5, 64x64x128/4/5 49.4, 64x32x128/4/5 51.1, 64x64x64/8/3 54.7,
    64x128x64/4/3 55.4, 32x32x128/4/2 56.5, 64x32x32/8/5 62.0, 32x64x32/8/5 64.4
64x4096x4096:
    64x32x128/4/5 22.2, 64x64x128/4/5 23.6, 64x128x128/4/4 26.6, 64x128x64/8/5 30.0, 64x64x64/8/3 38.8,
    32x32x128/4/2 39.3, 64x32x32/8/5 40.4, 64x128x64/4/3 40.6, 32x64x32/8/5 42.3
64x22016x4096:
    64x128x64/4/3 74.0, 64x64x64/8/3 74.4, 64x64x128/4/5 75.1, 64x128x128/4/4 76.3, 64x128x64/8/5 79.5,
    64x32x128/4/5 84.0, 64x128x32/8/4 89.5, 64x64x32/8/4 92.2, 64x64x32/4/3 92.5
64x4096x11008:
    64x32x128/4/5 48.1, 64x64x128/4/5 49.2, 64x128x128/4/4 55.0, 64x128x64/8/5 64.4, 64x64x64/8/3 88.0,
    64x32x32/8/5 88.5, 64x128x64/4/3 91.2, 32x64x32/8/5 91.6, 32x32x128/4/2 93.4
64x32000x4096:
    64x128x128/4/4 100.6, 64x128x64/4/3 100.7, 64x128x64/8/5 100.9, 64x64x128/4/5 102.1, 64x64x64/8/3 102.5,
    64x32x128/4/5 111.1, 64x128x32/4/3 118.9, 64x64x32/4/3 121.9, 32x32x128/4/2 133.4
"""


def _tiled() -> Iterator[tuple[tuple[int, ...], dict[tuple[int, ...], float]]]:
    for line in TILES.replace("\n    ", " ").strip().splitlines():
        size, _, tiles = line.partition(": ")
        pairs = (tile.split() for tile in tiles.split(", "))
        numbers = {tuple(map(int, tile.replace("/", "x").split("x"))): float(us) for tile, us in pairs}
        yield tuple(map(int, size.split("x"))), numbers


#: size -> tile, as `kernels.product` takes them -> microseconds
TILED = dict(_tiled())
