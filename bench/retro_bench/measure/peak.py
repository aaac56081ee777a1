"""Peak memory and launches of one call, observed outside the timed samples."""

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def observe(call: Callable[[], Any], device: str) -> tuple[dict[str, Any] | None, int | None]:
    """Return ({"peak_extra_bytes"}, launches). On CPUs launches are None, and only torch's allocations count."""
    try:
        return _cuda(call) if device == "cuda" else _cpu(call)
    except RuntimeError:  # the profiler is missing or busy: unknown, not an error of the kernel
        return None, None


def _cuda(call: Callable[[], Any]) -> tuple[dict[str, Any], int]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        call()
        torch.cuda.synchronize()
    events = [e.name for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return {"peak_extra_bytes": peak}, sum(not name.startswith(("Memcpy", "Memset")) for name in events)


def _cpu(call: Callable[[], Any]) -> tuple[dict[str, Any], None]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        result = call()
    del result
    running = peak = 0
    for event in trace.profiler.kineto_results.events():
        if event.name() == "[memory]":
            running += event.nbytes()
            peak = max(peak, running)
    return {"peak_extra_bytes": peak}, None
