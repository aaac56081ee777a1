"""Every private name of torch and Triton that calls go through, and a public way round for versions that lack it.

Tried with torch 2.11 to 2.13, triton 3.6 to 3.9.
"""

from __future__ import annotations

import functools

import torch

#: device type -> what torch's own compiler allocates with, (shape, strides, dtype) -> tensor: half torch.empty's time
EMPTY = {
    device: getattr(
        torch._C._dynamo.guards,
        f"_empty_strided_{device}",
        lambda shape, strides, dtype, device=device: torch.empty_strided(shape, strides, dtype=dtype, device=device),
    )
    for device in ("cpu", "cuda")
}
#: how many tensors use a storage, by its address; None: unknown
storage_users = getattr(torch._C, "_storage_Use_Count", None)

#: first and last version whose compiled kernels are called as `Launched.run` is (read in their sources, and compared by
#: a test)
KNOWN_TRITON = ((3, 6), (3, 9))


@functools.cache
def _triton():
    """(driver, runtime knobs) of a Triton whose launcher is known; None of any other."""
    import triton
    from triton.runtime import driver

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return (driver, triton.knobs.runtime) if KNOWN_TRITON[0] <= version <= KNOWN_TRITON[1] else None


def stream():
    """The current stream of the current GPU; NotImplemented where launches must go through Triton: a profiler listens,
    or this Triton's launcher is unknown."""
    found = _triton()
    if found is None:
        return NotImplemented
    driver, knobs = found
    for hook in (knobs.launch_enter_hook, knobs.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return NotImplemented
    return driver.active.get_current_stream(driver.active.get_current_device())


class Launched:
    """A launch whose arguments come in the kernel's order. `run` is None until Triton has compiled it, and stays so
    under its interpreter; then it is called as Triton's own binder would call it, at a tenth of the time.
    """

    def __init__(self, launch):
        self.launch, self.run, self.between = launch, None, None
        self.grid = tuple((*launch.grid, 1, 1)[:3])

    def by_triton(self, arguments: list) -> None:
        """Through Triton's public interface: it compiles, and calls who listens."""
        compiled = self.launch.with_arguments(arguments).run()
        if hasattr(compiled, "packed_metadata") and not self.launch.kernel.pre_run_hooks:
            # the kernel lives as long as the object that Triton returned
            self.compiled, self.run = compiled, compiled.run
            self.between = (compiled.function, compiled.packed_metadata, None, None, None)


def specialised(kernel) -> frozenset[str]:
    """Parameters of a Triton kernel whose value is compiled in where it is 1 or a multiple of 16."""
    return frozenset(p.name for p in getattr(kernel, "params", ()) if not p.do_not_specialize)
