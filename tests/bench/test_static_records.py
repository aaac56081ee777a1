"""Records of compiled kernels: regressions, and the reader of SASS listings."""

import dataclasses
import re
import time
import types

import pytest

from ptx_emulator import machines
from ptx_emulator.estimate import sass
from retro_bench.commands import options
from retro_bench.commands.estimate import interval
from retro_bench.records import record
from retro_bench.report import terminal
from retro_bench.static import entry, fingerprint, regressions, triton_kernels
from retro_kernels.compile import aot, triton_private
from retro_kernels.compile.target import AMD, KNOWN, NVIDIA
from tests.bench.helpers import static_record
from tests.conftest import INTERPRETER


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stack_bytes": 16}, "spills"),
        ({"blocks_per_sm": 3}, "CTAs per SM"),
        ({"tensor_instructions": 0}, "tensor instructions gone"),
        ({"async_copies": 0}, "asynchronous copies gone"),
        ({"copies_in_flight": 0}, "a pipelined loop waits for all its copies"),
        ({"loop_issue_slots": 440}, "hot loop"),
    ],
)
def test_static_regressions(change, words):
    old, new = static_record(), static_record(**change)
    assert [words in line for line in regressions.regressions([old], [new])] == [True]
    assert regressions.regressions([new], [old]) == regressions.regressions([new], [new]) == []


def test_static_vanished_and_larger_tile():
    old = static_record()
    assert "no longer compiled" in regressions.regressions([old], [])[0]
    assert regressions.vanished(["a", "b"], ["b", "c"]) == ["a: no longer compiled"]
    twice = static_record(loop_issue_slots=800, loop_tensor_instructions=16)  # twice the work a pass
    assert regressions.regressions([old], [twice]) == []


LISTING = """
		Function : kernel
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDGSTS.E.128 [R2], [R4] ;
        /*0020*/                   MOV R3, 0x10 ;
        /*0030*/                   IADD3 R3, R3, 0x1, RZ ;
        /*0040*/               @P1 BRA 0x30 ;
        /*0050*/                   HMMA.16816.F32.BF16 R4, R4, R8, R4 ;
        /*0060*/                   HMMA.16816.F32.BF16 R4, R4, R8, R4 ;
        /*0070*/              @!P0 BRA 0x50 ;
        /*0080*/                   @P2 BRA 0x20 ;
        /*0090*/                   EXIT ;
        /*00a0*/                   BRA 0xa0;
        /*00b0*/                   NOP;
"""


def test_the_hot_loop_is_the_innermost_with_tensor_instructions():
    code = sass.functions(LISTING)["kernel"]
    summary = sass.summarise(code, warps=4, arch=90)
    assert [i.name for i in sass.hot_loop(code)] == ["HMMA", "HMMA", "BRA"]
    assert summary["tensor_instructions"] == 2 and summary["async_copies"] == 1 and summary["loop_issue_slots"] == 12
    assert summary["loop_cycles_at_least"] == max(3 * 4 / 4, 2 * 2 * 16 * 8 * 16 * 4 / 4096)
    assert sass.summarise(code[:2], 4, 90)["loop_issue_slots"] is None


PIPELINED = """
		Function : kernel
        /*0000*/                   LDGSTS.E.128 [R2], [R4] ;
        /*0010*/                   DEPBAR.LE SB0, 0x0 ;
        /*0020*/                   DEPBAR.LE SB0, 0x3 ;
        /*0030*/                   LDGSTS.E.128 [R2], [R4] ;
        /*0040*/                   DEPBAR.LE SB0, 0x2 ;
        /*0050*/               @P0 BRA 0x20 ;
        /*0060*/                   DEPBAR.LE SB0, 0x1 ;
        /*0070*/                   HMMA.16816.F32.BF16 R4, R4, R8, R4 ;
        /*0080*/               @P1 BRA 0x60 ;
        /*0090*/               @P2 BRA 0x10 ;
"""


def test_copies_in_flight_are_those_of_innermost_loops_that_copy():
    assert sass.copies_in_flight(sass.functions(PIPELINED)["kernel"]) == 2
    assert sass.copies_in_flight(sass.functions(PIPELINED.replace("0x3", "0x0"))["kernel"]) == 0
    assert sass.copies_in_flight(sass.functions(LISTING)["kernel"]) is None


@pytest.mark.parametrize(
    ("opcode", "flops"),
    [
        ("HMMA.16816.F32.BF16", 2 * 16 * 8 * 16),
        ("HMMA.1688.F32.TF32", 2 * 2 * 16 * 8 * 8),
        ("HGMMA.64x128x16.F32.BF16", 2 * 64 * 128 * 16 / 4),
        ("HGMMA.64x64x8.F32.TF32", 2 * 2 * 64 * 64 * 8 / 4),
        ("IADD3", 0),
    ],
)
def test_the_work_of_a_tensor_instruction(opcode, flops):
    """Per warp; TF32 runs at half the rate of the half types and counts double."""
    assert sass._tensor_flops(opcode) == flops


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "blocks"),
    [(32, 0, 4, 16), (255, 0, 8, 1), (64, 100 << 10, 4, 2), (64, 228 << 10, 4, 0)],
)
def test_blocks_per_sm(registers, shared, warps, blocks):
    assert sass.blocks_per_sm(registers, shared, warps, 90) == blocks


@pytest.mark.skipif(INTERPRETER, reason="a process under TRITON_INTERPRET can't compile")
def test_a_fingerprint_is_the_same_wherever_triton_lies():
    pytest.importorskip("triton")
    _, case = next(aot.cases(KNOWN[90]))
    source, options = triton_private.source(case.launch, KNOWN[90])
    moved = dataclasses.replace(options, extern_libs=(("libdevice", "elsewhere/libdevice.10.bc"),))
    deeper = dataclasses.replace(options, num_stages=options.num_stages + 1)
    one, same, other = (fingerprint.of_launch(source, each) for each in (options, moved, deeper))
    assert one == same != other


def test_an_estimates_interval_is_wider_for_attention_which_comes_out_too_fast():
    assert [round(time) for time in interval("topk_chunks", 82)] == [69, 100]
    assert [round(time) for time in interval("relative_attention", 76)] == [64, 100]


@pytest.mark.parametrize("arch", NVIDIA)
def test_both_tables_of_gpus_agree(arch):
    """`retro_kernels` chooses tiles by three fields; `ptx_emulator` has a table of its own, because it stands alone."""
    known, device = NVIDIA[arch], machines.DEVICES[arch]
    shared = (known.arch, known.shared_memory, known.multiprocessors)
    assert shared == (device.arch, device.shared_memory_per_block_optin, device.multi_processor_count)


def test_no_architecture_is_in_one_table_only():
    assert set(NVIDIA) == set(machines.DEVICES) and {m.arch for m in machines.MACHINES.values()} <= set(NVIDIA)
    assert set(NVIDIA) == set(options.EVERY_ARCH) and set(AMD) == set(options.AMD_ARCHES)


def amd_resources(**changes):
    usual = {"op": "leaky_average", "kernel": "leaky_scan", "case": "wide", "config": "m64", "dtype": "bfloat16"}
    usual |= {"arch": "gfx942", "registers": 300, "stack": 0, "shared_static": 0, "shared_dynamic": 16384}
    usual |= {"num_warps": 4, "num_stages": 2, "binary": "x", "agprs": 44, "spills": 0, "matrix": 12, "waves": 1}
    return aot.Resources(**usual | changes)


#: (processor, waves per SIMD, warps, bytes of LDS) -> CTAs
FITS = {("gfx942", 1, 4, 16384): 1, ("gfx942", 8, 4, 16384): 4, ("gfx942", 4, 8, 0): 2, ("gfx942", 1, 4, 65537): 0}
FITS |= {("gfx950", 8, 4, 65537): 2, ("gfx1100", 8, 4, 32768): 4}


@pytest.mark.parametrize("kernel", FITS)
def test_blocks_of_an_amd_compute_unit(kernel):
    compiled = amd_resources(**dict(zip(("arch", "waves", "num_warps", "shared_dynamic"), kernel, strict=True)))
    assert triton_kernels.amd_metrics(compiled, AMD[compiled.arch])["blocks_per_sm"] == FITS[kernel]


def test_amd_kernels_are_listed_in_a_table_of_their_own(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    metrics = triton_kernels.amd_metrics(amd_resources(spills=3, stack=16), AMD["gfx942"])
    row = entry.row("leaky_average", "triton", "leaky_scan:wide:gfx942", "bfloat16", metrics) | {"run": "r"}
    assert record.validate(row) == [] and row["device"]["name"] == "compiled for gfx942"
    lines = terminal.static([static_record(), row]).splitlines()
    assert lines[0].split()[:2] == ["kernel", "case"] and "AGPRs" not in lines[0]
    head, values = (re.split(r"\s{2,}", line.strip()) for line in (lines[-3], lines[-1]))
    shown = dict(zip(head, values, strict=True))
    names = ("VGPRs", "AGPRs", "spills", "stack", "LDS", "MFMA")
    assert [shown[name] for name in names] == ["300", "44", "3", "16", "16384", "12"]
    clean = row | {"static": row["static"] | {"stack_bytes": 0}}
    assert "spills: 16 stack bytes" in regressions.regressions([clean], [row])[0]


def test_a_compile_that_fails_or_is_interrupted_reads_nothing_more(monkeypatch, tmp_path):
    begun, cases = [], [types.SimpleNamespace(recorded=False, id=i) for i in range(3)]
    monkeypatch.setattr(triton_kernels, "_read", lambda launch, *_: begun.append(launch.id) or time.sleep(0.5))
    monkeypatch.setattr(aot, "compile_each", lambda *_, **__: cases[:2])
    with pytest.raises(ValueError, match="shorter"):
        list(triton_kernels.rows([90], cases, cases, tmp_path, 1))
    assert begun == [0]
