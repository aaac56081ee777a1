"""Bulk copies by tensor map, in kernels that Triton compiles; every fault is planted in their PTX."""

import pytest
import torch
import triton.language as tl
from triton import jit
from triton.tools.tensor_descriptor import TensorDescriptor

import ptx_emulator
from ptx_emulator import program

COVERED = {"tensormap"}


@jit
def copy_kernel(x_desc, y_desc, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ADD: tl.constexpr):
    at = [tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS]
    x = x_desc.load(at)
    if ADD:
        y_desc.atomic_add(at, x)
    else:
        y_desc.store(at, x + 1)


def copied(dtype=torch.float32, shape=(20, 24), block=(8, 16), padding="zero", add=False, arch=90):
    x = torch.arange(shape[0] * shape[1]).reshape(shape).to(dtype)
    y = torch.zeros_like(x)
    descriptors = [TensorDescriptor.from_tensor(tensor, list(block), padding) for tensor in (x, y)]
    grid = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    with ptx_emulator.gpu(arch) as log:
        copy_kernel[grid](*descriptors, ROWS=block[0], COLUMNS=block[1], ADD=add)
    assert any("bulk.tensor" in counted.opcode for counted in log.launches[0].counted())
    return x, y


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.int64])
def test_boxes_of_every_size_of_element(dtype, arch):
    """8 rows of 16 elements use the swizzles of 128, 32 and none; the box does not divide the tensor."""
    x, y = copied(dtype, arch=arch, shape=(20, 32))
    assert torch.equal(y, x + 1)


def test_what_is_outside_is_not_written():
    x, y = copied(shape=(5, 8), block=(8, 16), padding="nan")
    assert torch.equal(y, x + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_a_store_that_adds(dtype):
    x, y = copied(dtype, add=True)
    assert torch.equal(y, x)


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("mbarrier.try_wait", "ends an mbarrier that a commit will arrive at"),
        ("mbarrier.arrive.expect_tx", "deadlock"),
        ("cp.async.bulk.tensor.2d.shared", "deadlock"),
        ("cp.async.bulk.wait_group", "bulk store that was not waited for"),
        ("fence.proxy.async", "no fence.proxy.async made visible"),
        ("mbarrier.init", "no mbarrier was initialised"),
    ],
)
def test_what_is_missing_is_reported(monkeypatch, gone, message):
    parse = program.module.kernel

    def without(text, name=None):
        kernel = parse(text, name)
        for statement in kernel.statements:
            if statement.opcode.startswith(gone):
                statement.opcode, statement.operands = "membar.cta", []
        if gone == "mbarrier.try_wait":  # and the branch that repeats it
            for statement in kernel.statements:
                if statement.opcode.startswith("bra") and "waitLoop" in statement.operands[0].name:
                    statement.opcode, statement.operands = "membar.cta", []
        return kernel

    from ptx_emulator import driver

    driver.loaded.cache_clear()
    monkeypatch.setattr(program.module, "kernel", without)
    try:
        with pytest.raises(ptx_emulator.EmulationError, match=message):
            copied()
    finally:
        driver.loaded.cache_clear()
        copy_kernel.device_caches.clear()
