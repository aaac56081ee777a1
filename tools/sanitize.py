"""Run the C++ under the address, undefined-behaviour and thread sanitizers: `python -m tools.sanitize [NAME ...]`.

For each, the extensions are built in a copy of this tree (build/sanitize/NAME, incremental), and the tests of the ops
and of the text routines run there, fuzz included. A report of the sanitizer ends the process; the exit code is then 1.
"""

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests import trees

#: without tests that start compilers, other processes or Triton: the library would be preloaded there too
NATIVE_ONLY = ["-k", "not triton and not compile and not subprocess and not distributed and not fork"]
SELECTION = ["tests/ops", "tests/model/test_text.py", "tests/model/test_loss.py", *NATIVE_ONLY]
OPS = ("cpu_infrastructure", "cpu_kernels", "contract", "leaky_average", "merge_attention")
THREADED = [*(f"tests/ops/test_{name}.py" for name in OPS), "tests/model/test_text.py", *NATIVE_ONLY]
NATIVE = "avx512bf16,avx512,avx2"


@dataclass(frozen=True)
class Sanitizer:
    """Sanitizer of GCC. `library` is preloaded, because Python is not built with it."""

    name: str
    library: str
    variable: str
    options: str  # value of `variable`, added to FATAL
    tests: list[str]
    flags: str = ""
    threads: int = 1


FATAL = "halt_on_error=1:exitcode=99"  # a report ends the process
TABLE = (
    # no leak detection: Python and torch keep memory to the end of the process
    Sanitizer("address", "libasan.so", "ASAN_OPTIONS", "detect_leaks=0:abort_on_error=0", SELECTION),
    Sanitizer(
        "undefined", "libubsan.so", "UBSAN_OPTIONS", "print_stacktrace=1", SELECTION, "-fno-sanitize-recover=all"
    ),
    # torch's own threads are not instrumented, so the sanitizer must ignore them
    Sanitizer("thread", "libtsan.so", "TSAN_OPTIONS", "ignore_noninstrumented_modules=1", THREADED, threads=3),
)


def compiler() -> str:
    return os.environ.get("CXX", "g++").split()[-1]


def library(name: str) -> str | None:
    """Return the path of a library of the compiler."""
    listed = subprocess.run([compiler(), f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    return str(Path(listed).resolve()) if os.path.isabs(listed) else None


def build(sanitizer: Sanitizer, tree: Path, isas: str) -> None:
    """Build the extensions of a copy. Raises RuntimeError with the compiler's last line of output."""
    flags = f"-fsanitize={sanitizer.name} {sanitizer.flags}"
    done = trees.build(tree, isas, CXXFLAGS=f"-g1 -O1 -fno-omit-frame-pointer {flags}", LDFLAGS=flags)
    if done.returncode:
        raise RuntimeError(f"build under {sanitizer.name}: {(done.stdout.strip().splitlines() or ['no output'])[-1]}")


def test(sanitizer: Sanitizer, tree: Path, more: list[str]) -> subprocess.CompletedProcess:
    # the sanitizer must intercept the exceptions of the C++ library from the start
    preloaded = f"{library(sanitizer.library)} {library('libstdc++.so')}"
    environ = os.environ | {"LD_PRELOAD": preloaded, "OMP_NUM_THREADS": str(sanitizer.threads), "PYTHONPATH": ""}
    environ[sanitizer.variable] = f"{FATAL}:{sanitizer.options}"
    options = ["-x", "-s", "-p", "no:xdist", "--timeout", "1800", *more]
    command = [sys.executable, "-m", "pytest", *sanitizer.tests, *options]
    return subprocess.run(command, cwd=tree, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.sanitize", description=__doc__.split("\n\n")[0])
    add, known = parser.add_argument, {s.name: s for s in TABLE}
    isas = f"build these instruction sets beside portable, and test the best that runs here (default {NATIVE})"
    add("names", nargs="*", metavar="NAME", help=f"run some of {', '.join(known)} (default: all)")
    add("--isas", default=NATIVE, help=isas)
    add("-k", metavar="EXPRESSION", help="run fewer tests, as pytest's -k")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.names) - known.keys():
        parser.error(f"expected some of {', '.join(known)}; got {', '.join(sorted(unknown))}")
    bad = 0
    for sanitizer in [known[name] for name in arguments.names] or TABLE:
        if library(sanitizer.library) is None:
            print(f"{sanitizer.name}: {compiler()} has no {sanitizer.library}: not run", flush=True)
            bad += 1
            continue
        tree = trees.copy(trees.ROOT / "build" / "sanitize" / sanitizer.name, binaries=False)
        begun = time.monotonic()
        build(sanitizer, tree, arguments.isas)
        print(f"{sanitizer.name}: built in {time.monotonic() - begun:.0f} s; running the tests", flush=True)
        done = test(sanitizer, tree, ["-k", arguments.k] if arguments.k else [])
        print(done.stdout if done.returncode else (done.stdout.strip().splitlines() or ["no output"])[-1], flush=True)
        verdict = f"REPORTED OR FAILED (exit code {done.returncode})" if done.returncode else "clean"
        print(f"{sanitizer.name}: {verdict}", flush=True)
        bad += done.returncode != 0
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
