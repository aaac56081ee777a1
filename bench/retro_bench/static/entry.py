"""Record of one compiled kernel, shared by the Triton and the CUDA C++ halves of `static`."""

from __future__ import annotations

from typing import Any

from ..records import environment, record


class NoToolchain(RuntimeError):
    """Error: a tool for compiling without a GPU is missing."""


def row(op: str, backend: str, case: str, dtype: str, metrics: dict, values: dict | None = None) -> dict[str, Any]:
    """Return a record without its run id. values: arguments of the call, which tell one case from another."""
    return dict.fromkeys(record.FIELDS) | {
        "schema": record.SCHEMA,
        "run": "",
        "at": record.now(),
        "id": identity(op, backend, case, dtype),
        "op": op,
        "backend": backend,
        "role": "ours",
        "dtype": dtype,
        "mode": "static",
        "status": "ok",
        "git": environment.git_state(),
        "environment": environment.environment() | {"nvcc": environment.nvcc_version()},
        "device": {"type": "none", "name": f"compiled for {architecture(metrics['arch'])}"},
        "case": {"name": case, "shape": record.described(values or {})},
        "static": metrics,
    }


def architecture(arch: int | str) -> str:
    """Return "sm_90" for 90, and the name of an AMD processor as it is."""
    return f"sm_{arch}" if isinstance(arch, int) else arch


def identity(op: str, backend: str, case: str, dtype: str) -> str:
    return record.identity(op, backend, case, dtype, "static")


def selected(name: str, parts: tuple[str, ...] | None) -> bool:
    """Whether an id contains one of the parts; None selects everything."""
    return parts is None or any(part in name for part in parts)
