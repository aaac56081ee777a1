"""Compiled extensions, of this package and of packages that build on it, or the reason why one is absent."""

from __future__ import annotations

import importlib
import importlib.util
import struct
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from .core.arguments import CALLS


@cache
def load(name: str, abi: int, needs: str) -> tuple[ModuleType | None, str | None]:
    """Return (the extension, None), or (None, why it can't be used): it is absent, damaged, or built from sources with
    another `abi`.

    name: full name of the module. needs: tools that build it, named in the reason.
    """
    try:
        spec = importlib.util.find_spec(name)
        why = _damage(Path(spec.origin)) if spec and spec.origin else None
        if why:
            return None, f"the extension {name} is damaged: {why} ({_remedy(needs)})"
        module = importlib.import_module(name)
    except ModuleNotFoundError:
        return None, f"the extension {name} was not built ({_remedy(needs)})"
    except ImportError as error:
        return None, f"the extension {name} does not load: {error}"
    if why := _stale(module, abi):
        return None, f"the extension {name} was built from other sources: {why} ({_remedy(needs)})"
    return module, None


def _damage(path: Path) -> str | None:
    """Why a file is not a whole ELF library. To map a truncated one would kill the process."""
    if not sys.platform.startswith("linux"):
        return None
    with path.open("rb") as file:
        data, size = file.read(64), path.stat().st_size
    if len(data) < 64 or data[:4] != b"\x7fELF":
        return "not an ELF file"
    if data[4:6] != b"\x02\x01":  # 64 bits, little endian
        return None
    sections, entry_bytes, count = *struct.unpack_from("<Q", data, 40), *struct.unpack_from("<HH", data, 58)
    expected = sections + entry_bytes * count  # the section table is at the end
    return f"{size} of {expected} bytes" if size < expected else None


def _stale(module: ModuleType, expected: int) -> str | None:
    """How the extension's bindings differ from the calls of this package."""
    abi = getattr(module, "abi", None)
    if abi != expected:
        return f"its abi is {abi}, the package's {expected}"
    calls = {call.__name__: call for call in CALLS.values()}
    for problem, count in getattr(module, "fields", {}).items():
        fields = len(calls[problem]._fields)
        if count != fields:
            return f"it takes {count} fields of {problem}, the package has {fields}"
    return None


def _remedy(needs: str) -> str:
    """Say how to repair an extension, in a checkout or where the package is installed."""
    if (Path(__file__).resolve().parents[1] / "setup.py").exists():
        return f"python setup.py build_ext --inplace; needs {needs}"
    again = "install retro-kernels again from its source distribution, with pip's --no-build-isolation"
    return f"{again}; needs {needs}"
