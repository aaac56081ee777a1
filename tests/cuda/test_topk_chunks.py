"""The CUDA backend of topk_chunks without a GPU: its choice, its build, its machine code and its binding.

tests/emulated/test_cuda.py executes the kernels.
"""

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
from retro_kernels.ops.topk_chunks.call import TopkChunks
from retro_kernels.testing import inputs
from tests.ops.calls import resolved
from tools import build_extensions

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "csrc" / "cuda" / "topk_chunks.cu"


def problem(seed, **options) -> TopkChunks:
    return resolved("topk_chunks", inputs.topk(seed, integers=True, **options))


def test_constants_agree_with_the_header():
    header = SOURCE.with_name("topk_chunks.h").read_text()
    tiles = {"TOPK_TILE_Q = ": backend.TILE_Q, "TOPK_TILE_S = ": backend.TILE_S}
    shared = {"SCAN{256, ": backend.SHARED_BYTES, "SCAN_WGMMA{256, ": backend.SHARED_BYTES_WGMMA}
    assert all(f"{text}{value}" in header for text, value in (tiles | shared).items())
    assert NVIDIA[80].shared_memory >= backend.SHARED_BYTES and NVIDIA[90].shared_memory >= backend.SHARED_BYTES_WGMMA


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


@pytest.mark.nightly
def test_the_extension_builds_without_spills_and_takes_its_arguments(tmp_path):
    """By the builder of setup.py, with warnings as errors.

    One test, so that parallel workers build it once; of an architecture it takes a minute.
    """
    if (
        shutil.which("nvcc") is None
        or importlib.util.find_spec("pybind11") is None
        or importlib.util.find_spec("triton") is None
    ):
        pytest.skip("needs nvcc, pybind11, and triton for its cuobjdump")
    flags = {"NVCC_APPEND_FLAGS": "-Werror=all-warnings -Xcompiler=-Wall,-Wextra"}
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(tmp_path), *BUILT],
        cwd=ROOT,
        env=os.environ | flags,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "warning" not in done.stderr.lower(), done.stderr
    library = tmp_path / "_cuda.so"
    for arch in BUILT:
        check_machine_code(library, arch)
    check_binding(library)


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


def check_binding(library):
    """Without a GPU a call converts its arguments and returns the runtime's error."""
    spec = importlib.util.spec_from_file_location("retro_kernels._cuda", library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.architectures == ",".join(BUILT)
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
