"""csrc/cuda/topk_chunks.cu without a GPU: run by an emulation of its threads, and compiled for every architecture."""

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from retro_kernels import extensions
from retro_kernels.compile import aot
from retro_kernels.compile.target import NVIDIA
from retro_kernels.ops.topk_chunks import cuda as backend
from retro_kernels.ops.topk_chunks import reference as reference
from retro_kernels.ops.topk_chunks.call import TopkChunks
from retro_kernels.testing import inputs
from tools import build_extensions

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "csrc" / "cuda" / "topk_chunks.cu"
POINTERS = ("query", "key", "query_doc", "key_doc", "key_mask", "partial", "scores", "indices")
STRIDES = ("qb", "qn", "kb", "ks", "qdb", "qdn", "kdb", "kds", "mb", "ms")
NUMBERS = (
    "B",
    "Q",
    "S",
    "D",
    "k",
    "causal",
    "causal_shift",
    "splits",
    "split_len",
    "query_doc_bytes",
    "key_doc_bytes",
    "bf16",
    "l2",
)


class Call(ctypes.Structure):
    """retro::TopkChunks of csrc/cuda/topk_chunks.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((f"stride_{name}", ctypes.c_int64) for name in STRIDES),
        *((name, ctypes.c_int) for name in NUMBERS),
    ]


@pytest.fixture(scope="module")
def emulation(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    library = tmp_path_factory.mktemp("emulation") / "emulation.so"
    flags = [
        "-std=c++17",
        "-O2",
        "-U_FORTIFY_SOURCE",
        "-Wall",
        "-Werror",
        "-Wno-unknown-pragmas",
        "-shared",
        "-fPIC",
        f"-I{ROOT / 'tests/cuda'}",
    ]
    subprocess.run(["g++", *flags, "-o", str(library), str(ROOT / "tests/cuda/emulate_topk_chunks.cpp")], check=True)
    loaded = ctypes.CDLL(str(library))
    assert loaded.topk_chunks_size() == ctypes.sizeof(Call)
    return loaded


def strides(tensor):
    if tensor is None:
        return 0, 0
    return (tensor.stride(0) if tensor.shape[0] > 1 else 0), tensor.stride(1)


def launched(call: TopkChunks, splits=1):
    """Return (tensors, strides, numbers) of the structure, with new scratch and outputs: partial, scores, indices."""
    b, q, d = call.query.shape
    s = call.key.shape[1]
    tiles = -(-s // backend.TILE_S)
    length = -(-tiles // splits) * backend.TILE_S
    splits = -(-s // length)
    partial = torch.full((b, q, splits, call.k), -1, dtype=torch.int64)
    scores, indices = torch.full((b, q, call.k), torch.nan), torch.full((b, q, call.k), -7)
    tensors = (call.query, call.key, call.query_doc, call.key_doc, call.key_mask, partial, scores, indices)
    shift = 0 if call.causal_gap is None else call.query_offset - call.causal_gap
    bytes_of = [8 if t is None else t.element_size() for t in (call.query_doc, call.key_doc)]
    causal, bf16 = call.causal_gap is not None, call.query.dtype == torch.bfloat16
    numbers = (b, q, s, d, call.k, causal, shift, splits, length, *bytes_of, bf16, call.metric == "l2")
    return tensors, [stride for tensor in tensors[:5] for stride in strides(tensor)], numbers


def emulate(library, call: TopkChunks, splits=1, blocks=1, seed=0, wgmma=False):
    """Return scores, indices and the splits' packed lists [B,Q,splits,k]."""
    tensors, pairs, numbers = launched(call, splits)
    native = Call(*(None if t is None else t.data_ptr() for t in tensors), *pairs, *numbers)
    library.emulate_topk_chunks(ctypes.byref(native), blocks, seed, wgmma)
    partial, scores, indices = tensors[5:]
    return scores, indices, partial


def problem(seed, **options) -> TopkChunks:
    kw = inputs.topk(seed, integers=True, **options)
    defaults = dict(metric="dot", causal_gap=None, query_offset=0, query_doc=None, key_doc=None, key_mask=None)
    return TopkChunks(**{**defaults, **kw})


def assert_exact(library, call: TopkChunks, **launch):
    scores, indices, partial = emulate(library, call, **launch)
    want, want_indices = reference.forward(call._replace(query=call.query.double(), key=call.key.double()))
    assert torch.equal(indices, want_indices), f"{int((indices != want_indices).sum())} indices differ"
    assert torch.equal(scores.double(), want)
    return partial


CASES = {
    "one tile": (dict(Q=5, S=100, D=16, k=3), {}),
    "tiles and splits": (dict(Q=9, S=700, D=40, k=20), dict(splits=2, blocks=3)),
    "two query blocks, causal": (dict(B=1, Q=140, S=300, D=24, k=4, causal_gap=1, query_offset=150), dict(blocks=2)),
    "l2, every mask": (
        dict(Q=6, S=520, D=72, k=16, metric="l2", docs=True, mask=True, causal_gap=0, query_offset=500),
        dict(splits=3),
    ),
    "shared keys": (dict(B=3, Q=3, S=260, D=8, k=10, shared=True, mask=True), dict(blocks=2)),
    "wide list": (dict(B=1, Q=2, S=300, D=8, k=128), {}),
    "wide list, few keys": (dict(B=1, Q=2, S=90, D=8, k=100, metric="l2"), {}),
    "no candidate": (dict(B=1, Q=4, S=300, D=8, k=3, causal_gap=400), {}),
}


@pytest.mark.parametrize("wgmma", [False, True], ids=["mma.sync", "wgmma"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_emulated_kernel_is_exact(emulation, name, dtype, wgmma):
    sizes, launch = CASES[name]
    assert_exact(emulation, problem(1, dtype=dtype, **sizes), **launch, wgmma=wgmma)


def test_shared_memory_fits(emulation):
    """`unsupported_on` compares the target's shared memory with the size of the compiled structures."""
    assert emulation.topk_shared_bytes(False) == backend.SHARED_BYTES <= NVIDIA[80].shared_memory
    assert emulation.topk_shared_bytes(True) == backend.SHARED_BYTES_WGMMA <= NVIDIA[90].shared_memory


def test_order_of_threads_and_blocks_changes_nothing(emulation):
    call = problem(2, dtype=torch.float16, Q=10, S=600, D=40, k=7, docs=True, metric="l2")
    first = emulate(emulation, call, splits=2, blocks=1, seed=1)
    for seed, blocks, wgmma in ((2, 3, False), (3, 1, True), (4, 3, True)):
        again = emulate(emulation, call, splits=2, blocks=blocks, seed=seed, wgmma=wgmma)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("order", ["equal", "rising", "falling"])
def test_adversarial_orders(emulation, order):
    values = {"equal": torch.zeros(600), "rising": torch.arange(600) / 8, "falling": -torch.arange(600) / 8}[order]
    key = torch.zeros(1, 600, 8)
    key[0, :, 0], key[0, :, 1] = values, 1.0
    query = torch.zeros(1, 2, 8)
    query[0, :, 0] = 1.0
    assert_exact(emulation, problem(0, B=1, D=8)._replace(query=query.half(), key=key.half(), k=60))


def test_infinities_nan_and_both_zeros(emulation):
    values = (torch.arange(300.0) % 40).view(1, 300, 1).repeat(1, 1, 8)
    values[0, 5], values[0, 6], values[0, 7], values[0, 270, 1] = torch.inf, -torch.inf, torch.nan, torch.nan
    values[0, 100:200:2], values[0, 101:200:2] = -0.0, 0.0
    call = TopkChunks(torch.ones(1, 2, 8).bfloat16(), values.bfloat16(), 128, "dot", None, 0, None, None, None)
    scores, indices, _ = emulate(emulation, call)
    want, want_indices = reference.forward(call)
    assert torch.equal(scores, want) and torch.equal(indices, want_indices)


def test_packing(emulation):
    """The layout that csrc/cuda/topk_select.cuh and retro_kernels/ops/topk_chunks/triton/selection.py draw."""
    key = torch.zeros(1, 10, 8)
    key[0, 7, 0], key[0, 3, 0] = 1.5, -1.5
    query = torch.zeros(1, 1, 8)
    query[..., 0] = 1.0
    mask = torch.zeros(1, 10, dtype=torch.bool)
    mask[0, [3, 7]] = True
    partial = assert_exact(
        emulation, problem(0, B=1, D=8)._replace(query=query.half(), key=key.half(), k=2, key_mask=mask)
    )
    assert [hex(value & (2**64 - 1)) for value in partial[0, 0, 0].tolist()] == [
        "0x3fc000007ffffff8",
        "0xc03fffff7ffffffc",
    ]


def test_constants_agree_with_the_header():
    header = SOURCE.with_name("topk_chunks.h").read_text()
    for name, value in (("TOPK_TILE_Q", backend.TILE_Q), ("TOPK_TILE_S", backend.TILE_S)):
        assert int(re.search(rf"{name} = (\d+)", header)[1]) == value


def test_unsupported_calls_say_why():
    def call(arch=80, query_dtype=torch.bfloat16, docs=None, **sizes):
        sizes = dict(Q=4096, S=10**6, D=1024, k=16) | sizes
        empty = dict(device="meta")
        query = torch.empty(1, sizes["Q"], sizes["D"], dtype=query_dtype, **empty)
        key = torch.empty(1, sizes["S"], sizes["D"], dtype=query_dtype, **empty)
        query_doc = None if docs is None else torch.empty(1, sizes["Q"], dtype=docs, **empty)
        return TopkChunks(query, key, sizes["k"], "dot", None, 0, query_doc, query_doc, None), NVIDIA[arch]

    def why(**options):
        return backend.unsupported_on(*call(**options))

    def slower(**options):
        return backend.slower_on(*call(**options))

    assert why() is None and why(arch=90) is None and slower() is None and slower(arch=90) is None
    # few queries, or sm_100: a call that names the backend is served, the automatic choice is another
    assert "triton" in slower(Q=64) and "triton" in slower(arch=100)
    assert why(Q=64) is None and why(arch=100) is None
    for arch in (86, 89, 120):  # a block exceeds the shared memory of a multiprocessor
        assert f"159264 bytes of shared memory; sm_{arch} has 101376" in why(arch=arch)
    reason = "query is torch.float32; have bfloat16, float16 (float32 is not served yet: triton serves it)"
    assert all(why(query_dtype=torch.float32, arch=arch) == reason for arch in NVIDIA)
    assert "16 bytes" in why(D=1020) and "int16" in why(docs=torch.int16)
    assert backend.unsupported(problem(0)) == "query is on cpu, not on a cuda device"


@pytest.mark.parametrize(
    "b, q, keys", [(1, 4096, 10**6), (1, 512, 3000), (4, 1000, 10**5), (1, 40000, 10**6), (1, 600, 1)]
)
def test_split_covers_the_keys(b, q, keys):
    for target in NVIDIA.values():
        blocks = b * -(-q // backend.TILE_Q)
        count, length = backend.split(keys, backend.TILE_S, blocks, target.multiprocessors, backend.TILES_PER_SPLIT)
        assert length % backend.TILE_S == 0 and (count - 1) * length < keys <= count * length
        assert count == 1 or blocks * count <= 4 * target.multiprocessors


#: with an nvcc that knows all of them
BUILT = ("80", "90a", "100a")


def old_nvcc(folder, *unknown):
    """A compiler that refuses architectures as an old nvcc does."""
    path = folder / "nvcc"
    path.write_text(f'#!/bin/sh\ncase "$*" in {"|".join(f"*_{arch},*" for arch in unknown)}) exit 1;; esac\n')
    path.chmod(0o755)
    return str(path)


def test_architectures_that_nvcc_does_not_know_are_left_out(tmp_path, capsys):
    assert build_extensions.available_cuda_arches(old_nvcc(tmp_path, "100a")) == ["80", "90a"]
    assert "can't target sm_100a" in capsys.readouterr().err
    with pytest.raises(build_extensions.CompileError, match="sm_80, the oldest"):
        build_extensions.available_cuda_arches(old_nvcc(tmp_path, "80", "90a"))


BUILD = """
import pathlib, sys, torch
from tools import build_extensions as build
torch.version.cuda = torch.version.cuda or "of the compiler"
assert "retro_kernels._cuda" in [extension.name for extension in build.extensions()]
build.CUDA_ARCHES = tuple(sys.argv[2:])
build.build_cuda(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[1], "_cuda.so"))
"""


@pytest.mark.parametrize("arches", [("90a",), pytest.param(BUILT, marks=pytest.mark.nightly)], ids=",".join)
def test_the_extension_builds_without_spills_and_takes_its_arguments(tmp_path, arches):
    """By the builder of setup.py, with warnings as errors.

    One test, so that parallel workers build it once. sm_90a has both kernels, with mma.sync and with wgmma.
    """
    if (
        shutil.which("nvcc") is None
        or importlib.util.find_spec("pybind11") is None
        or importlib.util.find_spec("triton") is None
    ):
        pytest.skip("needs nvcc, pybind11, and triton for its cuobjdump")
    flags = {"NVCC_APPEND_FLAGS": "-Werror=all-warnings -Xcompiler=-Wall,-Wextra"}
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(tmp_path), *arches],
        cwd=ROOT,
        env=os.environ | flags,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "warning" not in done.stderr.lower(), done.stderr
    library = tmp_path / "_cuda.so"
    for arch in arches:
        check_machine_code(library, arch)
    check_binding(library, arches)


def check_machine_code(library, arch):
    """No spills, tensor instructions, asynchronous copies, and wgmma on sm_90a alone."""
    command = [aot.tool("cuobjdump"), "-arch", f"sm_{arch}", str(library)]
    usage = subprocess.run([*command, "-res-usage"], capture_output=True, text=True, check=True).stdout
    counts = {
        name: (int(reg), int(stack))
        for name, reg, stack in re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+)", usage)
    }
    assert sum("scan" in name for name in counts) == 8 and sum("merge" in name for name in counts) == 2, (arch, usage)
    assert all(stack == 0 for _, stack in counts.values()), (arch, counts)
    code = subprocess.run([*command, "-sass"], capture_output=True, text=True, check=True).stdout
    assert code.count("HMMA.16816") >= 4 * 64 and "LDGSTS" in code and "LDSM" in code, arch
    assert code.count("HGMMA.64x256x16") == (4 * 4 if arch == "90a" else 0), arch


def check_binding(library, arches):
    """Without a GPU a call converts its arguments and returns the runtime's error."""
    spec = importlib.util.spec_from_file_location("retro_kernels._cuda", library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.architectures == ",".join(arches)
    runtime, driver = module.versions()
    assert runtime >= 12000 and driver >= 0
    assert (module.topk_tile_q, module.topk_tile_s) == (backend.TILE_Q, backend.TILE_S)
    if torch.cuda.is_available():
        return  # tests/ops calls it there
    query, key = torch.zeros(1, 8, 64, dtype=torch.bfloat16), torch.zeros(1, 300, 64, dtype=torch.bfloat16)
    indices = torch.zeros(1, 8, 2, dtype=torch.int64)
    tensors = (query, key, None, None, None, indices, torch.zeros(1, 8, 2), indices)
    no_device = {35, 100}  # cudaErrorInsufficientDriver, cudaErrorNoDevice
    assert module.topk_chunks(*map(extensions.view, tensors), 2, False, True, 0, 1, 300, 1, 0) in no_device
    with pytest.raises(TypeError):
        module.topk_chunks(*map(extensions.view, tensors))
