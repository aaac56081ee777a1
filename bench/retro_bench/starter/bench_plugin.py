"""This repository's kernels for retro-bench. Replace `row_norm` by your own operator.

retro-bench check --plugin bench_plugin    right?
retro-bench run --plugin bench_plugin      fast?
"""

import torch

import retro_bench

OP = "row_norm"
EPS = 1e-6


def reference(x, weight):
    """Define y = x / rms(x) * weight. Kernels are checked against it in float64."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def kernel(x, weight):
    """Call the kernel under test: put yours here."""
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, EPS)


def arguments(case, draw):
    """Draw random inputs of one case."""
    rows, width = case.shape["B"], case.shape["D"]
    return {"x": draw.normal(rows, width), "weight": draw.uniform(width, low=0.5, high=1.5)}


def work(case, itemsize, mode):
    """Count FLOPs and least bytes of one call. The backward adds about twice as many."""
    elements = case.shape["B"] * case.shape["D"]
    times = 3 if mode == "fwdbwd" else 1
    return retro_bench.Work(flops=4.0 * elements * times, bytes=2 * elements * itemsize * times)


retro_bench.register(
    retro_bench.Operator(
        OP,
        outputs=("y",),
        differentiable=("x", "weight"),
        build=arguments,
        call=lambda arguments, backend: (reference(**arguments),),
        work=work,
    )
)
for name, rows, width in (("narrow", 512, 256), ("wide", 64, 4096)):
    retro_bench.register(retro_bench.Case(OP, name, {"B": rows, "D": width}, "a row norm of a small model"))
# `eager` is the yardstick: a kernel may have twice the error of plain PyTorch in the same type
retro_bench.register(retro_bench.Contender(OP, "eager", reference))
retro_bench.register(retro_bench.Contender(OP, "mine", kernel, role="ours", devices=("cpu",)))
