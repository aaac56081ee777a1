"""`gpu`: inside it, every Triton kernel launched on CPU tensors is compiled for an architecture and executed."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy
import torch
import triton
from torch import Tensor
from triton.compiler.errors import CompileTimeAssertionFailure
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources, PTXASError

from . import counters, cuda_is_cpu, machines
from .driver import Driver
from .kernels import Compiled
from .launches import until_ptx
from .memory import BOUNDS, elements, replaced
from .program import Counted

TENSOR_COLUMNS = 512  # of tensor memory, on sm_100
_ONE_CTA = ("num_ctas", 1)  # Triton's default


@dataclasses.dataclass
class Execution:
    """One launch that was executed. It refers to the arguments themselves, so later changes of them show here."""

    name: str
    arch: int
    kernel: Any  # the @triton.jit function
    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    options: dict[str, Any]  # num_warps, num_stages, num_ctas, ...
    configuration: str | None  # the autotuner's, where there is one
    compiled: Compiled = dataclasses.field(repr=False)
    counts: numpy.ndarray | None = dataclasses.field(default=None, repr=False)  # [instructions, 4]
    notes: list[str] = dataclasses.field(default_factory=list)  # findings that are not faults

    @property
    def finished(self) -> bool:
        return self.counts is not None

    def counted(self) -> list[Counted]:
        """Return the counts of every instruction over the whole grid."""
        if self.counts is None:
            raise ValueError(f"{self.name}: the launch did not finish")
        return self.compiled.program.counts(self.counts)

    def counters(self) -> dict[str, Any]:
        """Return the grid's instructions by kind, barriers, and sectors and wavefronts relative to the minimum."""
        return counters.summary(self.counted()) | {"ctas": self.compiled.ctas * math.prod(self.grid)}

    def lines(self) -> list[Counted]:
        """Return the counters by line of source, those that execute most first."""
        return counters.by_line(self.counted())

    def estimate(self, machine: str = "H200"):
        """Estimate the time of this launch on a machine: its `seconds` and its bound.

        Compiles the kernel to machine code and executes some of its CTAs again, on copies of the arguments.
        """
        from .estimate import model

        known = machines.machine(machine)
        if known.arch != self.arch:
            raise ValueError(f"machine: {machine} is sm_{known.arch}; the launch was compiled for sm_{self.arch}")

        def copy(tensor: Tensor) -> Tensor:  # so that executing the launch again does not change the program's tensors
            flat = tensor.detach().as_strided((elements(tensor),), (1,)).clone()
            return flat.as_strided(tensor.shape, tensor.stride(), 0)

        return model.estimate(replaced(self, copy), known)


@dataclasses.dataclass
class Log:
    """Launches inside `gpu`, in order."""

    launches: list[Execution] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def gpu(
    arch: int, *, checks: bool = True, runs: bool = True, cuda: bool = False, bounds: str = "tensor"
) -> Iterator[Log]:
    """Inside, Triton launches are compiled for a GPU and executed on CPU tensors, with every check of the emulator.

    Args:
        arch: 80, 86, 89, 90, 100 or 120.
        checks: report races, uninitialised shared memory and missing waits, not only accesses out of bounds.
        runs: False: launches are compiled and listed, not executed.
        bounds: "tensor": an argument's memory is what its tensor covers; "storage": all of the tensor's storage.
        cuda: the device "cuda" is the CPU, and CPU tensors say that they are on it: `cuda_is_cpu` says how.

    Raises, where a kernel is launched:
        EmulationError: the kernel does something wrong; the line of source. DeviceAssertion: its own assertion failed.
        PtxError: an instruction or a feature that is not emulated, by name.
    """
    device = machines.device(arch)
    if bounds not in BOUNDS:
        raise ValueError(f"bounds: expected one of {', '.join(BOUNDS)}; got {bounds!r}")
    if triton.knobs.runtime.interpret:
        raise ValueError("TRITON_INTERPRET is set: kernels are interpreted in this process, not compiled")
    state = _State(device, checks, runs, bounds, cuda)
    driver = Driver(device, state.launched, "cuda:0" if cuda else "cpu")

    def data_ptr(tensor) -> int:
        storage = tensor.untyped_storage()
        state.known[storage.data_ptr()] = storage
        return torch._C.TensorBase.data_ptr(tensor)

    with contextlib.ExitStack() as stack:
        for patch in (
            mock.patch.object(triton.runtime.driver, "_active", driver),
            mock.patch.object(triton.knobs.runtime, "add_stages_inspection_hook", until_ptx),
            mock.patch.object(Tensor, "data_ptr", data_ptr),
            *state.autotuner_patches(),
            *cuda_is_cpu.answers(device),
        ):
            stack.enter_context(patch)
        if cuda:
            stack.enter_context(cuda_is_cpu.mapped())
        yield state.log


def fits(metadata, device: machines.Machine) -> bool:
    """Say whether a compiled kernel fits a device. Triton raises OutOfResources only once per kernel."""
    return (
        metadata.shared <= device.shared_memory_per_block_optin
        and machines.LANES * metadata.num_warps <= machines.MOST_THREADS
        and (getattr(metadata, "tmem_size", 0) or 0) <= TENSOR_COLUMNS
    )


@dataclasses.dataclass
class _State:
    """State that the patches of one `gpu` share."""

    device: machines.Machine
    checks: bool
    runs: bool
    bounds: str
    cuda: bool
    log: Log = dataclasses.field(default_factory=Log)
    #: memory by its address, for which a program asked: a kernel may find it in memory, as in a list of pointers
    known: weakref.WeakValueDictionary = dataclasses.field(default_factory=weakref.WeakValueDictionary)
    caches: dict[int, dict] = dataclasses.field(default_factory=dict)  # the autotuners' choices: of this device
    tuners: list = dataclasses.field(default_factory=list)  # that are running
    chosen: dict | None = None  # the arguments for which the last choice was made

    def launched(self, source, metadata, compiled: Compiled, grid: tuple[int, int, int], values: Sequence) -> None:
        options = {key: getattr(metadata, key, None) for key in ("num_warps", "num_stages", "num_ctas", "maxnreg")}
        options = {key: value for key, value in options.items() if value is not None and (key, value) != _ONE_CTA}
        configuration = str(self.tuners[-1].best_config) if self.tuners else None
        given = dict(zip(compiled.signature, values, strict=True))
        kernel = getattr(source, "fn", None)
        launch = Execution(metadata.name, self.device.arch, kernel, grid, given, options, configuration, compiled)
        homes = [cuda_is_cpu.home(value) if isinstance(value, Tensor) else None for value in values]
        if self.cuda and {"cpu"} < {home for home in homes if home}:  # a program that names no GPU may run here
            at = homes.index("cpu")
            raise ValueError(f"Pointer argument (at {at}) cannot be accessed from Triton (cpu tensor?)")
        self.log.launches.append(launch)
        if not self.runs:
            return launch.notes.append("compiled only: nothing was executed")
        before = compiled.program.raw_counts()
        known = [(address, storage.nbytes()) for address, storage in self.known.items()]
        if math.prod(grid) == 0:
            launch.notes.append("the grid is empty: nothing was executed")
        compiled.execute(grid, values, checks=self.checks, known=known, bounds=self.bounds)
        launch.counts = compiled.program.raw_counts() - before
        launch.notes += [f"CTAs store equal bytes to one place: {one}" for one in compiled.program.equal_stores()]

    def autotuner_patches(self) -> list:
        """Patch the autotuner to take the first configuration that compiles and fits: nothing is timed."""
        run = Autotuner.run

        def of_this_device(tuner, *args, **kwargs):
            self.tuners.append(tuner)
            try:
                with mock.patch.object(tuner, "cache", self.caches.setdefault(id(tuner), {})):
                    return run(tuner, *args, **kwargs)
            finally:
                self.tuners.pop()

        def bench(tuner, *args, config, **meta):
            if self.chosen is tuner.nargs:  # in this choice another one compiled
                return [math.inf] * 3
            options = {**meta, **config.all_kwargs()}
            if config.pre_hook is not None:
                config.pre_hook({**tuner.nargs, **options})
            try:
                kernel = tuner.fn.run(*args, **{**options, "warmup": True})
            except (OutOfResources, CompileTimeAssertionFailure, PTXASError):
                return [math.inf] * 3
            if not fits(kernel.metadata, self.device):
                return [math.inf] * 3
            self.chosen = tuner.nargs
            return [0.0] * 3

        return [mock.patch.object(Autotuner, "_bench", bench), mock.patch.object(Autotuner, "run", of_this_device)]
