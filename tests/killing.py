"""Kill a function at every one of its system calls, to test every state that a dead process can leave on disk.

Linux only, by ptrace. The function runs in a forked child; the parent counts the child's system calls and sends SIGKILL
in place of the n-th, for every n until the child ends by itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

#: variables of a process that may fork
ONE_THREAD = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
TRACE_ME, SYSCALL, SET_OPTIONS, GOOD = 0, 24, 0x4200, 1  # PTRACE_..., PTRACE_O_TRACESYSGOOD


def allowed() -> bool:
    """Whether this system lets a process trace its child."""
    return sys.platform == "linux" and killed_at(1, lambda: os.getcwd()) is not None


def killed_at(n: int, function: Callable[[], object], before: Callable[[], object] | None = None) -> bool | None:
    """Run function in a child and kill it before its n-th system call.

    before: run first by the child, untraced and uncounted. Returns: True if it was killed, False if it had ended, None
    if tracing is not allowed.
    """
    calls = _traced(n, function, before)
    return None if calls is None else calls == n


def calls_of(function: Callable[[], object], before: Callable[[], object] | None = None) -> int:
    """Return the number of system calls of a function that runs to its end in a child."""
    calls = _traced(sys.maxsize, function, before)
    assert calls is not None, "not allowed"
    return calls


def _traced(n: int, function: Callable[[], object], before: Callable[[], object] | None) -> int | None:
    """Return n if the child was killed before that call, the number of calls if it ended before, None if not
    allowed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if before is not None:
                before()
            if libc.ptrace(TRACE_ME, 0, None, None) == 0:
                os.kill(os.getpid(), signal.SIGSTOP)
                function()
                code = 0
            else:
                code = 99
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status):
        return None
    libc.ptrace(SET_OPTIONS, child, None, GOOD)
    stops, deliver = 0, 0
    while True:
        libc.ptrace(SYSCALL, child, None, deliver)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0, f"the child failed: {status}"
            return stops // 2
        deliver = os.WSTOPSIG(status) if os.WSTOPSIG(status) != signal.SIGTRAP | 0x80 else 0
        stops += not deliver  # two stops a call: on entry and on return
        if stops == 2 * n - 1:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return n


def at_every_call(prepare: Callable[[], object], function: Callable[[], object], check: Callable[[int], object]) -> int:
    """Run prepare, function killed at its n-th call, check(n) for n = 1, 2, ... until it is not killed. Returns the
    last n.
    """
    n = 1
    while True:
        prepare()
        killed = killed_at(n, function)
        check(n)
        if not killed:
            return n - 1
        n += 1


def fast_folder(tmp_path: Path) -> Path:
    """Return a folder's name, in a memory file system if there is one: hundreds of fsync take seconds on a disk."""
    memory = Path("/dev/shm")
    return (memory if os.access(memory, os.W_OK) else tmp_path) / f"retro-kernels-{os.getpid()}"
