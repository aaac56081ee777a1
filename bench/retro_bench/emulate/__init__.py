"""Compiled kernels executed without a GPU: an emulator of the PTX that Triton makes, thread by thread, with checks and
counters.

    with emulate.gpu(90) as log:                  # 80, 90, 100
        my_kernel[grid](x, y, n, BLOCK=1024)      # any @triton.jit function, on CPU tensors
    log.launches[-1].counters()

    context.py    `gpu`: launches inside it     program.py    a kernel, run over a grid
    driver.py     the device that Triton sees    launches.py   compiled kernels, and our ops' launches
    cuda_is_cpu.py  what torch.cuda answers      memory.py     arguments -> parameters and regions
    counters.py   what CTAs do
    parse.py      text -> statements             machine.h     registers, memory, what is known of each byte
    assemble.py   statements -> bytecode         arithmetic.h  instructions on numbers in registers
    bits.h        instructions on their bits     memory.h      loads, copies, shuffles, matrices of shared memory
    matrix.h      mma and wgmma                  atomics.h     atomic updates
    emulator.cpp  the loop; compiled at setup or at first use

It sees what an interpreter cannot: bounds, alignment, uninitialised shared memory, races between warps, waits and
fences that are missing. It does not see time, ptxas, forward progress; sums of a tensor product and ex2 are
approximate.
"""

import importlib

#: name -> its module; loaded at first use, for the pytest plug-in is loaded by every run of pytest
_HOME = {
    **dict.fromkeys(("Launched", "Log", "gpu"), "context"),
    **dict.fromkeys(("DeviceAssertion", "EmulationError"), "program"),
    "PtxError": "parse",
}
__all__ = ["DeviceAssertion", "EmulationError", "Launched", "Log", "PtxError", "gpu"]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
