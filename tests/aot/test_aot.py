"""Every Triton kernel compiles for every architecture without a GPU, and none spills but those listed here.

A selection: on sm_90 the presets below, and of the other calls the first of each kernel in bfloat16 and in float32; on
sm_100 and gfx942, and each night on sm_89, sm_120 and AMD's other processors, the calls that need the most shared
memory. With RETRO_KERNELS_EVERY_LAUNCH=1, as each night, all 530 to 570 of every architecture, some seven minutes of a
core each.
"""

import functools
import os
from typing import NamedTuple

import pytest

from retro_kernels.compile import aot
from retro_kernels.compile.target import AMD, KNOWN, NVIDIA
from tests.conftest import INTERPRETER

if INTERPRETER:
    pytest.skip("a process under TRITON_INTERPRET can't compile", allow_module_level=True)


EVERY = os.environ.get("RETRO_KERNELS_EVERY_LAUNCH") == "1"


#: a block has 99 KiB of shared memory there, so other calls than presets may spill
SMALL = tuple(arch for arch, target in NVIDIA.items() if target.shared_memory < 128 << 10)
FULLEST = ("head of 256", "causal d128", "retro d128", "RPT, B=8")
NIGHTLY = (89, 120, "gfx950", "gfx1100")
ARCHES = [
    pytest.param(arch, marks=[pytest.mark.nightly] * (arch in NIGHTLY and not EVERY))
    for arch in (KNOWN if EVERY else (89, 90, 100, 120, *AMD))
]


class Selection:
    def __init__(self, arch: int | str):
        self.arch, self.seen = arch, set()

    def __call__(self, op: str, case: aot.CompileCase) -> bool:
        if EVERY:
            return True
        if self.arch != 90:
            return case.dtype == "bfloat16" and case.case in FULLEST
        if case.dtype == "float16":  # the same code as bfloat16
            return False
        new = (op, case.launch.name, case.dtype) not in self.seen
        self.seen.add((op, case.launch.name, case.dtype))
        return new or preset(op, case.case, case.dtype)


_OPTIONS = ("", " gate mask", " dropout", " four neighbours", " decode")
RETRO = tuple(f"retro d{width}{option}" for option in _OPTIONS for width in (64, 128))
#: op -> cases that must not spill, in bfloat16
PRESETS = {
    "chunked_cross_attention": ("rpt gate", *RETRO),
    "relative_attention": ("causal d64", "causal d128", "documents d128", "dropout d128", "window, both directions"),
    "topk_chunks": ("RPT, B=8", "64 of a million, RETRO", "1 of a million"),
    "relative_logits": ("head", "narrow"),
    "leaky_average": ("wide", "long"),
}

#: the same in float32, on sm_90: the calls that need the most registers
WIDE_PRESETS = {
    "chunked_cross_attention": ("retro d64 gate mask", "retro d128 gate mask", "retro d128 dropout"),
    "relative_attention": ("causal d64", "causal d128"),
}


def preset(op: str, name: str, dtype: str) -> bool:
    return name in {"bfloat16": PRESETS, "float32": WIDE_PRESETS}.get(dtype, {}).get(op, ())


class Spill(NamedTuple):
    kernel: str
    case: str
    dtype: str  # float16 has the same code
    bytes: dict[int | str, int]  # maximum stack of a thread, by architecture
    why: str


_TILE = "the tile that would not spill makes products twice or reads keys twice as often"
_RARE = "heads this wide are no preset"

#: every launch that may spill; `python -m retro_kernels.compile.aot --combinations` compiles every set of options
SPILLS = (
    Spill("cca_backward_key", "grouped heads", "bfloat16", {80: 8}, _TILE),
    Spill("cca_forward", "head of 256", "bfloat16", {80: 216, 90: 232, 100: 248}, _RARE),
    Spill("cca_backward_query", "head of 256", "bfloat16", {80: 1928, 90: 56}, _RARE),
    Spill(
        "cca_backward_query", "retro d128", "bfloat16", {120: 56}, "8 warps do not spill: 1424 us, estimated, not 1172"
    ),
    Spill("relative_query", "own relative query", "bfloat16", {90: 24}, "outside the loop over tiles"),
    Spill("relative_query", "head of 256", "bfloat16", {"gfx950": 8}, _RARE),
    Spill("relative_keys", "plain d64, documents, dropout", "bfloat16", {80: 16}, "outside the loop over tiles"),
)


def allowed(row: aot.Resources) -> int:
    dtype = "bfloat16" if row.dtype == "float16" else row.dtype
    return sum(s.bytes.get(row.arch, 0) for s in SPILLS if (s.kernel, s.case, s.dtype) == (row.kernel, row.case, dtype))


@functools.cache
def rows(arch: int | str) -> tuple[aot.Resources, ...]:
    return tuple(aot.compile_each([arch], select=Selection(arch)))


@pytest.mark.parametrize("arch", ARCHES)
def test_every_launch_compiles_and_fits_shared_memory(arch):
    assert rows(arch)
    for row in rows(arch):
        used = row.shared_static + row.shared_dynamic
        assert used <= KNOWN[arch].shared_memory, f"{row.kernel} {row.case} {row.config} {row.dtype}: {used} bytes"


@pytest.mark.parametrize("arch", [arch for arch in ARCHES if arch.values[0] != "gfx1100"])
def test_no_launch_spills_but_those_listed(arch):
    assert arch != 90 or {row.op for row in rows(arch) if preset(row.op, row.case, "bfloat16")} == set(PRESETS)
    spilled = [
        f"{r.kernel} {r.case} {r.config} {r.dtype}: {r.stack} bytes of stack"
        for r in rows(arch)
        if r.stack > allowed(r) and (arch not in SMALL or preset(r.op, r.case, r.dtype))
    ]
    assert not spilled, "\n".join(spilled)


def test_listed_spills_are_of_launches_that_exist():
    arches = {arch for spill in SPILLS for arch in spill.bytes}
    shipped = {arch: {(c.launch.name, c.case, c.dtype) for _, c in aot.cases(KNOWN[arch])} for arch in arches}
    gone = [s[:3] for s in SPILLS if any(s[:3] not in shipped[arch] for arch in s.bytes)]
    assert not gone


def test_same_launch_is_compiled_once():
    target = KNOWN[90]
    keys = [aot._key(case, target) for _, case in aot.cases(target)]
    assert len(keys) == len(set(keys))
