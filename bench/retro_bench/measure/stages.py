"""Times of the stages of a CPU kernel's pass: packing, each product, softmax, position logits, writing.

The kernel measures itself: scopes in its C++ sources (csrc/cpu/stages.h) sum the time of each stage over all threads.
`small` makes a case whose operands stay in the cache, which separates a slow stage from slow memory.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch

from retro_kernels import extensions

from ..registry import Case

LEAST_S, MOST_CALLS = 0.5, 500
#: most queries, keys and rows of relative keys of a small case: with 64 floats each they fit in 1 MiB
ROWS = 256


def small(case: Case) -> Case:
    """Return the case with one batch entry, one head for each thread, and few rows of each."""
    shape = dict(case.shape)
    heads = min(shape.get("H", 1), torch.get_num_threads())
    shape |= {letter: heads for letter in "HG" if letter in shape} | {"B": 1}
    if "M" in shape:  # the queries of two chunks, of which one attends
        shape |= {"N": min(shape["N"], 2 * shape["M"] - 1), "L": 1}
    else:
        shape |= {letter: min(shape[letter], ROWS) for letter in "NST" if letter in shape}
    return dataclasses.replace(case, name=f"{case.name}, in cache", shape=shape)


def of(call: Callable[[], Any]) -> dict[str, dict[str, float]]:
    """Return {stage: {"seconds", "flops"}} of one call that was warmed up. The seconds are summed over threads.

    FLOPs are those of the stage's matrix products, padding included; a stage without a product has 0.
    """
    extension, calls = extensions.extension("_cpu"), 0
    extension.start_stage_times()
    begun = time.perf_counter()
    try:
        while calls < MOST_CALLS and (calls < 3 or time.perf_counter() - begun < LEAST_S):
            call()
            calls += 1
    finally:
        sums = extension.stop_stage_times()
    return {
        stage: {"seconds": seconds / calls, "flops": flops / calls}
        for stage, (seconds, flops) in sums.items()
        if seconds
    }
