"""Record of one compiled kernel, shared by the Triton and the CUDA C++ halves of `static`."""

from __future__ import annotations

from typing import Any

from ..records import environment, record


class NoToolchain(RuntimeError):
    """Error: a tool for compiling without a GPU is missing."""


def row(op: str, backend: str, case: str, dtype: str, metrics: dict, values: dict | None = None) -> dict[str, Any]:
    """Return a record without its run id. values: arguments of the call, which tell one case from another."""
    arch = metrics["arch"]
    names = {"op": op, "backend": backend, "dtype": dtype, "mode": "static", "role": "ours", "status": "ok"}
    tools = {"git": environment.git_state(), "environment": environment.environment()}
    tools["environment"] |= {"nvcc": environment.nvcc_version()}
    device = {"type": "none", "name": f"compiled for {f'sm_{arch}' if isinstance(arch, int) else arch}"}
    content = {"name": case, "shape": record.described(values or {})}
    return record.blank(**names, **tools, run="", device=device, case=content, static=metrics)


def identity(op: str, backend: str, case: str, dtype: str) -> str:
    return record.identity(op, backend, case, dtype, "static")


def selected(name: str, parts: tuple[str, ...] | None) -> bool:
    """Whether an id contains one of the parts; None selects everything."""
    return parts is None or any(part in name for part in parts)
