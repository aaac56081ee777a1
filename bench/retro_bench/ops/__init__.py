"""The ops of `retro_kernels` in the harness, a file each: OPERATOR, CASES, BASELINES. Delete a file and its op is gone.

A baseline is written without the op's reference, and is checked against it before it is timed. `eager` is also the
yardstick of accuracy: plain PyTorch with every product and softmax in the case's type.
"""

import importlib
import importlib.util
import os
import pkgutil
from pathlib import Path

from ..registry import Contender, Operator, register
from ._shared import public

BACKENDS = ("cuda", "triton", "cpu", "reference")
NAMES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")))


def fill() -> None:
    """Register every op with its cases, the backends that `retro_kernels` ships for it, and the baselines."""
    package = importlib.util.find_spec("retro_kernels").submodule_search_locations[0]  # without an import
    for name in NAMES:
        module = importlib.import_module(f".{name}", __name__)
        folder = Path(package, "ops", name)
        shipped = [b for b in BACKENDS if (folder / b).is_dir() or (folder / f"{b}.py").is_file()]
        backends = (_backend(module.OPERATOR, backend) for backend in shipped)
        for item in (module.OPERATOR, *module.CASES, *backends, *module.BASELINES):
            register(item)


def _backend(operator: Operator, backend: str) -> Contender:
    devices = {"cpu": ("cpu",), "triton": ("cuda",), "cuda": ("cuda",), "reference": ("cpu", "cuda")}[backend]
    if backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1":
        devices = ("cpu",)  # the interpreter runs on CPU tensors

    def reason(case, dtype: str, device: str) -> str | None:
        status = importlib.import_module("retro_kernels").backends()[operator.name][backend]
        return None if status else status.reason

    return Contender(
        operator.name,
        backend,
        public(operator.name, backend=backend),
        role="reference" if backend == "reference" else "ours",
        devices=devices,
        reason=reason,
        outputs=lambda **arguments: operator.call(arguments, backend),
    )
