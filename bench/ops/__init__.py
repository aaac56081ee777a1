"""The ops of `retro_kernels` in the harness, a file each: OPERATOR, CASES, BASELINES. Delete a file and its op is gone.

A baseline is written without the op's reference, and is checked against it before it is timed. `eager` is also the
yardstick of accuracy: plain PyTorch with every product and softmax in the case's type.
"""

from __future__ import annotations

import importlib
import os
import pkgutil

from ..registry import Contender, Operator, register
from ._shared import public

BACKENDS = ("cuda", "triton", "cpu", "reference")
NAMES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")))


def fill() -> None:
    """Register every op with its cases, the backends of `retro_kernels` and the baselines."""
    for name in NAMES:
        module = importlib.import_module(f".{name}", __name__)
        for item in (module.OPERATOR, *module.CASES, *backends(module.OPERATOR), *module.BASELINES):
            register(item)


def backends(operator: Operator) -> list[Contender]:
    """Return every backend of an operator, the reference included."""
    return [_backend(operator, name) for name in BACKENDS]


def _backend(operator: Operator, backend: str) -> Contender:
    def reason(case, dtype: str, device: str) -> str | None:
        status = importlib.import_module("retro_kernels").backends()[operator.name][backend]
        return None if status else status.reason

    return Contender(
        operator.name,
        backend,
        public(operator.name, backend=backend),
        role="reference" if backend == "reference" else "kernel",
        devices=_devices(backend),
        reason=reason,
        outputs=lambda **arguments: operator.call(arguments, backend),
    )


def _devices(backend: str) -> tuple[str, ...]:
    """Return the devices of a backend. Triton's interpreter runs on CPU tensors."""
    if backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1":
        return ("cpu",)
    return {"cpu": ("cpu",), "triton": ("cuda",), "cuda": ("cuda",)}.get(backend, ("cpu", "cuda"))
