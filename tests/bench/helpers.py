"""Shared by these tests: the quick selection, a kernel off by a factor, a record of a compiled kernel."""

import retro_bench
import retro_kernels as rk
from retro_bench.static import entry

QUICK = ["--device", "cpu", "--quiet", "--op", "relative_attention"]
PROFILE = ["profile", *QUICK, "--backend", "reference", "--mode", "fwd"]


def wrong(scale):
    def kernel(**arguments):
        return rk.relative_attention(**arguments, backend="reference") * scale

    return retro_bench.Contender("relative_attention", "mine", kernel, role="ours")


def static_record(op="topk_chunks", values=None, **metrics):
    usual = {
        "kernel": "scan",
        "arch": 90,
        "config": "m64",
        "registers": 100,
        "stack_bytes": 0,
        "shared_static_bytes": 0,
        "shared_dynamic_bytes": 1024,
        "warps": 4,
        "stages": 2,
        "blocks_per_sm": 4,
        "cubin_sha256": "x",
        "instructions": 100,
        "opcode_hash": "h",
        "tensor_instructions": 8,
        "async_copies": 4,
        "copies_in_flight": 2,
        "loop_opcodes": {},
        "loop_issue_slots": 400,
        "loop_tensor_instructions": 8,
        "loop_cycles_at_least": 100.0,
    }
    return entry.row(op, "triton", "scan:a:sm90", "float16", usual | metrics, values) | {"run": "r"}
