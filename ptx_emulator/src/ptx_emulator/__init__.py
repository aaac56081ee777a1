"""Compiled Triton kernels executed without a GPU: an emulator of PTX, thread by thread, with checks and counters.

    with ptx_emulator.gpu(90) as log:             # 80, 86, 89, 90, 100 or 120
        my_kernel[grid](x, y, n, BLOCK=1024)      # any @triton.jit function, on CPU tensors
    log.launches[-1].counters()
    log.launches[-1].estimate("H200").seconds

    context.py    `gpu`: launches inside it      launches.py   `Launch`, its machine code, its execution
    driver.py     the device that Triton sees    kernels.py    a compiled kernel, executed on arguments
    machines.py   GPUs by their data sheets      memory.py     arguments -> parameters and regions
    cuda_is_cpu.py  what torch.cuda answers      counters.py   what CTAs do
    program.py    a kernel, run over a grid      estimate/     time and static metrics, from machine code
    module.py     text -> kernel                 machine.h     registers, memory, the state of each byte
    parse.py      text -> statements             arithmetic.h  instructions on numbers in registers
    assemble.py   statements -> bytecode         memory.h      loads, copies, shuffles, matrices of shared memory
    bits.h        instructions on their bits     atomics.h     atomic updates
    traffic.h     bytes and races between CTAs
    matrix.h      mma and wgmma                  emulator.cpp  the loop; compiled at first use

The emulator reports what an interpreter cannot see: accesses out of bounds, misalignment, uninitialised shared memory,
races between warps and CTAs, missing waits and fences. It does not model ptxas or forward progress. Sums inside a
tensor product and ex2 are approximate.
"""

import importlib

#: name -> its module, loaded at first use, because every run of pytest loads the plug-in
_HOME = {
    **dict.fromkeys(("Execution", "Log", "gpu"), "context"),
    **dict.fromkeys(("DeviceAssertion", "EmulationError"), "program"),
    **dict.fromkeys(("Launch", "run"), "launches"),
    "PtxError": "parse",
}
__version__ = "0.1.0"
__all__ = ["DeviceAssertion", "EmulationError", "Execution", "Launch", "Log", "PtxError", "gpu", "run"]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
