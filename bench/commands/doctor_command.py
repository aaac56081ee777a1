"""tools, versions, and this machine's noise floor

The noise floor: how far medians of the same call move between fresh batches. `ab` can tell no change smaller than that.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import statistics
import time

import torch

import retro_kernels as rk

from .. import environment, exits, timing

OPTIONAL = ("rich", "faiss", "matplotlib", "pytest_benchmark", "triton", "ninja", "pybind11")
BATCHES, SAMPLES = 12, 15
STEADY, NOISY = 0.02, 0.05  # spread of medians: fit for 5% gates, unfit for them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-noise", action="store_true", help="versions only")


def execute(arguments: argparse.Namespace) -> int:
    env = environment.environment()
    for name in ("python", "torch", "triton", "cuda", "ptxas", "retro_kernels", "cpu", "cores", "threads"):
        print(f"{name:<14} {_shown(env[name])}")
    print(f"{'isa':<14} {' '.join(env['isa']) or 'none of those we know'}")
    print(f"{'nvcc':<14} {_shown(environment.nvcc_version())}")
    print(f"{'c++':<14} {_shown(environment.compiler_version())}")
    print(f"{'git':<14} {_shown(shutil.which('git') and environment.git_state()['sha'])}")
    print(f"{'gpu':<14} {environment.device('cuda')['name'] if torch.cuda.is_available() else 'none'}")
    for package in OPTIONAL:
        print(f"{package:<14} {'yes' if importlib.util.find_spec(package) else 'not installed'}")
    for kernel, backends in rk.backends().items():
        print(f"{kernel:<24} {', '.join(name for name, status in backends.items() if status)}")
    if arguments.no_noise:
        return exits.OK
    spread = noise()
    advice = (
        "fit for 5% gates"
        if spread <= STEADY
        else "bind other work away from these cores"
        if spread <= NOISY
        else "too noisy to gate anything"
    )
    print(f"{'noise floor':<14} {100 * spread:.1f}% between batches of one call: {advice}")
    return exits.OK if spread <= NOISY else exits.INCONCLUSIVE


def noise() -> float:
    """Spread (p90/p10 - 1) of batch medians of one product that keeps all threads busy for about a millisecond."""
    a = torch.randn(384, 384)
    medians = []
    for _ in range(BATCHES):
        times = []
        for _ in range(SAMPLES):
            begun = time.perf_counter()
            for _ in range(4):
                a @ a
            times.append(time.perf_counter() - begun)
        medians.append(statistics.median(times))
    medians.sort()
    return timing.quantile(medians, 0.9) / timing.quantile(medians, 0.1) - 1


def _shown(value) -> str:
    return "none" if value in (None, "") else str(value)
