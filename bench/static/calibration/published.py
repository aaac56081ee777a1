"""Times that others measured, with their source. `how`: "ncu" is the kernel alone, "events" includes event overhead."""

from __future__ import annotations

from typing import NamedTuple

PROFILING = "github.com/XAheli/Kernel-Profiling, data_dashboard/data.js"
PILOT = "github.com/BBuf/KDA-Pilot, kernels/h200_diffusion_*__multi_shape, Triton 3.6.0"
LIGER = "github.com/linkedin/Liger-Kernel, benchmark/data/all_benchmark_data.csv"
TRITONBENCH = "github.com/pytorch/benchmark, messages of commits 1e6003dd, d5f0a12b, e05b6fa9"


class Row(NamedTuple):
    """One published time. kernel: a function of `kernels`; sizes: its arguments after the type."""

    kernel: str
    machine: str
    dtype: str
    sizes: tuple[int, ...]
    microseconds: float
    how: str
    source: str
    options: dict = {}  # noqa: RUF012  a NamedTuple's default is never written


def _rows() -> list[Row]:
    rows = []

    def add(kernel, machine, how, source, dtype, table, **options):
        rows.extend(Row(kernel, machine, dtype, sizes, us, how, source, options) for sizes, us in table)

    # K is 1000 in the sizes of the vector additions and 1024 in those of softmax: bytes and DRAM share fit only so
    add(
        "add",
        "H200",
        "ncu",
        PROFILING,
        "float32",
        [
            ((32 * 4000 * 256,), 88.42),
            ((64 * 8000 * 512,), 712.51),
            ((64 * 8000 * 1024,), 1420),
            ((48 * 12000 * 1536,), 2410),
        ],
    )
    add("add", "H200", "ncu", PROFILING, "bfloat16", [((64 * 8000 * 1024,), 734)])
    add("add", "H200", "ncu", PROFILING, "float16", [((64 * 16000 * 2048,), 2850)])
    add(
        "softmax",
        "H200",
        "ncu",
        PROFILING,
        "float32",
        [
            ((64 * 8192, 1024), 1020),
            ((64 * 8192, 512), 620.6),
            ((32 * 2048, 1024), 131),
            ((32 * 2048, 4096), 524.9),
            ((32 * 2048, 8192), 1070),
            ((32 * 4096, 4096), 1050),
            ((32 * 8192, 4096), 2140),
            ((32 * 4096, 256), 124.9),
        ],
    )
    add("softmax", "H200", "ncu", PROFILING, "bfloat16", [((64 * 8192, 1024), 862.2)])
    add("softmax", "H200", "ncu", PROFILING, "float16", [((64 * 8192, 1024), 796.8)])
    add(
        "softmax_backward",
        "H200",
        "ncu",
        PROFILING,
        "float32",
        [
            ((64 * 8192, 1024), 1550),
            ((64 * 8192, 512), 728.4),
            ((32 * 2048, 8192), 1590),
            ((32 * 8192, 4096), 4200),
        ],
    )
    add("softmax_backward", "H200", "ncu", PROFILING, "bfloat16", [((64 * 8192, 1024), 733.8)])
    add("layer_norm", "H200", "ncu", PILOT, "float32", [((8640, 5120), 85.792)], warps=8)
    add("rms_norm_rows", "H200", "ncu", PILOT, "bfloat16", [((648720, 128), 77.664), ((4096, 128), 3.104)])
    add("rms_norm_rows", "H200", "events", PILOT, "bfloat16", [((650040, 128), 83.07)])
    widths = (1024, 2048, 4096, 8192, 16384)
    add(
        "layer_norm",
        "H100",
        "events",
        LIGER,
        "float32",
        [((4096, w), us) for w, us in zip(widths, (18.848, 29.152, 51.040, 94.752, 184.768), strict=True)],
    )
    add(
        "layer_norm",
        "A100",
        "events",
        LIGER,
        "float32",
        [((4096, w), us) for w, us in zip(widths, (30.272, 49.920, 88.160, 165.216, 322.304), strict=True)],
    )
    add(
        "rms_norm",
        "A100",
        "events",
        LIGER,
        "bfloat16",
        [
            ((2048, 1024), 13.6),
            ((2048, 4096), 31.072),
            ((2048, 8192), 51.744),
            ((2048, 16384), 95.264),
            ((2048, 32768), 182.24),
        ],
    )
    add(
        "relu_squared",
        "H100",
        "events",
        LIGER,
        "bfloat16",
        [((4096, w), us) for w, us in zip(widths, (11.264, 17.056, 27.936, 50.208, 94.400), strict=True)],
    )
    add(
        "rms_norm",
        "H100",
        "events",
        LIGER,
        "bfloat16",
        [((4096, 1024), 12.16), ((4096, 4096), 29.184), ((4096, 16384), 95.008)],
    )
    add(
        "swiglu",
        "H100",
        "events",
        LIGER,
        "bfloat16",
        [((8192, 1024), 23.328), ((8192, 8192), 137.088), ((8192, 32768), 527.504)],
    )
    add(
        "product",
        "H100",
        "events",
        TRITONBENCH,
        "bfloat16",
        [
            ((16384, 1280, 8192), 561.899),
            ((16384, 8192, 1024), 576.171),
            ((16384, 7168, 8192), 3133.61),
            ((16384, 8192, 3584), 1639.95),
        ],
    )
    add("flash", "H100", "events", TRITONBENCH, "float16", [((1024, 1024, 128), 1555.74), ((1024, 2048, 128), 5706.56)])
    # TFLOP/s 290.0 and 339.3 of 4 B H N^2 D
    add("flash", "H100", "events", TRITONBENCH, "float16", [((1024, 512, 64), 236.99), ((256, 2048, 64), 810.28)])
    return rows


ROWS = _rows()
