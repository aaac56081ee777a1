"""Static metrics of compiled kernels: registers, shared memory, CTAs per SM, opcodes and the hot loop. Needs no GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton

from .. import counters, launches
from . import sass

#: counters of one CTA, for a record of a launch that was not executed
NOT_EMULATED: dict[str, Any] = dict.fromkeys((*counters.summary([]), "emulation_fault"))


class Function(NamedTuple):
    """One function of a cubin. usage: REG, STACK, SHARED and LOCAL, as cuobjdump counts them."""

    usage: dict[str, int]
    code: list[sass.Instruction]


def functions(cubin: Path) -> dict[str, Function]:
    """Return the functions of a cubin by name, read by the cuobjdump that Triton bundles."""
    text, code = _cuobjdump("-res-usage", cubin), sass.functions(_cuobjdump("-sass", cubin))
    found = re.findall(r"Function (\S+):\s*\n(.*REG:.*)", text)
    numbers = re.compile(r"\b(REG|STACK|SHARED|LOCAL):(\d+)")
    return {
        name: Function({key: int(value) for key, value in numbers.findall(line)}, code.get(name, []))
        for name, line in found
    }


def _cuobjdump(option: str, cubin: Path) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, option, str(cubin)], capture_output=True, text=True, check=True).stdout


def static_record(launch, arch: int) -> dict[str, Any]:
    """Return the static metrics of a launch on a GPU of `arch`."""
    made = launches.machine_code(launch, arch)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        read = functions(Path(file.name))
    longest = max(read.values(), key=lambda one: len(one.code))
    return metrics(launch.kernel.__name__, arch, longest, made.metadata.shared, made.metadata.num_warps)


def metrics(
    kernel: str, arch: int, function: Function, dynamic_shared: int | None, warps: int | None, **more
) -> dict[str, Any]:
    """Return the static metrics of a function. None: the source does not declare it. more: fields to replace."""
    own, registers = sass.own_shared(function.usage["SHARED"], arch), function.usage["REG"]
    known = warps is not None and dynamic_shared is not None
    return {
        "kernel": kernel,
        "arch": arch,
        "config": None,
        "registers": registers,
        "stack_bytes": function.usage["STACK"],
        "shared_static_bytes": own,
        "shared_dynamic_bytes": dynamic_shared,
        "warps": warps,
        "stages": None,
        "blocks_per_sm": sass.blocks_per_sm(registers, own + dynamic_shared, warps, arch) if known else None,
        "cubin_sha256": None,
        **NOT_EMULATED,
        **more,
        **sass.summarise(function.code, warps, arch),
    }
