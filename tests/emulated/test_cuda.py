"""The CUDA C++ kernels as nvcc's PTX, executed: mma.sync, wgmma with its descriptors, copies, fences, barriers.

tests/cuda runs the same source as C++ with hand-written layouts of the tensor cores; here the layouts are the PTX
ISA's.
"""

import shutil
import subprocess

import pytest
import torch

from ptx_emulator import module as modules
from ptx_emulator.parse import Kernel
from ptx_emulator.program import EmulationError, Program, Region, Structure, built
from retro_kernels.ops.topk_chunks import reference as reference
from tests.conftest import COMPILED, INTERPRETER
from tests.cuda.test_topk_chunks import SOURCE, launched, problem
from tests.emulated import planted

if INTERPRETER or COMPILED:
    pytest.skip("once, in the ordinary process", allow_module_level=True)
if shutil.which("nvcc") is None:
    pytest.skip("needs nvcc", allow_module_level=True)

THREADS, SHARED = 256, {False: 159264, True: 208416}
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


def execute(scan, merge, call, splits: int, blocks: int, wgmma: bool):
    tensors, pairs, numbers = launched(call, splits)
    present = [t for t in tensors if t is not None]
    places = iter(range(len(present)))
    fields = [("Q", 0 if t is None else Region(next(places))) for t in tensors]
    structure = Structure((*fields, *(("q", stride) for stride in pairs), *(("i", int(n)) for n in numbers)))
    regions = [(t.data_ptr(), t.numel() * t.element_size()) for t in present]
    rows = call.query.shape[0] * call.query.shape[1]
    given = dict(regions=regions, threads=THREADS)
    Program(scan).run((blocks,), [structure], shared_bytes=SHARED[wgmma], **given)
    Program(merge).run((-(-rows // (THREADS // 32)),), [structure], **given)
    return tensors[6], tensors[7]


CASES = {
    "tiles and splits": (torch.bfloat16, dict(Q=9, S=700, D=40, k=20), 2, 3),
    "l2, every mask": (
        torch.float16,
        dict(Q=6, S=520, D=72, k=16, metric="l2", docs=True, mask=True, causal_gap=0, query_offset=500),
        3,
        1,
    ),
    "wide list, two query blocks": (torch.bfloat16, dict(B=1, Q=130, S=300, D=8, k=100), 1, 2),
}


@pytest.mark.parametrize("wgmma", [False, True], ids=["mma.sync", "wgmma"])
@pytest.mark.parametrize("name", CASES)
def test_the_compiled_kernel_is_exact(module, name, wgmma):
    dtype, sizes, splits, blocks = CASES[name]
    call = problem(1, dtype=dtype, **sizes)
    scores, indices = execute(*kernels(module, call, wgmma), call, splits, blocks, wgmma)
    want, want_indices = reference.forward(call._replace(query=call.query.double(), key=call.key.double()))
    assert torch.equal(indices, want_indices)
    assert torch.equal(scores.double(), want)


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
            execute(struck, merge, call, 1, 1, True)
            found.append(False)
        except EmulationError:
            found.append(True)
    assert any(found)
