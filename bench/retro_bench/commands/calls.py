"""FILE.py::FUNCTION on a command line: execute the function's Triton launches on the emulator."""

import argparse
import importlib.util
import os
import sys
from pathlib import Path

from . import exits


def add_call(parser: argparse.ArgumentParser) -> None:
    text = "execute the launches of this function, of any @triton.jit kernel"
    parser.add_argument("call", nargs="?", metavar="FILE.py::FUNCTION", help=text)


def refuse_interpreter() -> None:
    """Raise UsageError if Triton interprets kernels in this process."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise exits.UsageError("TRITON_INTERPRET=1 is set: kernels are interpreted in this process, not compiled")


def launches(target: str, arch: int, counts: bool = True) -> list:
    """Execute FUNCTION(), whose tensors may be on "cuda" or on the CPU, and return a list of `emulate.Launched`.

    Raises: UsageError if there is no such file or function, or it launches nothing; EmulationError or PtxError from a
        kernel.
    """
    from .. import emulate

    file, separator, name = target.partition("::")
    path = Path(file)
    if not separator or not name or not path.is_file():
        raise exits.UsageError(f"{target}: expected FILE.py::FUNCTION with a file that exists")
    with emulate.gpu(arch, counts=counts, cuda=True) as log:
        sys.path.insert(0, str(path.parent.resolve()))
        try:
            spec = importlib.util.spec_from_file_location(path.stem, path)
            module = importlib.util.module_from_spec(spec)
            sys.modules[path.stem] = module
            spec.loader.exec_module(module)
        finally:
            sys.path.pop(0)
        function = getattr(module, name, None)
        if not callable(function):
            raise exits.UsageError(f"{target}: {path.name} has no function {name}")
        function()
    if not log.launches:
        raise exits.UsageError(f"{target}: the call launched no Triton kernel")
    return log.launches


def titled(launch) -> str:
    """Name a launch in one line."""
    chosen = f", {launch.configuration}" if launch.configuration else ""
    return f"{launch.name}, sm_{launch.arch}, grid {launch.grid}, {launch.num_warps} warps{chosen}"
