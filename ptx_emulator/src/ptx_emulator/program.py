"""A PTX kernel loaded into the emulator, and its execution over a grid."""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import functools
import hashlib
import math
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy

from . import assemble, module, products, tensor_map, tensor_memory  # noqa: F401, the last three register opcodes
from .parse import Constant, Decimal, Kernel, Memory, PtxError, Register, Statement, Symbol, size_of

_HERE = Path(__file__).parent
_PACKAGED = {"avx2", "bmi2", "f16c", "fma"}  # the processor's features that a wheel's library needs: setup.py
SHARED_BASE = 1024  # as in machine.h
REGION_BITS, FIRST_REGION = 40, 256  # as in machine.h
_MESSAGE_BYTES = 20_000  # a deadlock names every warp
_OUTSIDE = re.compile(r"argument tensor (\d+): byte (-?\d+) of (\d+)")
_SECOND = re.compile(r"by CTA number (\d+) at instruction (\d+)")  # the other access of a race
_WAITS = re.compile(r"at instruction (\d+)$", re.M)  # the place of a warp in a deadlock
_ALIGNED = 64  # bytes: parameters whose address is taken
#: special registers that are one number here; those that differ by thread and CTA, in the order of ptx_run
_FIXED = {"%smid": 0, "%nsmid": 1, "%tid.y": 0, "%tid.z": 0, "%ntid.y": 1, "%ntid.z": 1}
_SPECIALS = ["%tid.x", "%laneid", *(f"%ctaid.{axis}" for axis in "xyz"), "%cluster_ctarank", "shared memory"]
_SPECIALS += [f"%{name}.{axis}" for name in ("cluster_ctaid", "clusterid") for axis in "xyz"]
_SIZES = [f"%{name}.{axis}" for name in ("nctaid", "cluster_nctaid", "nclusterid") for axis in "xyz"]
_KNOWN_SPECIALS = {*_SPECIALS, *_FIXED, *_SIZES, "%ntid.x", "%cluster_nctarank"}
_MOST_WARPS = 64  # in a cluster, because machine.h has one bit for each


class EmulationError(RuntimeError):
    """Error: a launch has a fault, such as a race or a missing wait, at a line of source and an instruction."""


class DeviceAssertion(EmulationError, AssertionError):
    """Error: an assertion of the kernel failed (`tl.device_assert`)."""


@dataclasses.dataclass(frozen=True)
class Counted:
    """Counts of one instruction after a run, or of a line of source, which has no opcode."""

    opcode: str
    line: str
    executed: int  # by CTAs
    requests: int  # by warps, of memory
    units: int  # sectors (global) or wavefronts (shared) of the requests
    fewest: int  # units for their bytes


def built(name: str, command: Sequence[str], source: Path, others: Sequence[Path], version: str) -> Path:
    """Return the file that `command -o file source` makes. It is kept in a cache folder, and one process makes it.

    Args:
        others: files that the source includes. version: of the compiler or the machine.
    Raises OSError: the source does not compile.
    """
    digest = hashlib.sha256("\0".join([version, *command[1:]]).encode())
    for path in (source, *others):
        digest.update(path.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ptx-emulator"
    cache.mkdir(parents=True, exist_ok=True)
    stem, dot, suffix = name.partition(".")
    target = cache / f"{stem}-{digest.hexdigest()[:16]}{dot}{suffix}"
    made = cache / f"unfinished-{name}"
    # The compiler has a session of its own and keeps the lock, so that it ends its work if this process is interrupted.
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            print(f"compiling {source.name}, once: some 20 s of a core", file=sys.stderr, flush=True)
            words = [*command, "-o", str(made), str(source)]
            line = f"{shlex.join(words)} && mv {shlex.join([str(made), str(target)])}"
            options = {"start_new_session": True, "pass_fds": [lock.fileno()], "capture_output": True, "text": True}
            done = subprocess.run(["sh", "-c", line], **options)
            if done.returncode:
                raise OSError(f"{command[0]} does not compile {source.name}:\n{done.stderr.strip()}")
    return target


@functools.cache
def library() -> ctypes.CDLL:
    """Return the emulator's library: of the wheel, or compiled at its first use for this machine."""
    processor = _processor()
    packaged = list(_HERE.glob("ptx.*.so")) if set(processor.split()) >= _PACKAGED else []
    loaded = ctypes.CDLL(str(packaged[0] if packaged else _compiled(processor)))
    loaded.ptx_program.restype = ctypes.c_void_p
    loaded.ptx_record.restype = ctypes.c_int64
    return loaded


def _compiled(processor: str) -> Path:
    found = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), "c++")
    compiler = os.environ.get("CXX", "").split() or [found]
    command = [*compiler, "-std=c++17", "-O3", "-march=native", "-shared", "-fPIC"]
    return built("ptx.so", command, _HERE / "emulator.cpp", sorted(_HERE.glob("*.h")), processor)


def _processor() -> str:
    try:
        return next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        return os.uname().machine


class Program:
    """One PTX kernel, ready to run.

    Args:
        source: the text of a module with one `.entry`, or what `module.kernel` made of it.
    """

    def __init__(self, source: str | Kernel):
        self.kernel: Kernel = module.kernel(source) if isinstance(source, str) else source
        self._numbers: dict[str, int] = {}  # of registers
        self._constants: dict[int, int] = {}  # register -> value
        self._parameters: dict[int, tuple[str, int, int, bool]] = {}  # register -> (name, offset, bytes, signed)
        self._symbols: dict[int, Symbol] = {}  # register -> the symbol whose address it holds
        #: (registers written, registers read, its predicate's register or -1) of each instruction
        self.registers: list[tuple[list[int], list[int], int]] = []
        instructions = [assemble.decode(statement) for statement in self.kernel.statements]
        self.handle = ctypes.c_void_p(library().ptx_program())
        for statement, instruction in zip(self.kernel.statements, instructions):
            self._append(statement, instruction)

    def __del__(self):
        if getattr(self, "handle", None):
            library().ptx_free(self.handle)

    def run(
        self,
        grid: Sequence[int],
        arguments: Sequence,
        *,
        regions: Sequence[Region] = (),
        known: Sequence[tuple[int, int]] = (),
        threads: int | None = None,
        shared_bytes: int = 0,
        checks: bool = True,
        only: range | None = None,
    ) -> None:
        """Execute every CTA of the grid.

        Args:
            grid: CTAs along each dimension: a multiple of the kernel's cluster.
            arguments: the parameters in order: bytes, or the address of a region.
            regions: memory that the kernel may access.
            known: (host address, bytes) of memory whose unchanged address a kernel may find in memory.
            threads: of a CTA; None: as the kernel was compiled for.
            shared_bytes: dynamic shared memory.
            only: some clusters (mostly of one CTA), by their number, x fastest.

        Raises:
            EmulationError: naming what went wrong, where in the source, in which CTA.
        """
        threads, grid, cluster = threads or self.kernel.threads, (*grid, 1, 1)[:3], self.kernel.cluster
        ctas, clusters = math.prod(cluster), [size // own for size, own in zip(grid, cluster)]
        if any(size % own for size, own in zip(grid, cluster)):
            raise ValueError(f"grid: expected a multiple of the cluster {cluster}; got {grid}")
        if ctas > 1 and (threads % 32 or ctas * threads > 32 * _MOST_WARPS):
            raise PtxError(
                f"{self.kernel.name}: not emulated: a cluster of {ctas} CTAs of {threads} threads, which is more than "
                f"{_MOST_WARPS} warps or has a part of a warp"
            )
        given = {
            name: (argument if isinstance(argument, bytes) else struct.pack("<Q", argument)).ljust(size, b"\0")
            for (name, size), argument in zip(self.kernel.parameters, arguments, strict=True)
        }
        addresses, parameters = self._addresses(), b""
        for name, raw in given.items():  # in memory too, for those whose address is taken
            parameters = parameters.ljust(-(-len(parameters) // _ALIGNED) * _ALIGNED, b"\0")
            addresses[name] = len(parameters)
            parameters += raw
        held = {"param": parameters, "const": self.kernel.constant_bytes}
        held = {space: ctypes.create_string_buffer(raw, len(raw)) for space, raw in held.items()}
        places = [(region.address, region.host, region.size) for region in regions]
        places += [(host, host, size) for host, size in known]
        places += [(assemble.GENERIC[space], ctypes.addressof(raw), len(raw)) for space, raw in held.items()]
        shared = {r: s for r, s in self._symbols.items() if s.name in self.kernel.shared}  # differ by CTA
        values = self._constants | {
            r: addresses[s.name] + s.offset for r, s in self._symbols.items() if r not in shared
        }
        specials = [(self._numbers[name], k, 0) for k, name in enumerate(_SPECIALS) if name in self._numbers]
        specials += [(r, _SPECIALS.index("shared memory"), addresses[s.name] + s.offset) for r, s in shared.items()]
        for register, (name, offset, width, signed) in self._parameters.items():
            values[register] = int.from_bytes(given[name][offset : offset + width], "little", signed=signed)
        special = {"%ntid.x": threads, "%cluster_nctarank": ctas, **dict(zip(_SIZES, (*grid, *cluster, *clusters)))}
        values |= {self._numbers[name]: size for name, size in special.items() if name in self._numbers}
        only = only or range(math.prod(clusters))
        where, message = ctypes.c_int64(), ctypes.create_string_buffer(_MESSAGE_BYTES)
        failed = library().ptx_run(
            self.handle, threads, len(self._numbers), _array(ctypes.c_uint32, (*grid, *cluster)),
            ctypes.c_int64(only.start), ctypes.c_int64(only.stop), len(values), _rows(values.items()),
            len(specials), _rows(specials), len(places), _rows(places),
            ctypes.c_int64(size_of(self.kernel.shared) + shared_bytes), ctypes.c_int64(size_of(self.kernel.local)),
            int(checks), ctypes.byref(where), message, _MESSAGE_BYTES,
        )  # fmt: skip
        sys.stdout.write(self._record("printed").astype(numpy.uint8).tobytes().decode(errors="replace"))
        if failed >= 0:
            statement, cta = self.kernel.statements[failed], _cta(where.value, grid)
            said = _SECOND.sub(lambda found: self._place(*map(int, found.groups()), grid), message.value.decode())
            first = f"cluster of {cluster}, its first " if ctas > 1 else ""
            said = _WAITS.sub(lambda found: self._line(int(found[1])), said)
            if outside := _OUTSIDE.search(said):
                number, byte, size = map(int, outside.groups())
                name, (before, after) = regions[number].name, regions[number].around
                where = ', inside its storage: bounds="storage" allows it' if -before <= byte < size + after else ""
                said = said.replace(outside[0], f"argument {name}: byte {byte} of {size}{where}")
            raise (DeviceAssertion if said.startswith("device assertion") else EmulationError)(
                f"{self.kernel.name}: {said}\n  at {statement.line}: {statement.text[:120]}\n"
                f"  {first}CTA {cta} of {grid}"
            )

    def _place(self, cta: int, instruction: int, grid: Sequence[int]) -> str:
        return f"{self._line(instruction)} by CTA {_cta(cta, grid)}"

    def _line(self, instruction: int) -> str:
        statement = self.kernel.statements[instruction]
        return f"at {statement.line} ({statement.text[:60]})"

    def equal_stores(self) -> list[str]:
        """Return the pairs of lines by which CTAs of the last run stored equal bytes to one place without an order."""
        pairs = [{self.kernel.statements[at].line for at in pair} for pair in self._record("equal").reshape(-1, 2)]
        return sorted({" and ".join(sorted(pair)) for pair in pairs})

    def traffic(self) -> numpy.ndarray:
        """Return int64 [tensors, 4] since the first call, which starts the counting.

        The columns are sectors read, written, written in part, and bytes written, each distinct per CTA.
        """
        return self._record("traffic").reshape(-1, 4)

    def _addresses(self) -> dict[str, int]:
        """Return the symbols' addresses: in their own space for shared and local memory, generic for constants."""
        kernel = self.kernel
        return {
            **{name: SHARED_BASE + offset for name, (offset, _) in kernel.shared.items()},
            **{name: offset for name, (offset, _) in kernel.local.items()},
            **{name: assemble.GENERIC["const"] + offset for name, offset in kernel.constants.items()},
        }

    def counts(self, raw: numpy.ndarray | None = None) -> list[Counted]:
        """Return the counts of every instruction, from `raw` or over all runs so far."""
        rows = self.raw_counts() if raw is None else raw
        return [Counted(s.opcode, s.line, *map(int, row)) for s, row in zip(self.kernel.statements, rows)]

    def raw_counts(self) -> numpy.ndarray:
        """Return the numbers of `counts` as int64 [instructions, 4]."""
        return self._record("counts").reshape(-1, 4)

    def trace(self) -> list[int]:
        """Return the numbers of the instructions executed since the first call, which starts the trace."""
        return self._record("trace").tolist()

    def _record(self, which: str) -> numpy.ndarray:
        """Return one of the records that `ptx_record` explains."""
        number = ("counts", "trace", "traffic", "equal", "printed").index(which)
        raw = numpy.zeros(library().ptx_record(self.handle, number, None), numpy.int64)
        library().ptx_record(self.handle, number, raw.ctypes.data_as(ctypes.c_void_p))
        return raw

    def _register(self, name: str) -> int:
        return self._numbers.setdefault(name, len(self._numbers))

    def _source(self, operand, kind: str) -> int:
        """Return the register that holds an operand; immediates, symbols and parameters have one of their own."""
        kernel = self.kernel
        if isinstance(operand, Register):
            if operand.name not in _KNOWN_SPECIALS:
                self._width(operand)  # whether it is declared
            operand = Constant(_FIXED[operand.name]) if operand.name in _FIXED else operand
        if isinstance(operand, Decimal) and kind in ("f32", "f64"):
            raw = struct.pack("<f" if kind == "f32" else "<d", operand.value)
            operand = Constant(int.from_bytes(raw, "little"))
        if isinstance(operand, Register):
            return self._register(operand.name)
        if isinstance(operand, Constant):
            register = self._register(f"constant {operand.value}")
            self._constants[register] = operand.value
            return register
        spaces = (kernel.shared, kernel.local, kernel.constants, dict(kernel.parameters))
        if isinstance(operand, Symbol) and any(operand.name in space for space in spaces):
            register = self._register(f"symbol {operand.name}+{operand.offset}")
            self._symbols[register] = operand
            return register
        if isinstance(operand, Memory) and isinstance(operand.base, Symbol):  # a parameter
            name = operand.base.name
            register = self._register(f"parameter {name}+{operand.offset} {kind}")
            self._parameters[register] = (name, operand.offset, int(kind[1:]) // 8, kind.startswith("s"))
            return register
        raise PtxError(f"operand not understood: {operand}")

    def _width(self, operand) -> int:
        if not isinstance(operand, Register) or operand.name == "_":  # "_": a value that is discarded
            return 4
        name = operand.name.partition("@")[0]  # without the number of the function's instance
        if name.startswith("%parameter."):
            return int(name.partition(" ")[0][len("%parameter.b") :]) // 8
        widths = self.kernel.widths
        width = widths.get(name) or widths.get(name.rstrip("0123456789"))
        if width is None:
            raise PtxError(f"not emulated: register {name}, which the kernel does not declare")
        return width

    def _append(self, statement: Statement, instruction: assemble.Instruction) -> None:
        options = instruction.options
        if instruction.handler == "bra":
            (target,) = options
            if not isinstance(target, Symbol) or target.name not in self.kernel.labels:
                raise PtxError(f"a branch to {target}: no such label")
            options = (self.kernel.labels[target.name],)
        options = [assemble.TYPES[one] if isinstance(one, str) else one for one in options]
        sources = [self._source(operand, instruction.type) for operand in instruction.sources]
        targets = [self._register(operand.name) for operand in instruction.destinations]
        width = instruction.width or (self._width(instruction.destinations[0]) if instruction.destinations else 4)
        predicate = -1 if statement.predicate is None else self._register(statement.predicate)
        if not {instruction.type, instruction.type2} <= assemble.TYPES.keys():
            raise PtxError(f"type not emulated: {statement.text[:80]}")
        kinds = assemble.TYPES[instruction.type], assemble.TYPES[instruction.type2]
        self.registers.append((targets, sources, predicate))
        fields = [*kinds, predicate, int(statement.negate), width, *options, *[0] * (8 - len(options))]
        library().ptx_append(
            self.handle, instruction.handler.encode(), _array(ctypes.c_int64, fields),
            len(targets), _array(ctypes.c_int, targets), len(sources), _array(ctypes.c_int, sources),
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Region:
    """Memory of an argument tensor, at an address far from every other region's and aligned as the tensor is."""

    index: int  # among the regions of a launch
    host: int  # address
    size: int  # bytes
    name: str = "tensor"
    around: tuple[int, int] = (0, 0)  # bytes of the tensor's storage before and after the region

    @property
    def address(self) -> int:
        """Return the address as a kernel sees it."""
        return ((self.index + FIRST_REGION) << REGION_BITS) + (1 << 20) + self.host % 256


def _cta(number: int, grid: Sequence[int]) -> tuple[int, int, int]:
    return number % grid[0], number // grid[0] % grid[1], number // (grid[0] * grid[1])


def _rows(rows):
    return _array(ctypes.c_uint64, (number % 2**64 for row in rows for number in row))


def _array(kind, values):
    values = list(values)
    return (kind * len(values))(*values)
