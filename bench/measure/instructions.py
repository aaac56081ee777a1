"""Instructions that one call of a C++ kernel executes, counted by valgrind: unlike time, the same on a busy machine.

The calls into the extension are recorded with their tensors and replayed in a process without torch, once and then
several times: the difference is warm calls. valgrind knows no AVX-512, so the AVX2 build is counted; the count says so.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from retro_kernels.core import native

ISA = "avx2"
ITEM_BYTES = {1: 4, 2: 2, 3: 2, 4: 1, 5: 8, 6: 4, 7: 2, 8: 1, 9: 1}  # by the type codes of retro_kernels/core/native.py
WORKER = Path(__file__).resolve().parent / "instructions_worker.py"
TIMEOUT_S = 300
# two starts of the interpreter differ by some thousand instructions, which a long call drowns
MANY, FEW, LONG = (5, 2, 2 * 10**8)
#: one recorded call: the extension's function, and its arguments, tensors as ("view", bytes, type code, sizes, strides)
Call = tuple[str, list[Any]]


def unavailable() -> str | None:
    """Why nothing can be counted here; None if it can."""
    return native.unavailable("_cpu") or (None if shutil.which("valgrind") else "valgrind is not installed")


def count(call: Callable[[], Any]) -> dict[str, Any] | None:
    """{"instructions", "isa", "tool", "threads"} of one call; None where it can't be told (no valgrind, no call into
    the extension).
    """
    if unavailable():
        return None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        recorded = record(call)
    finally:
        torch.set_num_threads(threads)
    if not recorded:
        return None
    with tempfile.TemporaryDirectory(prefix="retro-count-") as folder:
        dump = Path(folder) / "calls"
        dump.write_bytes(pickle.dumps(recorded))
        once = _replay(dump, 1)
        repeats = FEW if once is None or once > LONG else MANY
        several = None if once is None else _replay(dump, repeats)
    if several is None:
        return None
    return {
        "instructions": (several - once) // (repeats - 1),
        "isa": ISA,
        "tool": "valgrind --tool=callgrind",
        "threads": 1,
    }


def record(call: Callable[[], Any]) -> list[Call]:
    """Every call into the C++ extension that `call` makes, in order, inputs as they were before it."""
    extension, calls = native.extension, []

    class Recorder:
        def __getattr__(self, name: str):
            function = getattr(extension("_cpu"), name)

            def recorded(*arguments):
                calls.append((name, [_saved(a) for a in arguments]))
                return function(*arguments)

            return recorded

    native.extension = lambda name: Recorder() if name == "_cpu" else extension(name)
    try:
        call()
    finally:
        native.extension = extension
    return calls


def _saved(argument: Any) -> Any:
    """`argument` with the memory of every tensor in it; some calls take tuples of arguments."""
    if not isinstance(argument, tuple):
        return argument
    if not (len(argument) == 4 and isinstance(argument[2], tuple) and isinstance(argument[3], tuple)):
        return tuple(map(_saved, argument))
    address, kind, sizes, strides = argument
    length = 0 if 0 in sizes else 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    memory = ctypes.string_at(address, length * ITEM_BYTES[kind]) if length else b""
    return ("view", memory, kind, sizes, strides)


def _replay(dump: Path, repeats: int) -> int | None:
    extension = native.extension("_cpu").__file__
    command = [
        "valgrind",
        "--tool=callgrind",
        "--callgrind-out-file=/dev/null",
        sys.executable,
        "-P",
        "-S",
        "-s",
        str(WORKER),
    ]
    # every start alike
    environ = os.environ | {"RETRO_KERNELS_ISA": ISA, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, extension, str(dump), str(repeats)],
            capture_output=True,
            text=True,
            env=environ,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return None
    return collected(done.stderr) if done.returncode == 0 else None


def collected(text: str) -> int | None:
    """The instruction count in callgrind's closing words.

    >>> collected("==7== Events    : Ir\\n==7== Collected : 1234567\\n")
    1234567
    """
    match = re.search(r"Collected : (\d+)", text)
    return int(match[1]) if match else None
