"""Static metrics of Triton kernels that were compiled for an AMD processor."""

from __future__ import annotations

from typing import Any

from ptx_emulator.estimate import machine_code
from retro_kernels.compile.aot import Resources
from retro_kernels.compile.target import Target

_SIMDS = 4  # per compute unit (CDNA), or per work-group processor with two compute units (RDNA)
#: metrics that are read from NVIDIA's machine code only
_UNREAD = ("async_copies", "copies_in_flight", "loop_issue_slots", "loop_tensor_instructions", "loop_cycles_at_least")


def metrics(compiled: Resources, target: Target) -> dict[str, Any]:
    """Return the metrics of a kernel. registers: VGPRs, the AGPRs included. tensor_instructions: MFMA or WMMA."""
    shared = compiled.shared_static + compiled.shared_dynamic
    lds = target.shared_memory * (1 if target.warp_size == 64 else 2)  # bytes per compute unit or work-group processor
    fit = [compiled.waves * _SIMDS // compiled.num_warps, *([lds // shared] if shared else [])]
    return {
        "kernel": compiled.kernel,
        "arch": compiled.arch,
        "config": compiled.config,
        "registers": compiled.registers,
        "agprs": compiled.agprs,
        "spilled_registers": compiled.spills,
        "stack_bytes": compiled.stack,
        "shared_static_bytes": compiled.shared_static,
        "shared_dynamic_bytes": compiled.shared_dynamic,
        "warps": compiled.num_warps,
        "stages": compiled.num_stages,
        "blocks_per_sm": 0 if shared > target.shared_memory else min(fit),
        "cubin_sha256": compiled.binary,
        "tensor_instructions": compiled.matrix,
        **machine_code.NOT_EMULATED,
        **dict.fromkeys(_UNREAD),
    }
