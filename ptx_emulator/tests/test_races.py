"""Races between CTAs: two accesses to one byte of global memory, one of them a write, without an order."""

import pytest
import torch
import triton
import triton.language as tl

import ptx_emulator
from ptx_emulator import EmulationError

ARCHES = (80, 90, 100)


@triton.jit
def sums_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    """Every program adds its block to one row without an atomic."""
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + at)
    old = tl.load(out_ptr + at)
    tl.store(out_ptr + at, old + x)


@triton.jit
def stores_kernel(x_ptr, out_ptr, STEP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + tl.program_id(0) * STEP + at, tl.load(x_ptr + tl.program_id(0) * BLOCK + at))


@triton.jit
def split_kernel(x_ptr, out_ptr, lock_ptr, count_ptr, BLOCK: tl.constexpr):
    """Sum of blocks under a lock; the first program stores, the others add."""
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + at)
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    if tl.load(count_ptr) == 0:
        tl.atomic_xchg(count_ptr, 1)
        tl.store(out_ptr + at, x)
    else:
        tl.store(out_ptr + at, tl.load(out_ptr + at) + x)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0)


@triton.jit
def flag_kernel(x_ptr, flag_ptr, out_ptr, SEM: tl.constexpr, BLOCK: tl.constexpr):
    """Each program waits for the flag of the program before it and adds one to that program's result."""
    program, at = tl.program_id(0), tl.arange(0, BLOCK)
    if program == 0:
        x = tl.load(x_ptr + at)
    else:
        while tl.atomic_add(flag_ptr + program - 1, 0, sem=SEM) == 0:
            pass
        x = tl.load(out_ptr + (program - 1) * BLOCK + at)
    tl.store(out_ptr + program * BLOCK + at, x + 1)
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr + program, 1, sem=SEM)


@triton.jit
def last_kernel(x_ptr, part_ptr, count_ptr, out_ptr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """Split-K with a counter: the last program to arrive sums the parts."""
    program, at = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(part_ptr + program * BLOCK + at, 2 * tl.load(x_ptr + program * BLOCK + at))
    tl.debug_barrier()
    if tl.atomic_add(count_ptr, 1) == PROGRAMS - 1:
        total = tl.zeros((BLOCK,), tl.float32)
        for k in range(PROGRAMS):
            total += tl.load(part_ptr + k * BLOCK + at)
        tl.store(out_ptr + at, total)


@pytest.mark.parametrize("arch", ARCHES)
def test_a_sum_without_an_atomic_is_reported_with_both_lines(arch):
    x, out = torch.randn(4, 128), torch.zeros(128)
    with ptx_emulator.gpu(arch), pytest.raises(EmulationError) as caught:
        sums_kernel[(4,)](x, out, BLOCK=128)
    with ptx_emulator.gpu(arch, checks=False):
        sums_kernel[(4,)](x, out, BLOCK=128)
    first = sums_kernel.fn.__code__.co_firstlineno
    text = str(caught.value)
    assert "race between CTAs: reads a byte that is accessed at test_races.py:" in text
    assert "by CTA (0, 0, 0)" in text and "CTA (1, 0, 0) of (4, 1, 1)" in text
    assert f"test_races.py:{first + 6} (st.global" in text and f"at test_races.py:{first + 5}: ld.global" in text


def test_stores_of_other_bytes_to_one_place_are_reported_and_neighbours_are_not():
    x = torch.randn(4, 128)
    with ptx_emulator.gpu(90):
        stores_kernel[(4,)](x, torch.zeros(4 * 128), STEP=128, BLOCK=128)
        with pytest.raises(EmulationError, match="race between CTAs: writes"):
            stores_kernel[(4,)](x, torch.zeros(4 * 128), STEP=127, BLOCK=128)
    small = torch.randint(0, 255, (4, 128), dtype=torch.uint8)
    with ptx_emulator.gpu(90):  # bytes side by side in one word
        out = torch.zeros(4, 128, dtype=torch.uint8)
        stores_kernel[(4,)](small, out, STEP=128, BLOCK=128)
        assert torch.equal(out, small)


@pytest.mark.parametrize(("first", "verb"), [(0, "writes"), (2, "reads")])
def test_views_of_one_tensor_are_one_memory(first, verb):
    x = torch.randn(6 * 128)
    with ptx_emulator.gpu(90), pytest.raises(EmulationError, match=f"race between CTAs: {verb}"):
        stores_kernel[(4,)](x[128:], x[128 * first :], STEP=128, BLOCK=128)


def test_equal_bytes_are_noted():
    out = torch.zeros(128)
    with ptx_emulator.gpu(90) as log:
        stores_kernel[(4,)](torch.ones(4, 128), out, STEP=0, BLOCK=128)
        stores_kernel[(4,)](torch.ones(4, 128), torch.zeros(512), STEP=128, BLOCK=128)
    line = stores_kernel.fn.__code__.co_firstlineno + 3
    assert log.launches[0].notes == [f"CTAs store equal bytes to one place: test_races.py:{line}"]
    assert log.launches[1].notes == [] and torch.equal(out, torch.ones(128))


@pytest.mark.parametrize("arch", ARCHES)
def test_locks_flags_and_counters_are_silent(arch):
    x, number = torch.randn(4, 128), torch.zeros(8, dtype=torch.int32)
    out, parts = torch.empty(128), torch.empty(4, 128)
    with ptx_emulator.gpu(arch) as log:
        split_kernel[(4,)](x, out, number, number[1:], BLOCK=128)
        torch.testing.assert_close(out, x.sum(0))
        last_kernel[(4,)](x, parts, number[2:], out, PROGRAMS=4, BLOCK=128)
        torch.testing.assert_close(out, 2 * x.sum(0))
        flag_kernel[(4,)](x, number[4:], parts, SEM="acq_rel", BLOCK=128)
        torch.testing.assert_close(parts, x[0] + torch.arange(1, 5)[:, None])
    assert all(launch.notes == [] for launch in log.launches)


@pytest.mark.parametrize("sem", ["relaxed", "acquire"])
def test_a_flag_without_a_release_is_reported(sem):
    flags = torch.zeros(4, dtype=torch.int32)
    with ptx_emulator.gpu(90), pytest.raises(EmulationError, match="race between CTAs: reads"):
        flag_kernel[(4,)](torch.randn(128), flags, torch.empty(4, 128), SEM=sem, BLOCK=128)
