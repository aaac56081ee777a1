"""Builds the optional extensions: `retro_kernels._cpu` and `retro_model._text` (a C++ compiler), `retro_kernels._cuda`
(nvcc and a CUDA torch).

None includes torch's headers. Every csrc/cpu/<op>.cpp is compiled once per instruction set; which one runs is chosen at
run time. Compilation is parallel and incremental, a line an object. Without a compiler the package installs and works
on the reference. Honours CXX, CXXFLAGS, LDFLAGS, CUDACXX and MAX_JOBS, e.g. CXXFLAGS="-g -fsanitize=address,undefined",
and RETRO_KERNELS_ISAS, the instruction sets to compile for, e.g. "portable,avx2": by default those that this processor
runs for a build in place, all that the compiler knows for a wheel.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
# One folder whoever builds: an editable install's own build_temp is thrown away, and `make setup` would compile all of
# it twice.
OBJECTS = ROOT / "build" / f"objects-{sysconfig.get_platform()}-{sys.implementation.cache_tag}"

CXX_FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-strict-aliasing",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
    "-Wno-ignored-attributes",
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",  # GCC 12 warns inside its own AVX-512 header
]

# Slowest first. The linker keeps the first copy of an inline function that several objects define, so the order also
# makes sure that no copy compiled for a newer processor runs on an older one.
ISA_FLAGS = {
    "portable": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": [
        "-mavx2",
        "-mfma",
        "-mf16c",
        "-mavx512f",
        "-mavx512bw",
        "-mavx512vl",
        "-mavx512dq",
        "-mprefer-vector-width=512",
    ],
}
ISA_FLAGS["avx512bf16"] = [*ISA_FLAGS["avx512"], "-mavx512bf16"]
ISA_FLAGS |= {
    "neon": [],
    "neonbf16": ["-march=armv8.2-a+bf16"],
    "sve": ["-march=armv8.2-a+sve+bf16", "-msve-vector-bits=256"],
}

# What a compiler must take to target an instruction set; the intrinsics of those that aren't named come with the flags.
PROBES = {
    "avx512bf16": "__m512 f(__m512 a, __m512bh b) { return _mm512_dpbf16_ps(a, b, b); }",
    "neonbf16": "float32x4_t f(float32x4_t a, bfloat16x8_t b) { return vbfdotq_f32(a, b, b); }",
    "sve": "typedef svfloat32_t Vec __attribute__((arm_sve_vector_bits(256)));\n"
    "Vec f(Vec a, svbfloat16_t b) { return a * svbfdot_f32(a, b, b); }",
}
# What /proc/cpuinfo lists of a processor that runs them.
FEATURES = {
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "avx512bf16": {"avx512_bf16"},
    "neonbf16": {"bf16"},
    "sve": {"sve", "bf16"},
}
X86, ARM = ("x86_64", "amd64"), ("aarch64", "arm64")

ONCE = {"isa.cpp", "parallel.cpp"}  # infrastructure: compiled for the baseline only

# A100 and RTX 30 to 40, Hopper, Blackwell. An nvcc that doesn't know one leaves it out; later GPUs compile the PTX of
# the first.
CUDA_ARCHES = ("80", "90a", "100a")


def run(command: list[str]) -> None:
    """Runs ninja, whose status lines and errors are shown as they come."""
    status = {**os.environ, "NINJA_STATUS": "[%f/%t, %es] "}
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=status
    ) as process:
        for line in process.stdout or ():
            if line.strip() != "ninja: no work to do.":
                print(line, end="", flush=True)
    if process.returncode:
        raise CompileError(f"failed: {shlex.join(command)}")


def ninja_build(folder: Path, jobs: list[tuple[Path, list[str]]], link: tuple[Path, list[str]]) -> None:
    """Runs (object, compile command) and then the link: what changed since the last time, several at a time."""
    try:
        from ninja import BIN_DIR

        ninja = str(Path(BIN_DIR) / "ninja")
    except ImportError:
        ninja = shutil.which("ninja")
    if ninja is None:
        raise CompileError("ninja not found (pip install ninja)")

    def quoted(path) -> str:
        return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

    def command(arguments: list[str]) -> str:
        return shlex.join(arguments).replace("$", "$$")

    lines = [
        f"builddir = {quoted(folder)}",
        "rule compile",
        "  command = $cmd",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = $name",
        "rule link",
        "  command = $cmd",
        "  description = $name",
    ]
    for output, arguments in jobs:
        lines += [f"build {quoted(output)}: compile", f"  cmd = {command([*arguments, '-MMD', '-MF', f'{output}.d'])}"]
        lines += [f"  name = compile {folder.name}/{output.name}"]
    objects = " ".join(quoted(output) for output, _ in jobs)
    lines += [f"build {quoted(link[0])}: link {objects}", f"  cmd = {command(link[1])}"]
    lines += [f"  name = link {link[0].name}", ""]
    folder.mkdir(parents=True, exist_ok=True)
    link[0].parent.mkdir(parents=True, exist_ok=True)
    (folder / "build.ninja").write_text("\n".join(lines))
    jobs_at_once = [f"-j{os.environ['MAX_JOBS']}"] if os.environ.get("MAX_JOBS") else []
    run([ninja, "-f", str(folder / "build.ninja"), *jobs_at_once])


def compiler() -> list[str]:
    command = shlex.split(os.environ.get("CXX", "")) or [
        next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), "c++")
    ]
    if shutil.which(command[0]) is None:
        raise CompileError(f"no C++ compiler: {command[0]} not found (set CXX)")
    return command


def includes() -> list[str]:
    import pybind11

    return [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}"]


def runnable_isas() -> list[str]:
    """The instruction sets that this processor runs; all of them where the system doesn't list its features."""
    cpuinfo = Path("/proc/cpuinfo")
    features = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set().union(*FEATURES.values())
    return [isa for isa in ISA_FLAGS if FEATURES.get(isa, set()) <= features]


def available_isas(cxx: list[str]) -> list[str]:
    """Those instruction sets, of the ones asked for, that this compiler can target for this processor family."""
    wanted = [isa for isa in os.environ.get("RETRO_KERNELS_ISAS", "").replace(" ", "").split(",") if isa] or list(
        ISA_FLAGS
    )
    if unknown := set(wanted) - set(ISA_FLAGS):
        raise CompileError(
            f"RETRO_KERNELS_ISAS: expected some of {', '.join(ISA_FLAGS)}; got {', '.join(sorted(unknown))}"
        )
    machine = platform.machine().lower()
    headers = {"avx": "immintrin.h"} if machine in X86 else {"neon": "arm_neon.h"} if machine in ARM else {}
    if machine in ARM and sys.platform == "linux":  # elsewhere nothing says how long the vectors are
        headers["sve"] = "arm_sve.h"
    isas = ["portable"]  # a processor that has none of the others runs it
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


def link_shared(cxx: list[str], extra: list[str], objects_made: list[str], target: Path) -> tuple[Path, list[str]]:
    undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    link = shlex.split(os.environ.get("LDFLAGS", ""))
    return target, [*cxx, "-shared", *undefined, *extra, *objects_made, "-o", str(target), "-pthread", *link]


def build_text(objects: Path, target: Path) -> None:
    cxx, extra = compiler(), shlex.split(os.environ.get("CXXFLAGS", ""))
    jobs = []
    for source in [*sorted((CSRC / "text").glob("*.cpp")), CSRC / "cpu" / "parallel.cpp"]:
        output = objects / "text" / f"{source.stem}.o"
        flags = includes() if source.stem == "bindings" else []
        jobs.append(
            (output, [*cxx, *CXX_FLAGS, *extra, *flags, "-c", str(source.relative_to(ROOT)), "-o", str(output)])
        )
    ninja_build(objects / "text", jobs, link_shared(cxx, extra, [str(output) for output, _ in jobs], target))


def build_cpu(objects: Path, target: Path) -> None:
    cxx, extra = compiler(), shlex.split(os.environ.get("CXXFLAGS", ""))
    isas = available_isas(cxx)
    have = [f"-DRETRO_HAVE_{isa.upper()}=1" for isa in isas]
    base = [*cxx, *CXX_FLAGS, *have, *extra]
    jobs = []

    def job(source: Path, name: str, flags: list[str]):
        output = objects / "cpu" / f"{name}.o"
        jobs.append((output, [*base, *flags, "-c", str(source.relative_to(ROOT)), "-o", str(output)]))

    job(CSRC / "bindings_cpu.cpp", "bindings_cpu", includes())
    sources = sorted((CSRC / "cpu").glob("*.cpp"))
    for source in sources:
        if source.name in ONCE:
            job(source, source.stem, [])
    for level, isa in enumerate(ISA_FLAGS):  # baseline objects first: see ISA_FLAGS
        for source in sources:
            if isa in isas and source.name not in ONCE:
                job(
                    source,
                    f"{source.stem}.{isa}",
                    [*ISA_FLAGS[isa], f"-DRETRO_ISA={isa}", f"-DRETRO_ISA_LEVEL={level}"],
                )
    database = [{"directory": str(ROOT), "command": shlex.join(c), "file": c[-3]} for _, c in jobs]
    (ROOT / "compile_commands.json").write_text(json.dumps(database, indent=1))
    ninja_build(objects / "cpu", jobs, link_shared(cxx, extra, [str(output) for output, _ in jobs], target))


def build_cuda(objects: Path, target: Path) -> None:
    nvcc, cxx = cuda_compiler(), compiler()
    assert nvcc is not None  # else the extension isn't listed
    host = [f"-ccbin={cxx[0]}", "-Xcompiler=-fPIC,-fvisibility=hidden", "-std=c++17", "-O3", "--expt-relaxed-constexpr"]
    arches = available_cuda_arches(nvcc)
    host += [f'-DRETRO_CUDA_ARCHES="{",".join(arches)}"', f"-DRETRO_CUDA_HOPPER={int('90a' in arches)}"]
    gencode = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in arches]
    gencode.append(f"-gencode=arch=compute_{arches[0]},code=compute_{arches[0]}")
    jobs = []
    for source in [*sorted((CSRC / "cuda").glob("*.cu")), CSRC / "bindings_cuda.cpp"]:
        output = objects / "cuda" / f"{source.stem}.o"
        flags = gencode if source.suffix == ".cu" else includes()
        jobs.append((output, [nvcc, *host, *flags, "-c", str(source.relative_to(ROOT)), "-o", str(output)]))
    objects_made = [str(output) for output, _ in jobs]
    link = [nvcc, f"-ccbin={cxx[0]}", "-shared", "-cudart=static", *objects_made, "-o", str(target)]
    ninja_build(objects / "cuda", jobs, (target, link))


def available_cuda_arches(nvcc: str) -> list[str]:
    """The architectures of CUDA_ARCHES that this nvcc can target. CompileError if it doesn't know the oldest."""
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
    """nvcc, where torch was built with CUDA and there is CUDA source to compile."""
    try:
        import torch
    except ImportError:
        return None
    if (
        torch.version.cuda is None
        or not (CSRC / "bindings_cuda.cpp").exists()
        or not list((CSRC / "cuda").glob("*.cu"))
    ):
        return None
    home = os.environ.get("CUDA_HOME")
    return os.environ.get("CUDACXX") or (home and shutil.which("nvcc", path=f"{home}/bin")) or shutil.which("nvcc")


BUILDERS = {"retro_kernels._cpu": build_cpu, "retro_kernels._cuda": build_cuda, "retro_model._text": build_text}


class Build(build_ext):
    def run(self) -> None:
        if self.inplace or self.editable_mode:  # it stays on this machine
            os.environ.setdefault("RETRO_KERNELS_ISAS", ",".join(runnable_isas()))
        super().run()

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        build = BUILDERS[ext.name]
        try:
            build(OBJECTS, target)
        except (CompileError, OSError, ImportError) as error:
            print(f"warning: {ext.name} is left out, the package works without what it does: {error}", file=sys.stderr)
            raise CompileError(str(error)) from error


if not (CSRC / "cpu").is_dir():
    sys.exit(f"retro-kernels: {CSRC} is missing, so this source tree is not whole; nothing was built")

EXTENSIONS = [Extension(name, [], optional=True) for name in ("retro_kernels._cpu", "retro_model._text")]
if cuda_compiler():
    EXTENSIONS.append(Extension("retro_kernels._cuda", [], optional=True))

# A top-level package `bench` would collide with a user's own: it is installed under another name.
PACKAGES = find_packages(include=["retro_kernels*", "retro_model*"])
PACKAGES += ["retro_bench", *(f"retro_bench.{name}" for name in find_packages("bench"))]

wanted = [] if os.environ.get("RETRO_KERNELS_NO_EXTENSIONS") else EXTENSIONS  # tools/setup.sh compiles them meanwhile
setup(packages=PACKAGES, package_dir={"retro_bench": "bench"}, ext_modules=wanted, cmdclass={"build_ext": Build})
