"""Replays recorded calls into the C++ extension, without torch:
EXTENSION DUMP REPEATS. Run under valgrind by `instructions`.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import pickle
import sys

ALIGNMENT = 64


def restored(argument, alive: list):
    """A view of memory of its own, which `alive` keeps, for each that was saved."""
    if not isinstance(argument, tuple):
        return argument
    if argument[:1] != ("view",):
        return tuple(restored(part, alive) for part in argument)
    _, memory, kind, sizes, strides = argument
    buffer = ctypes.create_string_buffer(len(memory) + ALIGNMENT)
    alive.append(buffer)
    address = -(-ctypes.addressof(buffer) // ALIGNMENT) * ALIGNMENT
    ctypes.memmove(address, memory, len(memory))
    return (address, kind, sizes, strides)


def main(path: str, dump: str, repeats: int) -> None:
    loader = importlib.machinery.ExtensionFileLoader("_cpu", path)
    extension = importlib.util.module_from_spec(importlib.util.spec_from_loader("_cpu", loader))
    loader.exec_module(extension)
    alive: list = []
    with open(dump, "rb") as f:
        calls = [
            (getattr(extension, name), [restored(a, alive) for a in arguments]) for name, arguments in pickle.load(f)
        ]
    for _ in range(repeats):
        for function, arguments in calls:
            function(*arguments)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
