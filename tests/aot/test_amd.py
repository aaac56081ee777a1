"""AMD's processors: the report of a ROCm build of torch, and how kernels are chosen and compiled for them."""

import json
from importlib import metadata
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import retro_kernels as rk
from retro_bench.records import environment
from retro_kernels import info, triton_lib
from retro_kernels.compile import amdgcn, aot, target, tiles
from retro_kernels.compile.target import AMD, KNOWN, Target
from retro_kernels.core import dispatch
from retro_kernels.ops.topk_chunks import cuda
from retro_kernels.testing import inputs, stub
from tests import standin
from tests.conftest import COMPILED, INTERPRETER

GPU = torch.device("cuda", 0)
OPS = sorted(path.parent.name for path in tiles._OPS.glob("*/tiles.json"))
needs_compiler = pytest.mark.skipif(INTERPRETER or COMPILED, reason="kernels are replaced in this process")


@pytest.mark.parametrize("arch", AMD)
def test_the_target_of_a_rocm_device_is_read_from_its_own_fields(arch):
    with standin.rocm(arch):
        assert target.current_target(GPU) == AMD[arch]
        assert AMD[arch].name == arch and target.platform() == "ROCm"


def test_an_architecture_takes_the_nearest_tiles():
    tables = [80, 90, "gfx942", "gfx1100"]
    served = [KNOWN[arch].nearest(tables) for arch in KNOWN]
    assert served == [80, 80, 80, 90, 90, 90, "gfx942", "gfx942", "gfx1100"]
    assert Target("gfx90a", 65536, 104, "hip", 64).nearest(tables) == "gfx942"
    assert Target("gfx1201", 65536, 64, "hip", 32).nearest(tables) == "gfx1100"
    with pytest.raises(KeyError, match="gfx942"):
        AMD["gfx942"].nearest([80, 90])


@pytest.mark.parametrize("op", OPS)
def test_every_table_has_rows_for_both_warp_sizes(op):
    """AMD's compiler has neither TF32 products in three steps nor a limit of registers."""
    rows = tiles.table(op)
    kinds = {(row["kernel"], row["bytes"]) for row in rows}
    for arch in ("gfx942", "gfx1100"):
        ours = [row for row in rows if row["arch"] == arch]
        assert {(row["kernel"], row["bytes"]) for row in ours} == kinds
        assert {row["precision"] for row in ours} == {"ieee"} and not any("max_registers" in row for row in ours)
    limited = tuple({**row, "max_registers": 168} for row in rows)
    if op != "topk_chunks":  # whose tiles have no limit
        query = tiles.TileQuery(rows[0]["kernel"], 2, 64, 64, 64)
        with tiles.replaced(op, limited):
            chosen = [tiles.choose_tile(op, query, KNOWN[arch]).max_registers for arch in (90, "gfx942")]
        assert chosen == [168, None]


@pytest.mark.parametrize("arch", AMD)
def test_a_rocm_build_uses_triton_and_never_cuda(arch, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with standin.rocm(arch):
        for op, found in dispatch.backends().items():
            assert found["triton"].available == dispatch.exists(op, "triton") and not found["cuda"]
            if dispatch.exists(op, "cuda"):
                assert found["cuda"].reason == "the kernels are CUDA C++; this torch was built for ROCm 6.4.43482"
        with pytest.raises(ValueError, match=r"'cuda' cannot serve this call of topk_chunks: .* built for ROCm"):
            rk.topk_chunks(**inputs.topk(1), backend="cuda")
    call = SimpleNamespace(query=torch.ones(1, dtype=torch.bfloat16), key=torch.ones(1, dtype=torch.bfloat16))
    assert cuda.unsupported_on(call, AMD[arch]) == f"the kernel is CUDA C++; the GPU is {arch}"


@pytest.mark.parametrize("arch, served", [("gfx906", False), ("gfx1030", False), ("gfx90a", True), ("gfx1201", True)])
def test_a_processor_without_matrix_instructions_is_named(arch, served, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with standin.rocm(arch):
        why = triton_lib.unavailable()
        assert why is None if served else why.endswith(f"the GPU is {arch}") and "gfx942" not in why
        monkeypatch.setattr(triton_lib, "device_type", lambda: "cpu")
        monkeypatch.setattr(triton_lib, "current_target", lambda device: target._gpu_target(0))
        assert triton_lib.unsupported_tensors({"q": torch.ones(1)}) == why


def test_a_rocm_build_without_a_gpu_does_not_speak_of_cuda(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    # not by `monkeypatch`: it would restore the stand-in's function after the stand-in has gone
    with standin.rocm(), mock.patch.object(torch.cuda, "is_available", lambda: False):
        assert triton_lib.unavailable().startswith("no ROCm GPU")
        assert "cuda: none (torch.cuda.is_available() is False; torch is built for ROCm)" in info.lines()
    with mock.patch.object(torch.version, "cuda", None), mock.patch.object(torch.cuda, "is_available", lambda: False):
        assert "torch is built for the CPU alone)" in info.lines()[2]


def test_the_report_and_the_records_of_the_harness_name_the_processor(monkeypatch):
    version = metadata.version
    versions = {"triton": "none such", "pytorch-triton-rocm": "triton"}  # ROCm's wheel of triton has a name of its own
    monkeypatch.setattr(metadata, "version", lambda name: version(versions.get(name, name)))
    with standin.rocm():
        assert environment._triton_version() and f"triton {environment._triton_version()}," in info.lines()[0]
        assert "cuda:0: AMD Instinct, gfx942, 304 CUs, warps of 64, 192 GiB, ROCm 6.4.43482" in info.lines()
        assert environment.device("cuda")["arch"] == "gfx942" and environment.throttled("cuda") is None
        assert environment._versions.__wrapped__()["rocm"] == "6.4.43482"


@needs_compiler
@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
def test_a_call_launches_code_for_the_processor(arch):
    pytest.importorskip("triton")
    launched = []
    with standin.rocm(arch), stub.device(arch, launched.append):
        for _ in range(2):
            rk.leaky_average(**inputs.leaky(1, N=3))  # the automatic choice is Triton
    assert len(launched) == 2 and launched[0][:6] == launched[1][:6]


ASSEMBLY = """
        v_mfma_f32_32x32x8_bf16_1k a[0:15], v[2:3], v[4:5], a[0:15]
        v_wmma_f32_16x16x16_bf16 v[0:7], v[8:15], v[16:23], v[0:7]
        ; v_mfma in a comment
        scratch_store_dword off, v6, s32
; Occupancy: 2
amdhsa.kernels:
  - .agpr_count:     32
    .group_segment_fixed_size: 16
    .private_segment_fixed_size: 244
    .sgpr_spill_count: 0
    .vgpr_count:     512
    .vgpr_spill_count: 61
"""


def test_resources_are_read_from_the_assembly():
    assert amdgcn.usage(ASSEMBLY) == amdgcn.Usage(512, 32, 61, 244, 16, 2, 2)
    assert amdgcn.usage(ASSEMBLY.replace("  - .agpr_count:     32\n", "")).agprs == 0
    assert amdgcn.usage(ASSEMBLY.replace("scratch_store", "global_store")).stack == 0  # reserved, and never accessed


@needs_compiler
def test_aot_compiles_for_both_vendors(tmp_path, capsys):
    pytest.importorskip("triton")
    assert not aot.main(["--arch", "90,gfx942", "--kernel", "merge_attention/", "--jobs", "1", "--keep", str(tmp_path)])
    printed = capsys.readouterr()
    rows = [aot.Resources(**json.loads(line)) for line in printed.out.splitlines()]
    assert printed.err == f"{len(rows)} launches, 0 with stack\n"
    assert {row.arch for row in rows} == {90, "gfx942"}
    assert all((row.spills is None) == (row.arch == 90) and row.registers > 0 and row.stack == 0 for row in rows)
    assert {file.suffix for file in tmp_path.iterdir()} == {".cubin", ".amdgcn"}
    for wrong, said in (
        (["--kernel", "nosuch"], "--kernel: expected part of the op/name of a kernel; aot_cases has no 'nosuch'"),
        (
            ["--kernel", "nosuch", "--cache", str(tmp_path / "none")],
            "--kernel: expected part of the op/name of a kernel",
        ),
        (["--keep", str(next(tmp_path.iterdir()))], "--keep: "),
        (["--keep", "a", "--cache", "b"], "--cache, --keep: "),
        (["--jobs", "0"], "--jobs: expected an integer from 1; got 0"),
    ):
        with pytest.raises(SystemExit) as left:
            aot.main(["--arch", "90", *wrong])
        assert left.value.code == 2 and said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        aot.main(["--arch", "90,gfx900"])
    known = "80, 86, 89, 90, 100, 120, gfx942, gfx950, gfx1100"
    assert f"--arch: expected some of {known}; got gfx900" in capsys.readouterr().err
