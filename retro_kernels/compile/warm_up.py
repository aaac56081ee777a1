"""Compile kernels in parallel before a first step. Triton itself compiles each kernel at its first launch."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from . import shipped, triton_private

_WORK = f"from {__name__} import compile_share; compile_share()"


def warm_up(*calls: Callable[[], object], jobs: int | None = None, cache: str | os.PathLike | None = None) -> int:
    """Compile the Triton kernels that `calls` launch, in parallel processes, into Triton's cache on disk.

    Each call is made once without its launches: outputs and gradients of the Triton backend are zeros, everything else
    runs. So give calls without lasting effects, such as a forward and backward pass without the optimizer, on tensors
    of the shapes and types to come:

        rk.warm_up(lambda: torch.autograd.grad(loss(model(tokens), targets), list(model.parameters())))

        # compiled on another machine: python -m retro_kernels.compile.aot --arch 90 --cache kernels
        rk.warm_up(cache="kernels")

    Args:
        calls: functions of no arguments.
        jobs: number of processes; default: one for each core.
        cache: folder of compiled kernels, made with the same versions of triton, Python and this package, that is
            copied into this machine's cache first. The GPU will run its code: take only folders that you trust. Shared
            libraries, links and files of other names are not copied.

    Returns:
        Number of distinct kernels of the calls that were compiled or found in the cache, 0 where Triton serves no call;
        without calls, number of kernels in `cache`.

    Raises:
        TypeError: a call is not callable. ValueError: `cache` is not such a folder, or was made with other versions.
            RuntimeError: a kernel does not compile; the message ends with the compiler's last line.
    """
    for call in calls:
        if not callable(call):
            raise TypeError(f"calls: expected functions of no arguments; got {type(call).__name__}")
    if jobs is not None and (not isinstance(jobs, int) or jobs < 1):
        raise ValueError(f"jobs: expected None or an int >= 1; got {jobs!r}")
    held = 0 if cache is None else shipped.take_over(cache)
    if not calls:
        return held
    wanted = _collected(calls)
    shares = [wanted[i::count] for count in [min(jobs or os.cpu_count() or 1, len(wanted))] for i in range(count)]
    root = str(Path(__file__).resolve().parents[2])  # a worker imports this copy of the package
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}

    def work(share: list[tuple]) -> str | None:
        """Compile a share in a process of its own, and return why that failed."""
        command, given = [sys.executable, "-c", _WORK], pickle.dumps(share)
        done = subprocess.run(command, input=given, stderr=subprocess.PIPE, env=environment)
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        return lines[-1] if done.returncode else None

    with ThreadPoolExecutor(max(len(shares), 1)) as pool:
        failed = [words for words in pool.map(work, shares) if words]
    if failed:
        raise RuntimeError(f"a kernel does not compile: {failed[0]}")
    return len(wanted)


def _collected(calls: Iterable[Callable[[], object]]) -> list[tuple]:
    """Return each distinct kernel once, as (module, name, arguments, options, target)."""
    from .. import triton_lib as backend

    if backend.unavailable() or backend.interpreted():
        return []
    from ..triton_lib.launch import launches_to
    from . import aot, target

    distinct: dict[tuple, tuple] = {}

    def note(launch) -> None:
        given = next(x for x in launch.arguments.values() if isinstance(x, torch.Tensor))
        gpu = target.current_target(given.device)
        arguments = {k: _Stand(v) if isinstance(v, torch.Tensor) else v for k, v in launch.arguments.items()}
        named = launch.kernel.__module__, launch.kernel.__name__
        options = launch.num_warps, launch.num_stages, launch.max_registers
        distinct.setdefault(aot._key(aot.CompileCase("", "", launch), gpu), (*named, arguments, options, gpu))

    with launches_to(note, zeros=True):
        for call in calls:
            call()
    return list(distinct.values())


class _Stand:
    """Stand-in for a tensor, with what Triton reads: type, alignment to 16 bytes and, for AMD, size of the storage."""

    def __init__(self, tensor: torch.Tensor):
        self.dtype, self.address = tensor.dtype, tensor.data_ptr() % 16
        self.size = tensor.untyped_storage().size()

    def data_ptr(self) -> int:
        return self.address

    def ptr_range(self) -> int:
        return self.size


def compile_share() -> None:
    """Compile the kernels that are listed on stdin."""
    import importlib

    from ..triton_lib.launch import Launch

    failed = None
    for module, name, arguments, options, target in pickle.load(sys.stdin.buffer):
        launch = Launch(getattr(importlib.import_module(module), name), (1,), arguments, *options)
        try:
            triton_private.compiled(launch, target)
        except Exception as error:  # the others are compiled nevertheless
            failed = f"{name}: {error}"
    if failed:
        sys.exit(failed)
