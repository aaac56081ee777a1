"""Compiled kernels executed without a GPU: an emulator of the PTX that Triton makes of ours, thread by thread, with
checks and counters.

    parse.py      text -> statements           machine.h     registers, memory, what is known of each byte
    assemble.py   statements -> bytecode       arithmetic.h  instructions on numbers in registers
    program.py    a kernel, run over a grid    bits.h        instructions on their bits
    launches.py   the launches of our ops      memory.h      loads, copies, shuffles, matrices to and from shared memory
    counters.py   what one CTA does            matrix.h      mma and wgmma
                                               emulator.cpp  the loop; compiled at first use

It sees what an interpreter cannot: bounds, alignment, uninitialised shared memory, races between warps, waits and
fences that are missing. It does not see time, ptxas, forward progress; sums of a tensor product and ex2 are
approximate.
"""
