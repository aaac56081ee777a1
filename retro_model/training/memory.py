"""Tell malloc to keep freed memory: the next training step allocates the same buffers."""

from __future__ import annotations

import ctypes
import functools
import os

#: of malloc.h: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_TOP_PAD
TRIM, MAP, PAD = -1, -3, -2
LARGEST, PAD_BYTES = 2**31 - 1, 64 << 20
CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


@functools.cache
def keep_memory() -> bool:
    """Have glibc's malloc keep what this process frees instead of giving it back; True where it does.

    By default it maps each large tensor anew and unmaps it, so that a step on a CPU takes a page fault for every 4 KiB
    it writes. The process keeps the size of its largest step. `train(keep_memory=True)` calls this for models on a
    CPU. Nothing changes where one of malloc's variables is set in the environment.
    """
    if any(name in os.environ for name in CHOSEN):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return all([mallopt(TRIM, LARGEST), mallopt(MAP, LARGEST), mallopt(PAD, PAD_BYTES)])
