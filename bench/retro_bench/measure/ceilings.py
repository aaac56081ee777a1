"""Measured ceilings of this machine: copy bandwidth and the best matrix product in each type.

No program reaches the rates of a datasheet, and a rented machine may be slower still.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F

from ..records import environment
from ..registry import Work
from . import timing
from .samples import Effort

COPY_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}  # beyond any last-level cache
CACHED_COPY_BYTES = 2 << 20  # source and target stay in the last-level cache
#: (m, n, k): square, and shapes with long rows, on which libraries differ
GEMMS = {
    "cpu": ((1024, 1024, 1024), (2048, 1024, 512)),
    "cuda": ((4096, 4096, 4096), (8192, 8192, 8192), (16384, 8192, 4096)),
}
#: a call of 0.5 s is not repeated: torch's bfloat16 takes seconds on some processors
EFFORT = Effort(least=20, most=2000, seconds=0.2, slow_s=0.1, once_s=0.5)


def measure(device: str) -> dict[str, Any]:
    """Return {"bytes_per_s", "cached_bytes_per_s", "cache_bytes", "flops_per_s": {type: rate}}.

    A rate that can't be measured is None. GPUs have no cached rate, because they are timed with a cold L2.
    """
    types = ("float32", "bfloat16") if device == "cpu" else ("float32", "tf32", "float16", "bfloat16")
    cache = max((environment.caches() or {}).values(), default=None) if device == "cpu" else None
    cached = _copy(device, CACHED_COPY_BYTES) if cache else None
    measured = {"bytes_per_s": _copy(device, COPY_BYTES[device]), "cached_bytes_per_s": cached, "cache_bytes": cache}
    return measured | {"flops_per_s": {dtype: products(device, dtype) for dtype in types}}


def better(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Return the higher of two measurements, rate by rate. Other work on the machine only lowers a rate."""

    def higher(a: dict[str, Any], b: dict[str, Any], names: Iterable[str]) -> dict[str, float | None]:
        return {name: max((rates[name] for rates in (a, b) if rates.get(name)), default=None) for name in names}

    flops = higher(a["flops_per_s"], b["flops_per_s"], b["flops_per_s"])
    return b | higher(a, b, ("bytes_per_s", "cached_bytes_per_s")) | {"flops_per_s": flops}


def _copy(device: str, size: int) -> float:
    """Return bytes read and written per second: the higher of a copy and of reading alone."""
    elements = size // 4
    source = torch.ones(elements, dtype=torch.float32, device=device)
    target = torch.empty_like(source)  # a copy may also read it
    return 4 * elements * max(2 / _best(lambda: target.copy_(source), device), 1 / _best(source.max, device))


def products(device: str, dtype: str) -> float | None:
    """Return the FLOP/s of the best library product in a type."""
    rates = []
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    try:
        for m, n, k in GEMMS[device]:
            kind = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
            a, b = (torch.randn(*shape, device=device).to(kind) for shape in ((m, k), (n, k)))
            rates += [2.0 * m * n * k / _best(form, device) for form in _formulations(a, b, device)]
    except RuntimeError:
        return None
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    return max(rates)


def _formulations(a, b, device: str):
    """Yield one product in several forms, because libraries take another kernel for each."""
    straight = b.mT.contiguous()
    yield lambda: a @ straight
    yield lambda: F.linear(a, b)
    if device == "cpu" and torch.backends.mkldnn.is_available() and b.dtype == torch.float32:
        packed = b.to_mkldnn()
        yield lambda: F.linear(a.to_mkldnn(), packed).to_dense()


def _best(call, device: str) -> float:
    """Return the least seconds of several calls."""
    return timing.one(call, device, EFFORT)["minimum"]


def rate(ceilings: dict[str, Any], dtype: str) -> float | None:
    """Return the FLOP/s of a type, or None if it was not measured."""
    rates = ceilings["flops_per_s"]
    # a half type has at least the rate of float32: its operands can be widened
    names = (dtype, "float32") if dtype in ("float16", "bfloat16") else (dtype,)
    return max((rates[name] for name in names if rates.get(name)), default=None)


def raised(ceilings: dict[str, Any], work: Work, dtype: str, seconds: float, name: str) -> dict[str, Any]:
    """Return the ceilings, with those that a call exceeds raised to the rate of the call. "raised" holds its name."""
    share = roofline(work, ceilings, dtype, seconds)
    if share is None or share["fraction"] <= 1:
        return ceilings
    over = share["fraction"] * (1 + 1e-9)  # so that rounding leaves no share above 1
    if share["bound"] == "compute":
        new = {"flops_per_s": ceilings["flops_per_s"] | {dtype: rate(ceilings, dtype) * over}}
    else:
        bandwidth = _bandwidth(work, ceilings)
        new = {bandwidth: ceilings[bandwidth] * over}
    higher = ceilings | new | {"raised": list(dict.fromkeys([*ceilings.get("raised", ()), name]))}
    return raised(higher, work, dtype, seconds, name)  # the other ceiling may be exceeded too


def _bandwidth(work: Work, ceilings: dict[str, Any]) -> str:
    """Return the name of the bandwidth that a case meets: the cache's if the case fits there."""
    fits = ceilings.get("cache_bytes") and ceilings.get("cached_bytes_per_s") and work.bytes <= ceilings["cache_bytes"]
    return "cached_bytes_per_s" if fits else "bytes_per_s"


def roofline(work: Work, ceilings: dict[str, Any] | None, dtype: str, seconds: float) -> dict[str, Any] | None:
    """Return the least time max(bytes/bandwidth, FLOPs/rate), which of the two it is, and its fraction of `seconds`.

    The bandwidth is the cache's if the case fits there, for its inputs may be warm. None without ceilings.
    """
    flops = rate(ceilings, dtype) if ceilings else None
    if flops is None:
        return None
    memory, compute = work.bytes / ceilings[_bandwidth(work, ceilings)], work.flops / flops
    floor = max(memory, compute)
    return {"floor_s": floor, "bound": "memory" if memory >= compute else "compute", "fraction": floor / seconds}
