"""Record of one compiled kernel, shared by the Triton and the CUDA C++ halves of `static`."""

from __future__ import annotations

from typing import Any

from ..emulate import counters
from ..records import environment, record
from . import sass


class NoToolchain(RuntimeError):
    """Error: a tool for compiling without a GPU is missing."""


#: counters of one CTA by `retro_bench.emulate`, where nothing was counted
NOT_EMULATED: dict[str, Any] = dict.fromkeys((*counters.summary([]), "emulation_fault"))


def metrics(
    kernel: str,
    arch: int,
    code: list[sass.Instruction],
    *,
    registers: int,
    stack: int,
    shared: tuple[int, int | None],
    warps: int | None,
    **more,
) -> dict[str, Any]:
    """Return the `static` part of a record.

    shared: static bytes as cuobjdump counts them, and dynamic bytes; None: not declared.
    """
    own = sass.own_shared(shared[0], arch)
    known = warps is not None and shared[1] is not None
    return {
        "kernel": kernel,
        "arch": arch,
        "config": None,
        "registers": registers,
        "stack_bytes": stack,
        "shared_static_bytes": own,
        "shared_dynamic_bytes": shared[1],
        "warps": warps,
        "stages": None,
        "blocks_per_sm": sass.blocks_per_sm(registers, own + shared[1], warps, arch) if known else None,
        "cubin_sha256": None,
        **NOT_EMULATED,
        **more,
        **sass.summarise(code, warps, arch),
    }


def row(op: str, backend: str, case: str, dtype: str, metrics: dict[str, Any]) -> dict[str, Any]:
    """Return a record without its run id."""
    return dict.fromkeys(record.FIELDS) | {
        "schema": record.SCHEMA,
        "run": "",
        "at": record.now(),
        "id": identity(op, backend, case, dtype),
        "kernel": op,
        "backend": backend,
        "role": "kernel",
        "dtype": dtype,
        "mode": "static",
        "status": "ok",
        "git": environment.git_state(),
        "environment": environment.environment() | {"nvcc": environment.nvcc_version()},
        "device": {"type": "none", "name": f"compiled for sm_{metrics['arch']}"},
        "case": {"name": case, "shape": {}},
        "static": metrics,
    }


def identity(op: str, backend: str, case: str, dtype: str) -> str:
    return record.identity(op, backend, case, dtype, "static")


def selected(name: str, parts: tuple[str, ...] | None) -> bool:
    """Whether an id contains one of the parts; None selects everything."""
    return parts is None or any(part in name for part in parts)
