"""Parts of the CPU kernels, each measured alone on this machine, and their sum in a case.

A part runs on every thread at once, in memory of its own that stays in the caches: products at the sizes that the
kernel multiplies, the softmax's pass, rows packed and transposed, the hand-over of tasks to threads. The sum is what
the case would take if nothing else were done and nothing waited for memory. Counts are the kernels' own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from retro_kernels.core import native

from ..registry import OPERATORS, Case
from . import host

F32, BF16 = 1, 2  # type codes of csrc/view.h
QUERY_BLOCK, KEY_BLOCK, SLICE, BAND_SLICE = 64, 132, 12, 6  # csrc/cpu/chunked_cross_attention_tile.h
KEY_TILE = 24  # csrc/cpu/topk_scan.h
RANGE = 256  # csrc/cpu/row_attention.h
ROUNDS, LEAST_S = 15, 2e-3


class Bound(NamedTuple):
    """Seconds of each part of a case, and the operations of its products."""

    parts: dict[str, float]
    flops: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


class Parts:
    """Measures parts, each once."""

    def __init__(self, threads: int):
        self.threads, self.native = threads, native.extension("_cpu")
        self._known: dict[tuple, float] = {}

    def _once(self, key: tuple, run: Callable[[int], Any]) -> float:
        """Seconds of one of `repeats` that `run` is told to do."""
        if key not in self._known:
            repeats = 1
            while (taken := min(_clock(run, repeats) for _ in range(3))) < LEAST_S:
                repeats = max(repeats * 2, int(repeats * LEAST_S / max(taken, 1e-7)))
            self._known[key] = min(_clock(run, repeats) for _ in range(ROUNDS)) / repeats
        return self._known[key]

    def rate(self, m: int, n: int, k: int, *, by_columns: bool = False, code: int = F32) -> float:
        """Operations a second of products [m,k] by [k,n] on all threads together."""
        key = ("products", m, n, k, by_columns, code)
        one = self._once(key, lambda r: self.native.part_products(code, m, n, k, by_columns, r, self.threads))
        return 2.0 * m * n * k * self.threads / one

    def softmax(self, elements: float) -> float:
        size = KEY_BLOCK * QUERY_BLOCK
        one = self._once(("softmax",), lambda r: self.native.part_softmax(size, r, self.threads))
        return elements * one / (size * self.threads)

    def packing(self, elements: float, code: int = F32) -> float:
        one = self._once(("packing", code), lambda r: self.native.part_packing(code, 64, 64, r, self.threads))
        return elements * one / (64 * 64 * self.threads)

    def reading(self, size: int) -> float:
        """Bytes a second of reading `size` bytes again and again."""
        x = torch.ones(max(size // 4096, self.threads), 1024)
        view = native.view(x)

        def run(repeats: int) -> None:
            for _ in range(repeats):
                self.native.part_reading(view, self.threads)

        return x.nbytes / max(self._once(("reading", len(x)), run) - self.handover(), 1e-7)

    def handover(self, tasks: int | None = None) -> float:
        """Of tasks to threads that are awake, one for each by default; and of the call into C++."""
        tasks = self.threads if tasks is None else tasks

        def run(repeats: int) -> None:
            for _ in range(repeats):
                self.native.part_handover(tasks, self.threads)

        return self._once(("handover", tasks), run)

    def host(self, op: str) -> float:
        """Time the host's part of a decoding call: the smallest one's, whose kernel computes next to nothing."""
        if ("host", op) not in self._known:
            self._known["host", op] = host.measure(("cpu",), (op,))[f"{op}/cpu/decode/fwd"]
        return self._known["host", op]


def _clock(run: Callable[[int], Any], repeats: int) -> float:
    begun = time.perf_counter()
    run(repeats)
    return time.perf_counter() - begun


def bound(parts: Parts, case: Case, dtype: str, mode: str, arguments: dict[str, Any]) -> Bound:
    """Add up the parts of a case. Raises KeyError for an op whose parts are not known."""
    made = {"chunked_cross_attention": _cross_attention, "relative_attention": _one_row, "topk_chunks": _topk}[
        case.kernel
    ]
    return made(parts, case, BF16 if dtype == "bfloat16" else F32, mode, arguments)


def _cross_attention(parts: Parts, case: Case, code: int, mode: str, arguments: dict[str, Any]) -> Bound:
    s = case.shape
    if mode == "decode" and s["N"] <= 2:
        return _decoding(parts, case, code)
    start, d, width = case.options.get("query_start", 0), s["D"], s.get("E", s["D"])
    rows = s["B"] * s["H"] * (s["N"] - max(min(s["M"] - 1 - start, s["N"]), 0))
    block = min(s["M"], s["N"], QUERY_BLOCK)
    mask = arguments.get("neighbour_mask")
    keys = s["K"] * s["R"] * (1.0 if mask is None else float(mask.float().mean()))  # masked ones are left out
    scores = parts.rate(min(KEY_BLOCK, s["K"] * s["R"]), block, d, code=code)
    values = parts.rate(block, d, KEY_BLOCK, by_columns=True, code=code)
    product = 2.0 * rows * keys * d
    backward = mode == "fwdbwd"
    # forward: scores, values. Backward: scores again, dP, dK and dV, whose depth is the block of queries; dQ's is keys
    seconds = {"products": product * ((1 + 4 * backward) / scores + (1 + backward) / values)}
    flops, packed = product * (2 + 5 * backward), rows * d * (1 + 3 * backward)
    if "rel_key" in case.extras:
        columns, fewer = s["R"] + SLICE - 1, s["R"] + BAND_SLICE - 1  # of the band, which a slice of rows meets
        logits, grads = (1 + backward) * columns, 2 * backward * fewer
        seconds["band"] = 2.0 * rows * (logits + grads) * width / parts.rate(SLICE, columns, width, code=code)
        flops += 2.0 * rows * s["R"] * width * (1 + 3 * backward)
        packed += rows * (width + s["R"]) * (1 + backward)  # queries with their bias, the band un-skewed
    seconds["softmax"] = parts.softmax(rows * keys * (1 + backward))
    seconds["packing"] = parts.packing(packed, code)
    seconds["hand-over"] = parts.handover() * (1 + backward)
    return Bound(seconds, flops)


def _decoding(parts: Parts, case: Case, code: int) -> Bound:
    """Each key, value and relative key of one chunk is read once, by whichever thread has its range."""
    s, size = case.shape, 2 if code == BF16 else 4
    read = (2 * s["K"] * s["R"] * s["H"] * s["D"] + s["H"] * s["R"] * s.get("E", s["D"])) * size * s["B"]
    rows = s["B"] * s["N"]
    return Bound(
        {
            "reading": read / parts.reading(read),
            "hand-over": parts.handover(max(parts.threads, s["K"] * s["R"] // 64)) + parts.handover(rows),
            "host": parts.host(case.kernel),
        },
        4.0 * rows * s["K"] * s["R"] * s["H"] * s["D"],
    )


def _one_row(parts: Parts, case: Case, code: int, mode: str, arguments: dict[str, Any]) -> Bound:
    """Every key, value and relative key is read once, whatever is done with them."""
    if mode != "decode":
        raise KeyError(mode)
    work = OPERATORS[case.kernel].work(case, 2 if code == BF16 else 4, mode)
    rows, ranges = case.shape["B"] * case.shape["N"], math.ceil(case.shape["S"] / RANGE)
    return Bound(
        {
            "reading": work.bytes / parts.reading(int(work.bytes)),
            "hand-over": parts.handover(ranges * rows) + parts.handover(rows),
            "host": parts.host(case.kernel),
        },
        work.flops,
    )


def _topk(parts: Parts, case: Case, code: int, mode: str, arguments: dict[str, Any]) -> Bound:
    s, options = case.shape, case.options
    gap, offset = options.get("causal_gap"), options.get("query_offset", 0)
    pairs = s["Q"] * s["S"] if gap is None else sum(min(max(i + offset - gap + 1, 0), s["S"]) for i in range(s["Q"]))
    flops = 2.0 * s["B"] * pairs * s["D"]
    rate = parts.rate(KEY_TILE, 64 if s["Q"] >= 64 else 16 * math.ceil(s["Q"] / 16), min(s["D"], 512), code=code)
    packed = s["B"] * s["Q"] * s["D"]
    seconds = {"products": flops / rate, "packing": parts.packing(packed, code), "hand-over": parts.handover()}
    return Bound(seconds, flops)
