"""Every Triton kernel compiles for every architecture without a GPU; at RETRO's shapes CCA does not spill.

A selection: RETRO's presets, and of the other calls the first of each kernel, on sm_90 in each type. `python -m bench static`
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


def preset(op: str, name: str) -> bool:
    return op == "chunked_cross_attention" and name.startswith("retro")


@functools.cache
def rows(arch: int) -> tuple[aot.Row, ...]:
    return tuple(aot.compile_all([arch], select=Selection(arch)))


@pytest.mark.parametrize("arch", KNOWN)
def test_every_launch_compiles_and_fits_shared_memory(arch):
    assert rows(arch)
    for row in rows(arch):
        used = row.shared_static + row.shared_dynamic
        assert used <= KNOWN[arch].shared_memory, f"{row.kernel} {row.case} {row.config} {row.dtype}: {used} bytes"


@pytest.mark.parametrize("arch", [90, 100])
def test_preset_shapes_do_not_spill(arch):
    presets = [row for row in rows(arch) if preset(row.op, row.case) and row.dtype in ("bfloat16", "float16")]
    assert presets
    for row in presets:
        assert row.stack == 0, f"{row.kernel} {row.case} {row.config} {row.dtype}: {row.stack} bytes of stack"


def test_same_launch_is_compiled_once():
    target = KNOWN[90]
    keys = [aot._key(case, target) for _, case in aot.cases(target)]
    assert len(keys) == len(set(keys))
