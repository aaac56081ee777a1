"""The build of the extensions with a stand-in for the compiler: failures, stale libraries, flags and `info`."""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from retro_kernels import built_from, info
from tools import build_extensions as build

pytest.importorskip("pybind11")
pytest.importorskip("ninja")
ROOT = Path(__file__).resolve().parent.parent
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
#: It logs its arguments, makes the files that the options name, and fails for a source that is not C++.
STAND_IN = """#!{python}
import pathlib, sys
words = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(" ".join(words) + "\\n")
if words == ["--version"]:
    sys.exit(print("stand-in 1.2.3"))
if "-c" in words and "no C++" in pathlib.Path(words[words.index("-c") + 1]).read_text():
    sys.exit("error: expected C++")
if "-lmissing" in words:
    sys.exit("error: cannot find -lmissing")
if "-MF" in words:
    source = words[words.index("-c") + 1]
    pathlib.Path(words[words.index("-MF") + 1]).write_text(words[words.index("-o") + 1] + ": " + source)
if "-o" in words:
    stamps = [word.removeprefix("-DRETRO_BUILT_FROM=").strip('"') for word in words if "-DRETRO_BUILT_FROM=" in word]
    objects = [pathlib.Path(word) for word in words if word.endswith(".o") and "-c" not in words]
    text = "".join(f"retro-built-from:{{stamp}}\\0" for stamp in stamps) + "".join(o.read_text() for o in objects)
    pathlib.Path(words[words.index("-o") + 1]).write_text(text)
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """The files that a build reads."""
    tree = tmp_path_factory.mktemp("sources")
    shutil.copytree(ROOT / "csrc", tree / "csrc")
    names = ["setup.py", "pyproject.toml", "README.md", "LICENSE", "Makefile", "tools/__init__.py"]
    names += ["tools/build_extensions.py", "retro_kernels/__init__.py", "retro_kernels/_version.py"]
    names += ["retro_kernels/built_from.py", "retro_model/__init__.py", "bench/retro_bench/__init__.py"]
    for name in names:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    return tree


class Tree:
    """A copy of the sources, and the stand-in that compiles them."""

    def __init__(self, folder: Path):
        self.folder, self.log, self.compiler = folder, folder / "log", folder / "c++"
        self.compiler.write_text(STAND_IN.format(python=sys.executable, log=str(self.log)))
        self.compiler.chmod(0o755)

    def library(self, name: str = "retro_kernels/_cpu") -> Path:
        return self.folder / (name + SUFFIX)

    def run(self, *command: str, **settings: str) -> subprocess.CompletedProcess:
        settings = {"CXX": str(self.compiler), "CUDACXX": "", "MAX_JOBS": "2", "RETRO_KERNELS_ISAS": "avx2"} | settings
        environ = {name: value for name, value in os.environ.items() if name not in ("CXXFLAGS", "CFLAGS", "LDFLAGS")}
        return subprocess.run(
            command, cwd=self.folder, env=environ | {"PYTHONPATH": ""} | settings, capture_output=True, text=True
        )

    def build(self, *arguments: str, **settings: str) -> subprocess.CompletedProcess:
        return self.run(sys.executable, "setup.py", "-q", "build_ext", *arguments, **settings)

    def compiled(self) -> list[list[str]]:
        return [line.split() for line in self.log.read_text().splitlines() if " -c " in line]

    def spoil(self) -> None:
        (self.folder / "csrc/cpu/topk_chunks.cpp").write_text("no C++")


@pytest.fixture
def tree(sources, tmp_path) -> Tree:
    return Tree(shutil.copytree(sources, tmp_path / "tree"))


def test_a_failed_build_fails_make_and_removes_the_old_library(tree):
    assert tree.build("--inplace").returncode == 0 and tree.library().exists()
    tree.spoil()
    done = tree.run("make", "build", f"PY={sys.executable}")
    assert done.returncode != 0
    assert "retro_kernels._cpu was not built" in done.stderr and "error: expected C++" in done.stdout
    assert not tree.library().exists()
    assert tree.build("--inplace").returncode != 0 and not tree.library().exists()


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({"CXX": "/absent/c++"}, "no C++ compiler: /absent/c++ not found"),
        ({"RETRO_KERNELS_ISAS": "mmx"}, "RETRO_KERNELS_ISAS: expected some of"),
        ({"LDFLAGS": "-lmissing"}, "ninja failed"),
    ],
)
def test_every_reason_to_fail_fails_a_build_in_place(tree, settings, reason):
    tree.library().write_text("of yesterday")
    done = tree.build("--inplace", **settings)
    assert done.returncode != 0 and reason in done.stderr and not tree.library().exists()


@pytest.mark.parametrize("spoilt", [True, False])
def test_pip_installs_the_package_where_nothing_compiles(tree, spoilt):
    """The command that makes a wheel builds outside of the packages. An in-place library is another build's."""
    tree.library().write_text("built in place")
    tree.spoil()
    done = tree.build(**{} if spoilt else {"CXX": "/absent/c++"})
    assert done.returncode == 0, done.stderr
    assert "warning: retro_kernels._cpu is left out, and the package works without it" in done.stderr
    assert tree.library().read_text() == "built in place"
    assert not list(tree.folder.glob("build/lib*/retro_kernels/_cpu*"))
    assert len(list(tree.folder.glob("build/lib*/retro_model/_text*"))) == spoilt


def test_a_second_wheel_does_not_contain_the_library_of_the_first(tree):
    assert tree.build().returncode == 0 and list(tree.folder.glob("build/lib*/retro_kernels/_cpu*"))
    tree.spoil()
    assert tree.build().returncode == 0 and not list(tree.folder.glob("build/lib*/retro_kernels/_cpu*"))


def test_flags_that_change_results_or_the_instruction_set_do_not_reach_the_kernels(tree):
    """They reach code that is compiled once, for this processor."""
    inexact = ["-ffast-math", "-Ofast", "-ffinite-math-only"]
    kept = ["-O1", "-g", "-DNAME=1", "-mtune=native", "-fsanitize=address"]
    wrong = ["-march=native", "-mcpu=neoverse-n1", "-mavx512f", "-msse4.2", "-mno-avx", "-mprefer-vector-width=256"]
    flags, cxx = " ".join([*wrong, *inexact, *kept]), f"{tree.compiler} -mfma4"
    done = tree.build("--inplace", CXXFLAGS=flags, CXX=cxx, CFLAGS="-march=native")
    assert done.returncode == 0, done.stderr
    for words in (inexact, wrong):
        assert f"CXXFLAGS: {' '.join(words)} is not used for retro_kernels._cpu" in done.stderr
    assert "CXX: -mfma4 is not used for retro_kernels._cpu" in done.stderr
    compiled = tree.compiled()
    kernels = [words for words in compiled if "csrc/cpu/topk_chunks.cpp" in words]
    assert len(kernels) == 2
    assert [word for word in kernels[0] if word.startswith("-m")] == ["-mtune=native"]
    assert [word for word in kernels[1] if word.startswith("-m")] == ["-mtune=native", *build.AVX2]
    units = [words for words in compiled if "/cpu/" in words[words.index("-o") + 1]]
    assert len(units) > 20
    for words in units:
        assert set(kept) <= set(words) and not {*wrong, *inexact, "-mfma4"} & set(words)
    (once,) = (words for words in compiled if "csrc/text/bm25.cpp" in words)
    assert {"-march=native", "-ffast-math", "-mfma4"} <= set(once)


def test_info_says_which_sources_a_library_was_built_from(tree):
    def line(name: str) -> str:
        (found,) = (line for line in built_from.lines(tree.folder) if line.startswith(f"{name}: "))
        return found.removeprefix(f"{name}: ")

    assert line("retro_kernels._cpu") == "not built"
    assert tree.build("--inplace", CXXFLAGS="-O1 -DNAME='\"a b\"'").returncode == 0
    first = built_from.digest("retro_kernels._cpu", tree.folder)
    told = f"built from sources {first} by stand-in 1.2.3 -O1 "
    assert line("retro_kernels._cpu").startswith(told)
    assert line("retro_kernels._cpu").endswith("; this checkout has the same sources")
    with (tree.folder / "csrc/cpu/simd.h").open("a") as header:
        header.write("// one more line\n")
    second = built_from.digest("retro_kernels._cpu", tree.folder)
    for name in ("retro_kernels._cpu", "retro_model._text"):  # _text is compiled from parallel.cpp of csrc/cpu too
        assert line(name).endswith("other sources (" + built_from.digest(name, tree.folder) + "), run `make build`")
    text = built_from.digest("retro_model._text", tree.folder)
    assert first != second and line("retro_kernels._cpu").startswith(told)
    assert tree.build("--inplace").returncode == 0
    assert line("retro_kernels._cpu").endswith(f"{second} by stand-in 1.2.3; this checkout has the same sources")
    tree.library().write_bytes(b"built before libraries stated their sources")
    assert line("retro_kernels._cpu").startswith("does not state its sources; this checkout has other sources")
    shutil.rmtree(tree.folder / "csrc")
    assert line("retro_model._text") == f"built from sources {text} by stand-in 1.2.3"  # installed without sources


def test_a_digest_covers_every_source_of_its_extension_and_their_names(sources, tmp_path):
    tree = shutil.copytree(sources, tmp_path / "tree")
    for name in built_from.FOLDERS:
        before = built_from.digest(name, tree)
        paths = [p for folder in (".", *built_from.FOLDERS[name]) for p in (tree / "csrc" / folder).glob("*.*")]
        assert len(paths) > 5
        for path in paths:
            contents = path.read_bytes()
            path.write_bytes(contents + b" ")
            assert built_from.digest(name, tree) != before, path
            path.write_bytes(contents)
        assert built_from.digest(name, tree) == before
        moved = path.rename(path.with_stem("renamed"))
        assert built_from.digest(name, tree) != before
        moved.rename(path)


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
def test_a_compiled_library_states_its_sources(tmp_path):
    compiler = build.compiler()
    objects = build.Objects(tmp_path, [*compiler, *build.CXX_FLAGS])
    stamp = build.stamp("retro_kernels._cpu", compiler, ["-O1", '-DX="`$a\\`"'])
    objects.compile(build.CSRC / "built_from.cpp", "-Werror", stamp)
    build.link(objects, tmp_path / "library.so", compiler, [])
    digest, made_by = built_from.stamp(tmp_path / "library.so")
    assert digest == built_from.digest("retro_kernels._cpu")
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout.splitlines()[0]
    assert made_by == f"{version} -O1 -DX=???a???"


def test_info_reports_the_libraries():
    lines = info.lines()
    first = lines.index("libraries") + 1
    assert lines[first : first + 3] == [f"  {line}" for line in built_from.lines()]


def test_an_interrupted_build_of_the_emulator_is_finished_by_its_compiler(tmp_path):
    """The processes that began it are killed. The compiler ends its work, and the next process does not begin again."""
    compiler, source, log, go = (tmp_path / name for name in ("c++", "emulator.cpp", "log", "go"))
    compiler.write_text(f'#!/bin/sh\necho began >> {log}\nwhile [ ! -e {go} ]; do sleep 0.05; done\ncp "$3" "$2"\n')
    compiler.chmod(0o755)
    source.write_text("the library")
    code = "import sys; from pathlib import Path; from ptx_emulator.program import built\n"
    code += "print(built('ptx.so', [sys.argv[1]], Path(sys.argv[2]), [], ''))"
    command = [sys.executable, "-c", code, str(compiler), str(source)]
    options = {"env": os.environ | {"XDG_CACHE_HOME": str(tmp_path)}, "stdout": subprocess.PIPE, "text": True}
    first = subprocess.Popen(command, **options, start_new_session=True)
    while not log.exists() and first.poll() is None:
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    second = subprocess.Popen(command, **options)
    go.touch()
    assert Path(second.communicate()[0].strip()).read_text() == "the library" and log.read_text() == "began\n"
