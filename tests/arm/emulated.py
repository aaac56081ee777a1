"""Run the CPU kernels of 64-bit ARM on another processor: cross-compiled, under qemu's user-mode emulator.

`Extension` stands in for `retro_kernels._cpu`. It sends a call's tensors to the emulated process and copies them back
to their addresses. An emulator's time means nothing.
"""

import ctypes
import functools
import os
import shutil
import struct
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.build_extensions import CXX_FLAGS, ISA_FLAGS

ROOT = Path(__file__).resolve().parent.parent.parent
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
#: emulated processor of each instruction set; the default vectors of `max` have 64 bytes
PROCESSORS = {"neon": "max", "neonbf16": "max", "sve": "max,sve-default-vector-length=32"}
ISAS = tuple(PROCESSORS)
ROOT_OF_TARGET = f"/usr/{COMPILER.removesuffix('-g++')}"  # where Debian has the target's libraries
ELEMENT_BYTES = (0, 4, 2, 2, 1, 8, 4, 2, 1, 1)  # by type code, csrc/view.h


def missing() -> str | None:
    """Name the tools that this machine lacks to compile and run the kernels; None if it has all."""
    absent = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
    return f"no {' and no '.join(absent)} (Debian: g++-aarch64-linux-gnu, qemu-user)" if absent else None


def build(isa: str, folder: Path, kernels: tuple[str, ...] | None = None) -> Path:
    """Build the driver, unless it is newer than its sources. kernels: sources without the attentions; default all."""
    level = list(ISA_FLAGS).index(isa)
    flags = [*CXX_FLAGS, *ISA_FLAGS[isa], f"-DRETRO_ISA={isa}", f"-DRETRO_ISA_LEVEL={level}", "-O1"]
    csrc, here = ROOT / "csrc", Path(__file__).parent
    sources = [*sorted((csrc / "cpu").glob("*.cpp")), here / "driver.cpp", here / "primitives.cpp"]
    sources.remove(csrc / "cpu" / "isa.cpp")  # the driver has one instruction set; `build_choice` has all
    if kernels is not None:
        sources = [s for s in sources if s.stem in (*kernels, "parallel", "driver", "primitives")]
        flags += ["-DWITHOUT_ATTENTION"] + ["-DWITHOUT_RELATIVE_LOGITS"] * ("relative_logits" not in kernels)
    newest = max(p.stat().st_mtime for p in [*sources, *csrc.glob("*.h"), *(csrc / "cpu").glob("*.h")])
    driver = folder / f"driver-{isa}"
    if driver.exists() and driver.stat().st_mtime > newest:
        return driver
    folder.mkdir(parents=True, exist_ok=True)
    objects = [folder / f"{source.stem}.{isa}.o" for source in sources]

    def compiled(source: Path, output: Path) -> None:
        command = [COMPILER, *flags, f"-I{csrc}", "-c", str(source), "-o", str(output)]
        subprocess.run(command, check=True, capture_output=True, text=True)

    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
        list(pool.map(compiled, sources, objects))
    subprocess.run([COMPILER, *map(str, objects), "-o", str(driver), "-pthread"], check=True, capture_output=True)
    return driver


def emulator(processor: str, program: Path) -> list[str]:
    return [EMULATOR, "-cpu", processor, "-L", ROOT_OF_TARGET, str(program)]


def build_choice(folder: Path) -> Path:
    """Build a program that prints the instruction sets that the package finds where it runs."""
    program = folder / "choice"
    have = [f"-DRETRO_HAVE_{isa.upper()}={int(isa in ISAS)}" for isa in ISA_FLAGS]
    sources = [ROOT / "csrc" / "cpu" / "isa.cpp", Path(__file__).parent / "choice.cpp"]
    command = [COMPILER, *CXX_FLAGS, *have, "-O1", f"-I{ROOT / 'csrc'}", *map(str, sources), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return program


class Extension:
    """`retro_kernels._cpu` on an emulated processor."""

    def __init__(self, driver: Path, isa: str):
        self.isa, command = isa, emulator(PROCESSORS[isa], driver)
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.lock = threading.Lock()
        self.calls = 0

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()

    def advise_huge_pages(self, address: int, size: int) -> None:
        """Do nothing."""

    def __getattr__(self, name: str):
        return functools.partial(self._call, name)

    def _call(self, name: str, *arguments) -> None:
        views: list[tuple[int, int]] = []
        message = b"".join([name.encode(), b"\n", _packed(arguments, views)])
        with self.lock:
            self.calls += 1
            self.process.stdin.write(message)
            self.process.stdin.flush()
            status = self.process.stdout.read(1)
            if status != b"\0":
                raise RuntimeError(self.process.stdout.readline().decode().strip() or "the emulated process ended")
            for address, size in views:
                data = self.process.stdout.read(size)
                if data != ctypes.string_at(address, size):  # leave inputs alone, which may be shared
                    ctypes.memmove(address, data, size)


def _packed(x, views: list[tuple[int, int]]) -> bytes:
    if x is None:
        return b"n"
    if isinstance(x, float):
        return struct.pack("=cd", b"d", x)
    if isinstance(x, int):
        return struct.pack("=cq", b"i", x)
    if len(x) == 4 and isinstance(x[0], int):  # `extensions.view`: address, type code, sizes, strides
        address, code, sizes, strides = x
        empty = 0 in sizes
        size = 0 if empty else (1 + sum((n - 1) * s for n, s in zip(sizes, strides))) * ELEMENT_BYTES[code]
        views.append((address, size))
        head = struct.pack(f"=c{3 + 2 * len(sizes)}q", b"v", code, len(sizes), *sizes, *strides, size)
        return head + ctypes.string_at(address, size)
    return struct.pack("=cq", b"t", len(x)) + b"".join(_packed(part, views) for part in x)
