"""The processes of a training. Without a process group there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def rank() -> int:
    """Return the number of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


def count() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def gathered(mine: Any) -> list:
    """Return the object of every process, in order. Every process must call."""
    if not dist.is_initialized():
        return [mine]
    every: list = [None] * count()
    dist.all_gather_object(every, mine)
    return every


def first(call: Callable, *arguments) -> Any:
    """Return call(*arguments) of the first process in every process. Its exception is raised in all: none waits."""
    if not dist.is_initialized():
        return call(*arguments)
    outcome: list = [None, None]
    if rank() == 0:
        try:
            outcome[0] = call(*arguments)
        except Exception as raised:
            outcome[1] = raised
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
