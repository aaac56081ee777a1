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
    """Make glibc's malloc keep the memory that this process frees; return whether it does.

    By default malloc maps and unmaps each large tensor: a step on a CPU then takes a page fault for every 4 KiB that it
    writes. With this the process stays as large as its largest step. `train(keep_memory=True)` calls it for models on a
    CPU. It does nothing if one of malloc's variables is set in the environment.
    """
    if any(name in os.environ for name in CHOSEN):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return all([mallopt(TRIM, LARGEST), mallopt(MAP, LARGEST), mallopt(PAD, PAD_BYTES)])
