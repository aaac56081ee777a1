"""Timing by raw samples. Contenders take turns, so that drift of the machine affects all of them.

CPU: wall clock, with inputs warm as in a training step. Every sample is kept. The minimum is the estimate, because it
repeats best. If the first call takes long, then it is the only sample. GPU: device events. Before each sample other
memory is read through the L2 cache, and a delay kernel lets the host run ahead. The host's time to launch the call is
recorded too. Sampling ends early if samples agree. The inputs of a `Trial` are rewritten before each call.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch

from .samples import Effort, summary
from .trial import Trial

WARMUPS = 2
LONG_CALL_S = 0.2  # a call this long needs no second warm-up
LEAST_SAMPLE_S = 200e-6  # shorter calls are repeated inside one sample, so that the clock's own cost is below 1%
SLEEP_CYCLES_PER_S = 2.0e9  # a GPU's highest clock: a lower one only lengthens the delay
L2_MULTIPLE = 2  # bytes read to evict, in units of the L2
NARROW = 0.01  # samples agree within this share of their estimate
NARROW_SAMPLES = {"cpu": 5, "cuda": 10}  # number of agreeing samples that is enough


def measure(
    calls: dict[str, Callable[[], Any]], device: str, effort: Effort, graphs: bool = False
) -> dict[str, dict[str, Any] | Exception]:
    """Return the `time` record of every call, or of its replay as a CUDA graph, or the exception that it raised."""
    return dict(outcomes(calls, device, effort, graphs))


def one(call: Callable[[], Any], device: str, effort: Effort) -> dict[str, Any]:
    """Return the `time` record of a call. An exception of the call is raised."""
    found = measure({"": call}, device, effort)[""]
    if isinstance(found, Exception):
        raise found
    return found


def outcomes(
    calls: dict[str, Callable[[], Any]], device: str, effort: Effort, graphs: bool = False
) -> Iterator[tuple[str, dict[str, Any] | Exception]]:
    """Yield the name of a call, and its `time` record or the exception that it raised, as soon as the call ends."""
    sampler: _CudaSampler | _CpuSampler = _CudaSampler(graphs) if device == "cuda" else _CpuSampler()
    spent, samples = dict.fromkeys(calls, 0.0), {name: [] for name in calls}
    threads = torch.get_num_threads()

    def ended(name: str) -> tuple[str, dict[str, Any] | Exception]:
        try:
            if isinstance(call := calls[name], Trial) and call.contender.role != "baseline":
                call.finish()
        except Exception as e:
            return name, e
        finally:
            restore_threads(threads)
        return name, summary(samples[name], sampler.method(name)) | sampler.more(name)

    pending = []
    for name, call in calls.items():
        try:
            first = sampler.prepare(name, call)
            restore_threads(threads)
        except Exception as e:  # out of memory or a launch that fails: the run goes on
            yield name, e
            continue
        if first >= effort.once_s:
            samples[name].append(first)
            yield ended(name)
        else:
            pending.append(name)
    while pending:
        for name in list(pending):
            begun = time.perf_counter()
            try:
                samples[name].append(sampler.sample(name))
            except Exception as e:
                pending.remove(name)
                yield name, e
                continue
            spent[name] += time.perf_counter() - begun
            restore_threads(threads)
            count = len(samples[name])
            least = effort.least if spent[name] < effort.slow_s * count else 1
            agree = count >= NARROW_SAMPLES[device] and sampler.narrow(samples[name])
            if count >= effort.most or (count >= least and (agree or spent[name] >= effort.seconds)):
                pending.remove(name)
                yield ended(name)


def restore_threads(threads: int) -> None:
    """Undo a contender's change of torch's number of threads, which would slow the other contenders down."""
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def seconds(call: Callable[[], Any]) -> float:
    """Return the seconds of one call on a CPU."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def rewritten(trial: Trial, repeats: int) -> float:
    """Return the mean seconds of calls on a CPU, each with other values. Neither writes nor releases are timed.

    One more call at a random place, whose time does not count, has known values, and its result is compared.
    """
    total, compared = 0.0, random.randrange(repeats + 1) if trial.affords() else None
    for number in range(repeats + (compared is not None)):
        known, result = number == compared, None
        trial.before(known)
        begun = time.perf_counter()
        result = trial.call()
        taken = time.perf_counter() - begun
        trial.timed += taken
        if known:
            trial.after(result)
        else:
            total += taken
    return total / repeats


class _CpuSampler:
    def __init__(self):
        self.calls: dict[str, Callable[[], Any]] = {}
        self.repeats: dict[str, int] = {}

    def prepare(self, name: str, call: Callable[[], Any]) -> float:
        """Warm the call up, and return the seconds of its first call."""
        self.calls[name] = call
        first = took = call.first() if isinstance(call, Trial) else seconds(call)
        for _ in range(WARMUPS - 1):
            if took <= LONG_CALL_S:
                took = rewritten(call, 1) if isinstance(call, Trial) else seconds(call)
        self.repeats[name] = max(int(LEAST_SAMPLE_S / max(took, 1e-7)), 1)
        return first

    def sample(self, name: str) -> float:
        call, repeats = self.calls[name], self.repeats[name]
        if isinstance(call, Trial):
            return rewritten(call, repeats)
        begun = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - begun) / repeats

    def narrow(self, samples: list[float]) -> bool:
        """Whether the three lowest samples agree. Other work only adds to a sample."""
        lowest = sorted(samples)[:3]
        return lowest[-1] <= (1 + NARROW) * lowest[0]

    def more(self, name: str) -> dict[str, Any]:
        return {}

    def method(self, name: str) -> dict[str, Any]:
        how = {"clock": "wall", "cache": "warm", "threads": torch.get_num_threads()}
        return how | {"repeats": self.repeats.get(name, 1)}


class _CudaSampler:
    """Times one call by device events, after a cache flush and a delay that hides the host's time for the launch."""

    def __init__(self, graphs: bool):
        self.graphs = graphs
        self.calls: dict[str, Callable[[], Any]] = {}
        cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self.flush = torch.zeros(L2_MULTIPLE * cache // 4, dtype=torch.int32, device="cuda")
        self.cycles: dict[str, int] = {}
        self.host: dict[str, list[float]] = {}

    def prepare(self, name: str, call: Callable[[], Any]) -> float:
        """Warm the call up. Return 0, because the host's time of a call is not a sample."""
        trial = call if isinstance(call, Trial) else None
        if self.graphs and trial:
            trial.call, trial.static = captured(trial.call), True
        elif self.graphs:
            call = captured(call)
        self.calls[name] = call
        for _ in range(WARMUPS):
            if trial:
                trial.first()
            torch.cuda.synchronize()
            begun = time.perf_counter()
            call()
            launched = time.perf_counter() - begun
        torch.cuda.synchronize()
        self.cycles[name] = int(min(2 * launched + 50e-6, 0.05) * SLEEP_CYCLES_PER_S)
        return 0.0

    def sample(self, name: str) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        trial = self.calls[name] if isinstance(self.calls[name], Trial) else None
        if trial:
            if trial.affords():
                trial.first()
            trial.before(False)
        self.flush.max()  # reading leaves no dirty lines, which the call would have to write back
        torch.cuda._sleep(self.cycles[name])
        begin.record()
        begun = time.perf_counter()
        self.calls[name]()
        self.host.setdefault(name, []).append(time.perf_counter() - begun)
        end.record()
        end.synchronize()
        taken = begin.elapsed_time(end) * 1e-3
        if trial:
            trial.timed += taken
        return taken

    def narrow(self, samples: list[float]) -> bool:
        """Whether the 10th and the 90th percentile agree."""
        low, middle, high = numpy.quantile(samples, (0.1, 0.5, 0.9))
        return bool(high - low <= NARROW * middle)

    def more(self, name: str) -> dict[str, Any]:
        """Return host_s: the host's time until the call returns. No sample contains it: the host runs ahead."""
        return {"host_s": statistics.median(self.host[name])}

    def method(self, name: str) -> dict[str, Any]:
        how = {"clock": "device events", "cache": "cold L2", "threads": torch.get_num_threads()}
        return how | {"repeats": 1, "cuda_graph": self.graphs}


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return the replay of the call as a CUDA graph. It returns the call's result, which stays in one place."""
    side = torch.cuda.Stream()  # capturing requires a warm-up on another stream
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUPS):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()

    def replay():
        graph.replay()
        return result

    return replay
