"""The CUDA C++ kernels as nvcc's PTX, executed: mma.sync, wgmma with its descriptors, copies, fences, barriers."""

import shutil
import struct
import subprocess

import pytest
import torch

from ptx_emulator import module as modules
from ptx_emulator.parse import Kernel
from ptx_emulator.program import EmulationError, Program, Region, built
from retro_kernels.ops.topk_chunks import cuda as backend
from retro_kernels.ops.topk_chunks import reference as reference
from retro_kernels.ops.topk_chunks.call import TopkChunks
from tests.conftest import COMPILED, INTERPRETER
from tests.cuda.test_topk_chunks import SOURCE, problem
from tests.emulated import planted

if INTERPRETER or COMPILED:
    pytest.skip("once, in the ordinary process", allow_module_level=True)
if shutil.which("nvcc") is None:
    pytest.skip("needs nvcc", allow_module_level=True)

THREADS, SHARED = 256, {False: backend.SHARED_BYTES, True: backend.SHARED_BYTES_WGMMA}
PENDING = 48  # of csrc/cuda/topk_chunks.cu: with k beyond 128 - PENDING the lists are twice as wide


@pytest.fixture(scope="module")
def module() -> str:
    command = ["nvcc", "-std=c++17", "-O3", "-ptx", "-lineinfo", "-DRETRO_CUDA_HOPPER=1", "-arch=sm_90a"]
    version = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    headers = sorted([*SOURCE.parent.glob("*.h"), *SOURCE.parent.glob("*.cuh")])
    return built("topk-sm90.ptx", command, SOURCE, headers, version).read_text()


def kernels(text: str, call, wgmma: bool) -> tuple[Kernel, Kernel]:
    """The scan and the merge that the launcher selects for a call."""
    width = 4 if call.k + PENDING <= 128 else 8
    scan = f"topk_chunks_scan{'_wgmma' if wgmma else ''}ILb{int(call.query.dtype == torch.bfloat16)}ELi{width}E"
    names = modules.entries(text)
    return tuple(
        modules.kernel(text, next(name for name in names if part in name))
        for part in (f"{len(scan.split('I')[0])}{scan}", f"topk_chunks_mergeILi{width}E")
    )


def numbers_of_rows(tensor):
    """Return the strides and the bytes per element of a tensor of rows."""
    if tensor is None:
        return 0, 0, 8
    return (tensor.stride(0) if tensor.shape[0] > 1 else 0), tensor.stride(1), tensor.element_size()


def launched(call: TopkChunks, splits=1):
    """Return (tensors, numbers) of the structure, with new scratch and outputs: partial, scores, indices."""
    b, q, d = call.query.shape
    s = call.key.shape[1]
    tiles = -(-s // backend.TILE_S)
    length = -(-tiles // splits) * backend.TILE_S
    splits = -(-s // length)
    partial = torch.full((b, q, splits, call.k), -1, dtype=torch.int64)
    scores, indices = torch.full((b, q, call.k), torch.nan), torch.full((b, q, call.k), -7)
    tensors = (call.query, call.key, call.query_doc, call.key_doc, call.key_mask, partial, scores, indices)
    shift = 0 if call.causal_gap is None else call.query_offset - call.causal_gap
    causal, bf16 = call.causal_gap is not None, call.query.dtype == torch.bfloat16
    return tensors, (b, q, s, d, call.k, causal, shift, splits, length, bf16, call.metric == "l2")


def execute(scan, merge, call, wgmma: bool, splits: int = 1, blocks: int = 1):
    """Return scores, indices and the splits' packed lists [B,Q,splits,k]."""
    tensors, numbers = launched(call, splits)
    present = [t for t in tensors if t is not None]
    regions = [Region(k, t.data_ptr(), t.numel() * t.element_size()) for k, t in enumerate(present)]
    addresses = iter([region.address for region in regions])
    pointers = [0 if t is None else next(addresses) for t in tensors]
    rows = [number for at, t in zip(pointers[:5], tensors) for number in (at, *numbers_of_rows(t))]
    structure = struct.pack(f"{'Q3q' * 5}3Q{len(numbers)}i", *rows, *pointers[5:], *map(int, numbers))
    count = call.query.shape[0] * call.query.shape[1]
    given = dict(regions=regions, threads=THREADS)
    Program(scan).run((blocks,), [structure], shared_bytes=SHARED[wgmma], **given)
    Program(merge).run((-(-count // (THREADS // 32)),), [structure], **given)
    return tensors[6], tensors[7], tensors[5]


def assert_exact(text: str, call, wgmma: bool, **launch) -> torch.Tensor:
    scores, indices, partial = execute(*kernels(text, call, wgmma), call, wgmma, **launch)
    want, want_indices = reference.forward(call._replace(query=call.query.double(), key=call.key.double()))
    assert torch.equal(indices, want_indices), f"{int((indices != want_indices).sum())} indices differ"
    assert torch.equal(scores.double(), want)
    return partial


BF16, FP16 = torch.bfloat16, torch.float16
CASES = {
    "one tile": (FP16, dict(Q=5, S=100, D=16, k=3), {}),
    "tiles and splits": (BF16, dict(Q=9, S=700, D=40, k=20), dict(splits=2, blocks=3)),
    "two query blocks, causal": (
        FP16,
        dict(B=1, Q=140, S=300, D=24, k=4, causal_gap=1, query_offset=150),
        dict(blocks=2),
    ),
    "l2, every mask": (
        FP16,
        dict(Q=6, S=520, D=72, k=16, metric="l2", docs=True, mask=True, causal_gap=0, query_offset=500),
        dict(splits=3),
    ),
    "shared keys": (BF16, dict(B=3, Q=3, S=260, D=8, k=10, shared=True, mask=True), dict(blocks=2)),
    "wide list, two query blocks": (BF16, dict(B=1, Q=130, S=300, D=8, k=100), dict(blocks=2)),
    "wide list": (FP16, dict(B=1, Q=2, S=300, D=8, k=128), {}),
    "wide list, few keys": (BF16, dict(B=1, Q=2, S=90, D=8, k=100, metric="l2"), {}),
    "no candidate": (BF16, dict(B=1, Q=4, S=300, D=8, k=3, causal_gap=400), {}),
}
#: each on one of both kernels, nightly on the other too
EACH = [
    pytest.param(name, wgmma, marks=[pytest.mark.nightly] * (wgmma == number % 2), id=f"{name}-{kernel}")
    for number, name in enumerate(CASES)
    for wgmma, kernel in enumerate(("mma.sync", "wgmma"))
]


@pytest.mark.parametrize(("name", "wgmma"), EACH)
def test_the_compiled_kernel_is_exact(module, name, wgmma):
    dtype, sizes, launch = CASES[name]
    assert_exact(module, problem(1, dtype=dtype, **sizes), wgmma, **launch)


@pytest.mark.parametrize("order", ["equal", "rising", "falling"])
def test_adversarial_orders(module, order):
    values = {"equal": torch.zeros(600), "rising": torch.arange(600) / 8, "falling": -torch.arange(600) / 8}[order]
    key = torch.zeros(1, 600, 8)
    key[0, :, 0], key[0, :, 1] = values, 1.0
    query = torch.zeros(1, 2, 8)
    query[0, :, 0] = 1.0
    call = problem(0, B=1, D=8)._replace(query=query.half(), key=key.half(), k=60)
    assert_exact(module, call, wgmma=False)


def test_infinities_nan_and_both_zeros(module):
    values = (torch.arange(300.0) % 40).view(1, 300, 1).repeat(1, 1, 8)
    values[0, 5], values[0, 6], values[0, 7], values[0, 270, 1] = torch.inf, -torch.inf, torch.nan, torch.nan
    values[0, 100:200:2], values[0, 101:200:2] = -0.0, 0.0
    call = TopkChunks(torch.ones(1, 2, 8).bfloat16(), values.bfloat16(), 128, "dot", None, 0, None, None, None)
    scores, indices, _ = execute(*kernels(module, call, False), call, wgmma=False)
    want, want_indices = reference.forward(call)
    assert torch.equal(scores, want) and torch.equal(indices, want_indices)


def test_packing(module):
    """The layout that csrc/cuda/topk_select.cuh and retro_kernels/ops/topk_chunks/triton/selection.py draw."""
    key = torch.zeros(1, 10, 8)
    key[0, 7, 0], key[0, 3, 0] = 1.5, -1.5
    query = torch.zeros(1, 1, 8)
    query[..., 0] = 1.0
    mask = torch.zeros(1, 10, dtype=torch.bool)
    mask[0, [3, 7]] = True
    call = problem(0, B=1, D=8)._replace(query=query.half(), key=key.half(), k=2, key_mask=mask)
    partial = assert_exact(module, call, wgmma=False)
    assert [hex(value & (2**64 - 1)) for value in partial[0, 0, 0].tolist()] == [
        "0x3fc000007ffffff8",
        "0xc03fffff7ffffffc",
    ]


#: the plants of planted.PLANTS that apply to the wgmma kernel and are errors in every place
STRUCK = (
    "a barrier gone",
    "a wait for copies gone",
    "a wait for products gone",
    "a fence of the async proxy gone",
    "a fence of products gone",
)


@pytest.mark.parametrize("plant", STRUCK)
def test_planted_faults_are_reported(module, plant):
    call = problem(1, dtype=torch.bfloat16, Q=9, S=700, D=40, k=20)
    scan, merge = kernels(module, call, True)
    found = []
    for struck in planted.struck(scan, plant, most=6 if plant == "a barrier gone" else 2):
        try:
            execute(struck, merge, call, True)
            found.append(False)
        except EmulationError:
            found.append(True)
    assert any(found)
