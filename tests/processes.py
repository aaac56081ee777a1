"""Two gloo processes on this machine, for what must equal one process."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def two(worker: Callable, *args, timeout: float = 240):
    """What `worker(rank, *args)` returns on rank 0; both must end well. `worker` is a function of a module, its result picklable."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.Queue()
    workers = [context.Process(target=_process, args=(worker, rank, port, queue, args)) for rank in range(2)]
    for w in workers:
        w.start()
    got = queue.get(timeout=timeout)
    for w in workers:
        w.join(60)
        assert w.exitcode == 0
    return got


def _process(worker: Callable, rank: int, port: int, queue, args: tuple) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        result = worker(rank, *args)
        if rank == 0:
            queue.put(result)
        dist.barrier()
    finally:
        dist.destroy_process_group()
