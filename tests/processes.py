"""Groups of processes on this machine, to compare with one process: gloo, or nccl with a GPU for each."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from queue import Empty

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

#: imported once by the process from which the others are forked: a fresh one takes seconds to
PRELOADED = ["torch.distributed.fsdp", "torch.distributed.checkpoint", "torch._dynamo", "retro_model.parallel"]
PRELOADED += ["retro_model.training.checkpoint", "retro_model.rpt", "tests.conftest"]


def two(worker: Callable, *args, timeout: float = 240):
    """Run `several` with two processes, on CPUs."""
    return several(2, worker, *args, timeout=timeout, backend="gloo")


def device(rank: int) -> str:
    """Return the device of a worker."""
    return f"cuda:{rank}" if dist.get_backend() == "nccl" else "cpu"


def several(count: int, worker: Callable, *args, timeout: float = 240, backend: str | None = None):
    """Return the result of `worker(rank, *args)` on rank 0; all must succeed.

    worker: a function of a module, with a picklable result. backend: None: nccl if each process has a GPU, else gloo.
    """
    backend = backend or ("nccl" if torch.cuda.device_count() >= count else "gloo")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    queue = context.Queue()
    workers = [
        context.Process(target=_process, args=(worker, rank, count, backend, port, queue, args))
        for rank in range(count)
    ]
    for w in workers:
        w.start()
    got = _first(queue, workers, timeout)
    for w in workers:
        w.join(60)
        assert w.exitcode == 0
    return got


def _process(worker: Callable, rank: int, count: int, backend: str, port: int, queue, args: tuple) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, rank=rank, world_size=count)
    try:
        result = worker(rank, *args)
        if rank == 0:
            queue.put(result)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _first(queue, workers: list, timeout: float):
    """Return the first item of the queue, without waiting for a failed worker or for workers that wait for it."""
    until = time.monotonic() + timeout
    while True:
        try:
            return queue.get(timeout=0.5)
        except Empty:
            if time.monotonic() > until or any(w.exitcode for w in workers):
                for w in workers:
                    w.kill()
                raise
