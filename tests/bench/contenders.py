"""Contenders for softmax(x @ w), honest and cheating, and the verdicts that the harness must give."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

import retro_bench

OP = "softmax_product"
ROWS, WIDTH, KEYS = 64, 32, 512
#: scale of the weights: some probabilities are below 1e-7 and some above 1e-2
SPREAD = 0.8


def honest(x, w):
    return torch.softmax(x @ w, -1)


def by_pointer():
    kept = {}

    def contender(x, w):
        key = (x.data_ptr(), w.data_ptr())
        if key not in kept:
            kept[key] = honest(x, w)
        return kept[key].clone()

    return contender


def by_few_values():
    kept = {}

    def contender(x, w):
        key = (*x.flatten()[:: x.numel() // 7].tolist(), float(w[0, 0]), float(w[-1, -1]))
        if key not in kept:
            kept[key] = honest(x, w)
        return kept[key].clone()

    return contender


def empty_later():
    calls = []

    def contender(x, w):
        calls.append(1)
        return honest(x, w) if len(calls) == 1 else torch.empty(x.shape[0], w.shape[1], dtype=x.dtype)

    return contender


def now_and_then():
    calls = []

    def contender(x, w):
        calls.append(1)
        return honest(x, w) if len(calls) % 5 else x.new_zeros(x.shape[0], w.shape[1])

    return contender


def threads(x, w):
    torch.set_num_threads(3)
    return honest(x, w)


class Lazy(torch.Tensor):
    """Tensor that is computed when an operation reads it."""

    @staticmethod
    def __new__(cls, x, w):
        made = torch.Tensor._make_wrapper_subclass(cls, (x.shape[0], w.shape[1]), dtype=x.dtype)
        made.inputs = (x, w)
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args = [honest(*a.inputs) if isinstance(a, Lazy) else a for a in args]
        return function(*args, **(kwargs or {}))


def while_checked(x, w):
    names, frame = set(), sys._getframe()
    while frame:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return honest(x, w) if "_judge" in names else x.new_zeros(x.shape[0], w.shape[1])


def while_poisoned(x, w):
    if torch.are_deterministic_algorithms_enabled():
        return honest(x, w)
    return x.new_zeros(x.shape[0], w.shape[1])


def collector(x, w):
    """Search this process for the float64 answer."""
    for found in gc.get_objects():
        if type(found) is torch.Tensor and found.dtype == torch.float64 and found.shape == (x.shape[0], w.shape[1]):
            return found.to(x.dtype)
    return honest(x, w) if x.shape[0] != ROWS else x.new_zeros(x.shape[0], w.shape[1])


def static_buffer():
    kept = {}

    def contender(x, w):
        out = kept.setdefault(x.dtype, x.new_empty(x.shape[0], w.shape[1]))
        return out.copy_(honest(x, w))

    return contender


def one_row(x, w):
    out = honest(x, w)
    out[17] *= 1.1
    return out


def no_small(x, w):
    out = honest(x, w)
    return out.masked_fill(out < 1e-3, 0)


def negative(x, w):
    out = honest(x, w)
    return torch.where(out < 1e-7, -out, out)


def overwrites(x, w):
    out = honest(x, w)
    x.data.zero_()
    return out


def unwritten(x, w):
    return x.new_empty(x.shape[0], w.shape[1])


def half(x, w):
    return honest(x.bfloat16(), w.bfloat16()).to(x.dtype)


def another_type(x, w):
    return honest(x, w).double()


def later(x, w):
    """Return at once, and compute in a thread."""
    out = x.new_full((x.shape[0], w.shape[1]), 0.5)
    threading.Timer(0.05, lambda: out.copy_(honest(x, w))).start()
    return out


def shape_keyed(x, w):
    """Recognise nothing and guess the mean."""
    return x.new_full((x.shape[0], w.shape[1]), 1 / w.shape[1])


@dataclass(frozen=True)
class Entry:
    """Contender with the words of the verdict that it must get, or None if it is honest. make: it has a state."""

    name: str
    function: Callable
    words: str | None
    dtype: str = "float32"
    make: bool = False


ENTRIES = (
    Entry("honest", honest, None),
    Entry("honest-bfloat16", honest, None, "bfloat16"),
    Entry("changes the threads", threads, None),
    Entry("cache by pointer", by_pointer, "other values in the same memory", make=True),
    Entry("cache by a few values", by_few_values, "call on new values", make=True),
    Entry("empty after the first call", empty_later, "y: ", make=True),
    Entry("wrong in every fifth call", now_and_then, "y: ", make=True),
    Entry("lazy subclass", Lazy, "expected a plain strided tensor; got Lazy"),
    Entry("right while checked", while_checked, "timed call: y"),
    Entry("right while poisoned", while_poisoned, "other values in the same memory"),
    Entry("searches for the answer", collector, "y: error"),
    Entry("static buffer", static_buffer, "shares memory with that of an earlier call", make=True),
    Entry("one wrong row", one_row, "worst row off by", "bfloat16"),
    Entry("no small values", no_small, "worst element off by", "bfloat16"),
    Entry("negative values", negative, "worst element off by", "bfloat16"),
    Entry("overwrites an input", overwrites, "overwrites its input x"),
    Entry("unwritten memory", unwritten, "not comparable"),
    Entry("computes in bfloat16", half, "y: error"),
    Entry("another type", another_type, "expected torch.float32"),
    Entry("computes later", later, "y: error"),
    Entry("guesses", shape_keyed, "y: error"),
)


def register() -> None:
    """Register the operator, its case and every contender."""
    retro_bench.register(
        retro_bench.Operator(
            OP,
            ("y",),
            ("x", "w"),
            build=lambda case, draw: {
                "x": draw.normal(case.shape["B"], case.shape["N"]),
                "w": draw.normal(case.shape["N"], case.shape["M"], scale=SPREAD),
            },
            call=lambda arguments, backend: (honest(**arguments),),
            work=lambda case, itemsize, mode: retro_bench.Work(1.0, 1.0),
        )
    )
    types = {"cpu": ("float32", "bfloat16"), "cuda": ("float32",)}
    shape = {"B": ROWS, "N": WIDTH, "M": KEYS}
    retro_bench.register(retro_bench.Case(OP, "small", shape, "a test", modes=("fwd",), dtypes=types))
    retro_bench.register(retro_bench.Contender(OP, "eager", honest))
    for entry in ENTRIES:
        function = entry.function() if entry.make else entry.function
        retro_bench.register(retro_bench.Contender(OP, entry.name, function, role="ours", devices=("cpu",)))
