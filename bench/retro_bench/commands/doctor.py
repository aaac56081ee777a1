"""show versions, the noise floor, and what to fix

The noise floor is how far medians of one call move between fresh batches. `ab` cannot detect a smaller change.
"""

import argparse
import importlib.util
import shutil
import statistics
import timeit

import numpy

from ..records import environment
from . import exits

#: module -> (its name for pip, the feature that needs it)
OPTIONAL = {
    "rich": ("rich", "colours, and tables as wide as the terminal"),
    "faiss": ("faiss-cpu", "a baseline of topk_chunks"),
    "pytest_benchmark": ("pytest-benchmark", "the developer's front end"),
    "triton": ("triton", "kernels for GPUs, `static`"),
    "ninja": ("ninja", "a fast build of the extensions"),
    "pybind11": ("pybind11", "the extension for token sequences"),
}
BATCHES, SAMPLES = 12, 15
STEADY, NOISY = 0.02, 0.05  # greatest spread of medians at which a machine is fit, or hardly fit, for gates of 5%


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-noise", action="store_true", help="versions only")


def execute(arguments: argparse.Namespace) -> int:
    import torch

    import retro_kernels as rk

    env = environment.environment()
    names = ("python", "torch", "triton", "cuda", "ptxas", "retro_kernels", "cpu", "cores", "threads")
    rows = {name: env[name] for name in names} | {
        "isa": " ".join(env["isa"]) or "none known",
        "nvcc": environment.nvcc_version(),
        "c++": environment.compiler_version(),
        "git": shutil.which("git") and environment.git_state()["sha"],
        "gpu": environment.device("cuda")["name"] if torch.cuda.is_available() else None,
        **{package: "yes" if installed(package) else "not installed" for package in OPTIONAL},
    }
    for name, value in rows.items():
        print(f"{name:<16} {'none' if value in (None, '') else value}")
    for op, backends in rk.backends().items():
        print(f"{op:<24} {', '.join(name for name, status in backends.items() if status)}")
    spread = None if arguments.no_noise else noise()
    if spread is not None:
        fit = "fit" if spread <= STEADY else "hardly fit" if spread <= NOISY else "not fit"
        print(f"{'noise floor':<16} {100 * spread:.1f}% between batches of one call: {fit} for gates of 5%")
    print("\nto fix:", *(remedies(spread) or ["nothing"]), sep="\n  ")
    return exits.OK if spread is None or spread <= NOISY else exits.INCONCLUSIVE


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def remedies(spread: float | None) -> list[str]:
    """List the faults of this machine with their remedies."""
    from retro_kernels import extensions

    advice = [f"pip install {name}: {what}" for package, (name, what) in OPTIONAL.items() if not installed(package)]
    if why := extensions.unavailable("_cpu"):
        advice.append(f"the C++ kernels: {why}")
    if environment.compiler_version() is None:
        advice.append("install a C++ compiler (g++, or set CXX): `ab` and missing extensions need it")
    if shutil.which("git") is None:
        advice.append("install git: `ab` needs it, and records name their commit")
    if spread is not None and spread > STEADY:
        advice.append("other work disturbs the times: stop it, or bind it to other cores")
    return advice


def noise() -> float:
    """Return the spread (p90/p10 - 1) of batch medians of a product that takes all threads about a millisecond."""
    import torch

    product = timeit.Timer("a @ a", globals={"a": torch.randn(384, 384)})
    medians = [statistics.median(product.repeat(SAMPLES, number=4)) for _ in range(BATCHES)]
    low, high = numpy.quantile(medians, (0.1, 0.9))
    return float(high / low) - 1
