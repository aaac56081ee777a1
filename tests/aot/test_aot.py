"""Every Triton kernel compiles for every architecture without a GPU; at the shapes of the presets none spills.

A selection: the presets below, and of the other calls the first of each kernel, on sm_90 in each type. `python -m bench static`
compiles all (a thousand kernels: too long for every change).
"""

import functools

import pytest

from retro_kernels import aot
from retro_kernels._target import KNOWN
from tests.conftest import INTERPRETER

if INTERPRETER:
    pytest.skip("a process under TRITON_INTERPRET can't compile", allow_module_level=True)


class Selection:
    def __init__(self, arch: int):
        self.arch, self.seen = arch, set()

    def __call__(self, op: str, case: aot.Case) -> bool:
        if case.dtype != "bfloat16" and self.arch != 90:
            return False
        new = (op, case.launch.name, case.dtype) not in self.seen
        self.seen.add((op, case.launch.name, case.dtype))
        return new or (case.dtype == "bfloat16" and preset(op, case.case))


#: op -> cases that must not spill, in bfloat16
PRESETS = {
    "chunked_cross_attention": (
        "retro d64",
        "retro d128",
        "retro d64 gate mask",
        "retro d128 gate mask",
        "retro d64 decode",
        "retro d128 decode",
    ),
    "topk_chunks": ("RPT, B=8", "64 of a million, RETRO", "1 of a million"),
    "relative_logits": ("head", "narrow"),
    "leaky_average": ("wide", "long"),
}


def preset(op: str, name: str) -> bool:
    return name in PRESETS.get(op, ())


@functools.cache
def rows(arch: int) -> tuple[aot.Row, ...]:
    return tuple(aot.compile_all([arch], select=Selection(arch)))


@pytest.mark.parametrize("arch", KNOWN)
def test_every_launch_compiles_and_fits_shared_memory(arch):
    assert rows(arch)
    for row in rows(arch):
        used = row.shared_static + row.shared_dynamic
        assert used <= KNOWN[arch].shared_memory, f"{row.kernel} {row.case} {row.config} {row.dtype}: {used} bytes"


@pytest.mark.parametrize("arch", KNOWN)
def test_preset_shapes_do_not_spill(arch):
    presets = [row for row in rows(arch) if preset(row.op, row.case) and row.dtype == "bfloat16"]
    assert {row.op for row in presets} == set(PRESETS)
    for row in presets:
        assert row.stack == 0, f"{row.kernel} {row.case} {row.config} {row.dtype}: {row.stack} bytes of stack"


def test_same_launch_is_compiled_once():
    target = KNOWN[90]
    keys = [aot._key(case, target) for _, case in aot.cases(target)]
    assert len(keys) == len(set(keys))
