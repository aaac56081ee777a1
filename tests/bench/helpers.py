"""Shared by these tests: the quick selection, a kernel off by a factor, records of a timed and a compiled kernel."""

import retro_bench
import retro_kernels as rk
from retro_bench.measure import samples
from retro_bench.records import record
from retro_bench.static import entry

QUICK = ["--device", "cpu", "--quiet", "--op", "relative_attention"]
PROFILE = ["profile", *QUICK, "--backend", "reference", "--mode", "fwd"]


def wrong(scale):
    def kernel(**arguments):
        return rk.relative_attention(**arguments, backend="reference") * scale

    return retro_bench.Contender("relative_attention", "mine", kernel, role="ours")


def rates(bytes_per_s: float, flops_per_s: float | None = None) -> dict:
    """Return ceilings of a machine; the same number of FLOPs as of bytes unless given."""
    flops = {"float32": bytes_per_s if flops_per_s is None else flops_per_s, "bfloat16": None}
    return {"bytes_per_s": bytes_per_s, "cached_bytes_per_s": None, "cache_bytes": None, "flops_per_s": flops}


def timed(op="leaky_average", backend="cpu", case="a", seconds=1e-3, status="ok", **more):
    passed = status == "ok"
    names = {"op": op, "backend": backend, "role": "ours", "dtype": "float32", "mode": "fwd", "status": status}
    names |= {"run": "r", "case": {"name": case, "shape": {}}, "git": {"sha": "abc", "dirty": False}, "seed": 1}
    machine = {"environment": {"torch": "2", "triton": None, "threads": 2}, "device": {"name": "a processor"}}
    machine |= {"ceilings": rates(1e10, 1e11)}
    errors = {"frobenius": 1e-7, "maximum": 1e-6, "limit": 1e-6, "yardstick": 5e-7, "passed": passed}
    made = record.blank(**names, **machine) | {
        "reason": None if passed else "because",
        "numerics": {"passed": passed, "checked": "every element", "tensors": {"y": errors}},
        "time": samples.summary([seconds], {"clock": "wall"}) if passed else None,
        "work": {"flops": 1e6, "bytes": 1e6},
        "roofline": {"floor_s": 1e-4, "bound": "memory", "fraction": 1e-4 / seconds},
        "speedup": {"eager": 2.0, "sdpa_plain": 0.1, "toeplitz": 1.5},
    }
    made |= more
    assert record.validate(made) == []
    return made


def static_record(op="topk_chunks", values=None, **metrics):
    usual = {"kernel": "scan", "arch": 90, "config": "m64", "registers": 100, "stack_bytes": 0, "warps": 4, "stages": 2}
    usual |= {"shared_static_bytes": 0, "shared_dynamic_bytes": 1024, "blocks_per_sm": 4, "cubin_sha256": "x"}
    usual |= {"instructions": 100, "opcode_hash": "h", "tensor_instructions": 8, "async_copies": 4}
    usual |= {"copies_in_flight": 2, "loop_opcodes": {}, "loop_issue_slots": 400, "loop_tensor_instructions": 8}
    usual |= {"loop_cycles_at_least": 100.0}
    return entry.row(op, "triton", "scan:a:sm90", "float16", usual | metrics, values) | {"run": "r"}
