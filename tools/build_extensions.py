"""Build the extensions for setup.py. `retro_kernels._cpu` and `retro_model._text` need a C++ compiler,
`retro_kernels._cuda` needs nvcc and a torch with CUDA. CONTRIBUTING.md describes the build.

Environment variables: CXX, CXXFLAGS, LDFLAGS, CUDACXX, MAX_JOBS and RETRO_KERNELS_ISAS (docs/install.md).
"""

from __future__ import annotations

import json
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from setuptools import Extension
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
# Not setuptools' build_temp: an editable install deletes it, and `make setup` would compile everything twice.
OBJECTS = ROOT / "build" / f"objects-{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
digest = runpy.run_path(str(ROOT / "retro_kernels" / "built_from.py"))["digest"]  # importing the package needs torch

# -O3: with -O2 of GCC 12, position logits took 1.1 to 1.9 times as long, both attentions 1.05 to 1.4 times
# -Wno-uninitialized: GCC 12 warns inside its own AVX-512 header
CXX_FLAGS = shlex.split(
    "-std=c++17 -O3 -fPIC -fno-math-errno -fno-trapping-math -fno-strict-aliasing -fvisibility=hidden -Wall -Wextra "
    "-Wno-psabi -Wno-ignored-attributes -Wno-maybe-uninitialized -Wno-uninitialized"
)

# Slowest first. The linker keeps the first copy of an inline function that several objects define, so a copy compiled
# for a newer processor never runs on an older one.
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
ISA_FLAGS = {
    "portable": [],
    "avx2": AVX2,
    "avx512": AVX512,
    "avx512bf16": [*AVX512, "-mavx512bf16"],
    "neon": [],
    "neonbf16": ["-march=armv8.2-a+bf16"],
    "sve": ["-march=armv8.2-a+sve+bf16", "-msve-vector-bits=256"],
}

# Code that a compiler must accept, besides the flags and the header, to target an instruction set.
PROBES = {
    "avx512bf16": "__m512 f(__m512 a, __m512bh b) { return _mm512_dpbf16_ps(a, b, b); }",
    "neonbf16": "float32x4_t f(float32x4_t a, bfloat16x8_t b) { return vbfdotq_f32(a, b, b); }",
    "sve": "typedef svfloat32_t Vec __attribute__((arm_sve_vector_bits(256)));\n"
    "Vec f(Vec a, svbfloat16_t b) { return a * svbfdot_f32(a, b, b); }",
}
# Features in /proc/cpuinfo of a processor that runs the instruction set.
FEATURES = {
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "avx512bf16": {"avx512_bf16"},
    "neonbf16": {"bf16"},
    "sve": {"sve", "bf16"},
}
#: Machine options that do not change the instruction set. Every other -m option is kept away from the kernels.
NEUTRAL = ("-m32", "-m64", "-mtune=", "-mcmodel=", "-mllvm", "-mmacosx-version-min=", "-mbranch-protection=")
NEUTRAL += ("-mtls-dialect=", "-mno-omit-leaf-frame-pointer", "-mstackrealign")
#: Options that let the compiler assume finite numbers or reorder sums. Kernels mask with infinities and fix the order.
INEXACT = ("-ffast-math", "-Ofast", "-ffinite-math-only", "-funsafe-math-optimizations", "-fassociative-math")

X86, ARM = ("x86_64", "amd64"), ("aarch64", "arm64")

ONCE = {"isa.cpp", "parallel.cpp"}  # sources without vector code, compiled for the baseline only
# A100 and RTX 30 to 40, Hopper, Blackwell. Those that nvcc doesn't know are left out. Other GPUs compile the PTX of the
# first.
CUDA_ARCHES = ("80", "90a", "100a")

RULES = """\
rule compile
  command = $cmd
  depfile = $out.d
  deps = gcc
  description = $name
rule link
  command = $cmd
  description = $name
"""


class Objects:
    """Objects of one extension. Ninja compiles changed ones in parallel and links them.

    compiler: first words of every compile command.
    """

    def __init__(self, folder: Path, compiler: list[str]):
        self.folder, self.compiler, self.commands = folder, compiler, {}

    def compile(self, source: Path, *flags: str, name: str = "") -> None:
        """Add the object of a source."""
        output = self.folder / f"{name or source.stem}.o"
        self.commands[output] = [*self.compiler, *flags, "-c", str(source.relative_to(ROOT)), "-o", str(output)]

    def link(self, target: Path, before: list[str], after: list[str]) -> None:
        """Compile and link. Raises CompileError if ninja is missing or a command fails."""

        def step(rule: str, output: Path, inputs: str, command: list[str]) -> str:
            shown = f"compile {self.folder.name}/{output.name}" if rule == "compile" else f"link {output.name}"
            text = shlex.join(command).replace("$", "$$")
            return f"build {quoted(output)}: {rule}{inputs}\n  cmd = {text}\n  name = {shown}\n"

        objects = list(self.commands)
        steps = [
            step("compile", output, "", [*command, "-MMD", "-MF", f"{output}.d"])
            for output, command in self.commands.items()
        ]
        command = [*before, *map(str, objects), "-o", str(target), *after]
        steps.append(step("link", target, " " + " ".join(map(quoted, objects)), command))
        self.folder.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        listing = self.folder / "build.ninja"
        listing.write_text(f"builddir = {quoted(self.folder)}\n{RULES}{''.join(steps)}")
        jobs = [f"-j{os.environ['MAX_JOBS']}"] if os.environ.get("MAX_JOBS") else []
        environ = {**os.environ, "NINJA_STATUS": "[%f/%t, %es] "}
        sys.stdout.flush()  # ninja writes there too
        if subprocess.run([ninja(), "-f", str(listing), *jobs], cwd=ROOT, env=environ).returncode:
            raise CompileError(f"ninja failed: {listing}")


def quoted(path: Path) -> str:
    """Escape a path for ninja."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def ninja() -> str:
    try:
        from ninja import BIN_DIR

        return str(Path(BIN_DIR) / "ninja")
    except ImportError:
        if found := shutil.which("ninja"):
            return found
    raise CompileError("ninja not found (pip install ninja)")


def compiler() -> list[str]:
    command = shlex.split(os.environ.get("CXX", "")) or [
        next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), "c++")
    ]
    if shutil.which(command[0]) is None:
        raise CompileError(f"no C++ compiler: {command[0]} not found (set CXX)")
    return command


def extra() -> list[str]:
    return shlex.split(os.environ.get("CXXFLAGS", ""))


def without_architecture(variable: str, words: list[str]) -> list[str]:
    """Return the compiler options of an environment variable without those that change the kernels' results.

    Each kernel is compiled for a fixed instruction set. With -march=native in the user's flags, the code for older
    processors would contain instructions that these processors lack.
    """
    inexact = [word for word in words if word in INEXACT]
    if inexact:
        print(
            f"warning: {variable}: {' '.join(inexact)} is not used for retro_kernels._cpu, whose kernels need "
            "infinities, NaN and sums in a fixed order",
            file=sys.stderr,
        )
        words = [word for word in words if word not in INEXACT]
    dropped = [word for word in words if word.startswith("-m") and not word.startswith(NEUTRAL)]
    if dropped:
        print(
            f"warning: {variable}: {' '.join(dropped)} is not used for retro_kernels._cpu, whose kernels are compiled "
            "for several instruction sets (RETRO_KERNELS_ISAS chooses them)",
            file=sys.stderr,
        )
    return [word for word in words if word not in dropped]


def stamp(name: str, compiler: list[str], flags: list[str]) -> str:
    """Return the definition that makes csrc/built_from.cpp state the sources and the compiler of extension `name`."""
    said = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
    lines = said.splitlines() or ["an unknown compiler"]
    version = next((line for line in lines if " release " in line), lines[0])  # nvcc states it in a later line
    text = re.sub(r"[^ -~]|[\"$`\\]", "?", " ".join([digest(name), version, *flags]))
    return f'-DRETRO_BUILT_FROM="{text}"'


def includes() -> list[str]:
    import pybind11

    return [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}"]


def runnable_isas() -> list[str]:
    """Return the instruction sets that this processor runs; all if the system lists no features."""
    cpuinfo = Path("/proc/cpuinfo")
    features = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set().union(*FEATURES.values())
    return [isa for isa in ISA_FLAGS if FEATURES.get(isa, set()) <= features]


def available_isas(cxx: list[str]) -> list[str]:
    """Return the wanted instruction sets that this compiler can target for this processor family."""
    wanted = os.environ.get("RETRO_KERNELS_ISAS", "").replace(",", " ").split() or list(ISA_FLAGS)
    if unknown := set(wanted) - set(ISA_FLAGS):
        known = ", ".join(ISA_FLAGS)
        raise CompileError(f"RETRO_KERNELS_ISAS: expected some of {known}; got {', '.join(sorted(unknown))}")
    machine = platform.machine().lower()
    headers = {"avx": "immintrin.h"} if machine in X86 else {"neon": "arm_neon.h"} if machine in ARM else {}
    if machine in ARM and sys.platform == "linux":  # other systems do not tell the vector length
        headers["sve"] = "arm_sve.h"
    isas = ["portable"]  # for processors that run none of the others
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / "probe.cpp"
        for isa, flags in ISA_FLAGS.items():
            header = next((header for family, header in headers.items() if isa.startswith(family)), None)
            if isa not in wanted or header is None:
                continue
            probe.write_text(f"#include <{header}>\n{PROBES.get(isa, '')}\n")
            command = [*cxx, *flags, "-fsyntax-only", str(probe)]
            if subprocess.run(command, capture_output=True).returncode == 0:
                isas.append(isa)
            else:
                print(f"warning: this compiler can't target {isa}; its kernels are left out", file=sys.stderr)
    return isas


def link(objects: Objects, target: Path, cxx: list[str], flags: list[str]) -> None:
    undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    more = ["-pthread", *shlex.split(os.environ.get("LDFLAGS", ""))]
    objects.link(target, [*cxx, "-shared", *undefined, *flags], more)


def build_text(folder: Path, target: Path) -> None:
    cxx, flags = compiler(), extra()
    objects = Objects(folder / "text", [*cxx, *CXX_FLAGS, *flags])
    objects.compile(CSRC / "built_from.cpp", stamp("retro_model._text", cxx, flags))
    for source in [*sorted((CSRC / "text").glob("*.cpp")), CSRC / "cpu" / "parallel.cpp"]:
        objects.compile(source, *(includes() if source.stem == "bindings" else []))
    link(objects, target, cxx, flags)


def build_cpu(folder: Path, target: Path) -> None:
    cxx, flags = without_architecture("CXX", compiler()), without_architecture("CXXFLAGS", extra())
    isas = available_isas(cxx)
    have = [f"-DRETRO_HAVE_{isa.upper()}={int(isa in isas)}" for isa in ISA_FLAGS]
    objects = Objects(folder / "cpu", [*cxx, *CXX_FLAGS, *have, *flags])
    objects.compile(CSRC / "built_from.cpp", stamp("retro_kernels._cpu", cxx, flags))
    objects.compile(CSRC / "bindings_cpu.cpp", *includes())
    sources = sorted((CSRC / "cpu").glob("*.cpp"))
    for source in sources:
        if source.name in ONCE:
            objects.compile(source)
    for level, isa in enumerate(ISA_FLAGS):  # portable objects first: see ISA_FLAGS
        for source in sources:
            if isa in isas and source.name not in ONCE:
                own = [*ISA_FLAGS[isa], f"-DRETRO_ISA={isa}", f"-DRETRO_ISA_LEVEL={level}"]
                objects.compile(source, *own, name=f"{source.stem}.{isa}")
    database = [{"directory": str(ROOT), "command": shlex.join(c), "file": c[-3]} for c in objects.commands.values()]
    (ROOT / "compile_commands.json").write_text(json.dumps(database, indent=1))
    link(objects, target, cxx, flags)


def build_cuda(folder: Path, target: Path) -> None:
    nvcc, cxx = cuda_compiler(), compiler()
    assert nvcc is not None  # otherwise EXTENSIONS lacks it
    host = [f"-ccbin={cxx[0]}", "-Xcompiler=-fPIC,-fvisibility=hidden", "-std=c++17", "-O3", "--expt-relaxed-constexpr"]
    arches = available_cuda_arches(nvcc)
    host += [f'-DRETRO_CUDA_ARCHES="{",".join(arches)}"', f"-DRETRO_CUDA_HOPPER={int('90a' in arches)}"]
    gencode = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in arches]
    gencode.append(f"-gencode=arch=compute_{arches[0]},code=compute_{arches[0]}")
    objects = Objects(folder / "cuda", [nvcc, *host])
    objects.compile(CSRC / "built_from.cpp", stamp("retro_kernels._cuda", [nvcc], []))
    for source in [*sorted((CSRC / "cuda").glob("*.cu")), CSRC / "bindings_cuda.cpp"]:
        objects.compile(source, *(gencode if source.suffix == ".cu" else includes()))
    objects.link(target, [nvcc, f"-ccbin={cxx[0]}", "-shared", "-cudart=static"], [])


def available_cuda_arches(nvcc: str) -> list[str]:
    """Return the architectures of CUDA_ARCHES that this nvcc can target. Raises CompileError without the oldest."""
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / "probe.cu"
        probe.touch()
        known = []
        for arch in CUDA_ARCHES:
            command = [nvcc, "--dryrun", f"-gencode=arch=compute_{arch},code=sm_{arch}", "-c", str(probe)]
            if subprocess.run(command, capture_output=True, cwd=folder).returncode == 0:
                known.append(arch)
            else:
                print(f"warning: {nvcc} can't target sm_{arch}; its kernels are left out", file=sys.stderr)
    if CUDA_ARCHES[0] not in known:
        raise CompileError(f"{nvcc} can't target sm_{CUDA_ARCHES[0]}, the oldest architecture that is served")
    return known


def cuda_compiler() -> str | None:
    """Return nvcc if torch was built with CUDA. An empty CUDACXX leaves the CUDA extension out."""
    if os.environ.get("CUDACXX") == "":
        return None
    try:
        import torch
    except ImportError:
        return None
    if torch.version.cuda is None:
        return None
    home = os.environ.get("CUDA_HOME")
    return os.environ.get("CUDACXX") or (home and shutil.which("nvcc", path=f"{home}/bin")) or shutil.which("nvcc")


BUILDERS = {"retro_kernels._cpu": build_cpu, "retro_kernels._cuda": build_cuda, "retro_model._text": build_text}


def extensions() -> list[Extension]:
    """Return the extensions that can be built here. Exits if the tree has no sources to build them from."""
    if not (CSRC / "cpu").is_dir():
        sys.exit(f"retro-kernels: {CSRC} is missing: this source tree is incomplete, and nothing was built")
    names = ["retro_kernels._cpu", "retro_model._text", *(["retro_kernels._cuda"] if cuda_compiler() else [])]
    return [Extension(name, [], optional=True) for name in names]


class Build(build_ext):
    """Build each extension by its builder. If a build fails, remove the library that an earlier build left.

    `setup.py build_ext --inplace`, the command of `make build`, then exits with an error. Any other build warns and
    leaves the extension out, because pip also installs the package on machines without a compiler.
    """

    def run(self) -> None:
        self.strict, self.here = self.inplace and not self.editable_mode, self.inplace or self.editable_mode
        if self.here:  # the build stays on this machine
            os.environ.setdefault("RETRO_KERNELS_ISAS", ",".join(runnable_isas()))
        super().run()

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        ext.optional = not self.strict
        try:
            BUILDERS[ext.name](OBJECTS, target)
        except BaseException as error:
            for old in (target, ROOT / self.get_ext_filename(ext.name)) if self.here else (target,):
                old.unlink(missing_ok=True)
            if not isinstance(error, (CompileError, OSError, ImportError)):
                raise
            remedy = " (an empty CUDACXX leaves this extension out)" if ext.name == "retro_kernels._cuda" else ""
            if not self.strict:
                print(f"warning: {ext.name} is left out, and the package works without it: {error}", file=sys.stderr)
            raise CompileError(f"{ext.name} was not built: {error}{remedy}") from error
