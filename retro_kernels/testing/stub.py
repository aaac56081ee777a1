"""Stub of a GPU, to measure host time: Triton compiles for it, and its launches do nothing."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterator
from unittest import mock

_NUMBERS = itertools.count(1000)


@contextlib.contextmanager
def device(arch: int | str = 90, heard: Callable[[tuple], None] | None = None) -> Iterator[None]:
    """Inside, the `triton` backend serves CPU tensors as if they were on a GPU of `arch`. Outputs are not filled.

    heard: called with the arguments of Triton's launcher for every launch: grid, stream, function, metadata, hooks, and
    the kernel's own.
    """
    from retro_kernels import triton_lib as backend
    from retro_kernels.compile import target, triton_private
    from retro_kernels.core import dispatch, layouts

    known = target.KNOWN[arch]

    class Utilities:
        def load_binary(self, name, kernel, shared, device):
            function = f"{name} {hashlib.sha256(kernel).hexdigest()[:8]}"  # specialisations of a kernel differ
            return name, function, 0, 0, 1024  # module, function, registers, spills, threads a block may have

        def get_device_properties(self, device):
            return {"max_shared_mem": known.shared_memory, "multiprocessor_count": known.multiprocessors}

    class Launcher:
        def __init__(self, src, metadata):
            pass

        def __call__(self, *arguments):
            if heard is not None:
                heard(arguments)

    class Driver:
        utils, launcher_cls = Utilities(), Launcher

        def get_current_device(self):
            return number

        def get_current_stream(self, device):
            return 0

        def get_current_target(self):
            return triton_private.gpu(known)

    number = next(_NUMBERS)  # Triton caches compiled kernels and their launchers by the device's number
    status = dispatch._status

    def serves(op: str, name: str) -> dispatch.BackendStatus:
        there = name == "triton" and dispatch.exists(op, name)
        return dispatch.BackendStatus(True) if there else status(op, name)

    patches = (
        mock.patch.object(triton_private.driver(), "_active", Driver()),
        mock.patch.object(backend, "device_type", lambda: "cpu"),
        mock.patch.object(backend, "unavailable", lambda: None),
        mock.patch.object(dispatch, "_status", serves),
        mock.patch.object(target, "INTERPRETED", known),
    )
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        for forget in (layouts.forget, dispatch._available.cache_clear):
            forget()
            stack.callback(forget)
        yield
