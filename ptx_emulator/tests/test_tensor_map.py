"""Bulk copies by tensor map, in kernels that Triton compiles; every fault is planted in their PTX."""

import copy
import dataclasses

import pytest
import torch
import triton.language as tl
from triton import jit
from triton.tools.tensor_descriptor import TensorDescriptor

from ptx_emulator import launches, program

COVERED = {"tensormap"}


@jit
def copy_kernel(x_desc, y_desc, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ADD: tl.constexpr):
    at = [tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS]
    x = x_desc.load(at)
    if ADD:
        y_desc.atomic_add(at, x)
    else:
        y_desc.store(at, x + 1)


def copies(dtype=torch.float32, shape=(20, 24), block=(8, 16), padding="zero", add=False) -> launches.Launch:
    x = torch.arange(shape[0] * shape[1]).reshape(shape).to(dtype)
    x_desc, y_desc = (TensorDescriptor.from_tensor(one, list(block), padding) for one in (x, torch.zeros_like(x)))
    grid = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    arguments = {"x_desc": x_desc, "y_desc": y_desc, "ROWS": block[0], "COLUMNS": block[1], "ADD": add}
    return launches.Launch(copy_kernel, grid, arguments)


def copied(dtype=torch.float32, arch=90, **options):
    launch = copies(dtype, **options)
    kernel = launches.run(launch, arch)
    assert any("bulk.tensor" in counted.opcode for counted in kernel.program.counts())
    return launch.arguments["x_desc"].base, launch.arguments["y_desc"].base


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
def test_what_is_missing_is_reported(gone, message):
    launch = copies()
    compiled = launches.compiled(launch, 90, launches.until_ptx)
    kernel = copy.deepcopy(compiled.program.kernel)
    for s in kernel.statements:
        repeats = gone == "mbarrier.try_wait" and s.opcode.startswith("bra") and "waitLoop" in s.operands[0].name
        if repeats or s.opcode.startswith(gone):
            s.opcode, s.operands = "membar.cta", []
    with pytest.raises(program.EmulationError, match=message):
        launches.run(launch, 90, kernel=dataclasses.replace(compiled, program=program.Program(kernel)))
