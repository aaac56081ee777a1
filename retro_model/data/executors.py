"""Run one task a shard in this process, in a pool of processes, or on any executor.

An executor is any `concurrent.futures.Executor`: a ProcessPoolExecutor (`pool`), Dask's
`Client(...).get_executor()`, mpi4py's MPIPoolExecutor. A task is a module-level function whose arguments can be
pickled. Stores and databases are pickled as the names of their folders, so workers need the same file system. A task
may run twice: the second run finds the shard finished.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, as_completed

from retro_model.base import disk

TRIES = 4  # attempts at a task that failed because its worker died or another process held its shard
PASSING = ("KilledWorker", "FutureCancelledError")  # Dask's errors of a task whose worker died


def pool(workers: int, *, devices: int = 0) -> ProcessPoolExecutor:
    """Return an executor of processes on this machine, one thread each.

    devices: number of GPUs, of which each worker in turn sees one, as "cuda". 0: workers see this process's devices.
    """
    context = multiprocessing.get_context("spawn")
    turns = context.Queue() if devices else None
    if turns is not None:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(devices)))
        for _, device in zip(range(workers), itertools.cycle(seen.split(",")[:devices])):
            turns.put(device)
    return ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(turns,))


def _start(turns) -> None:
    if turns is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = turns.get()

    import torch

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


def each(task: Callable, arguments: Iterable[tuple], executor: Executor | None = None) -> list:
    """Return task(*a) for each a, in order. executor None: in this process, one after the other.

    Raises:
        The exception of a task, after the running ones; RuntimeError if the executor broke. Finished shards are kept.
    """
    calls = list(arguments)
    if executor is None:
        return [task(*a) for a in calls]
    results: list = [None] * len(calls)
    tries = dict.fromkeys(range(len(calls)), 0)
    while tries:
        futures: dict[Future, int] = {}
        try:
            futures = {executor.submit(task, *calls[number]): number for number in tries}
            for future in as_completed(futures):
                number = futures[future]
                tries[number] += 1
                try:
                    results[number] = future.result()
                    del tries[number]
                except BrokenExecutor:
                    raise
                except Exception as error:  # another try helps where a worker was killed or still holds the shard
                    passing = isinstance(error, disk.Busy) or type(error).__name__ in PASSING
                    if not passing or tries[number] >= TRIES:
                        raise
        except BrokenExecutor as error:
            advice = "run the same call again: finished shards are kept"
            raise RuntimeError(f"a process of the pool died ({error}); {advice}") from error
        finally:
            for future in futures:
                future.cancel()
    return results
