"""From the source distribution to a wheel to an environment outside the tree, where an op runs on `cpu`."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from retro_kernels import __version__
from tests.bench import foreign

ROOT = Path(__file__).resolve().parent.parent

pytest.importorskip("build")
pytestmark = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("c++", "g++", "clang++")) or not (ROOT / ".git").exists(),
    reason="needs a C++ compiler and a git checkout",
)

BARE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
CODE = """
import torch, retro_kernels as rk, retro_model._text, retro_bench
query, key, value = torch.randn(1, 8, 2, 16), torch.randn(1, 2, 2, 8, 2, 16), torch.randn(1, 2, 2, 8, 2, 16)
out = rk.chunked_cross_attention(query, key, value, chunk_len=4, backend="cpu")
torch.testing.assert_close(out, rk.chunked_cross_attention(query, key, value, chunk_len=4, backend="reference"))
assert rk.backends()["topk_chunks"]["cpu"], rk.backends()["topk_chunks"]["cpu"].reason
print(rk.__file__, retro_model.__file__, retro_bench.__file__, sep="\\n")
"""


def run(*command, **options) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """Built from the files that git tracks, so that no other file of the checkout helps."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for name in run("git", "ls-files", "-z", cwd=ROOT).split("\0"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", out, tree)
    (archive,) = out.glob("*.tar.gz")
    return archive


def test_sdist_holds_what_a_build_needs(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    sources = {path for path in run("git", "ls-files", "csrc", cwd=ROOT).split() if (ROOT / path).exists()}
    assert sources <= names
    assert {"LICENSE", "setup.py", "tools/build_extensions.py", "retro_kernels/py.typed"} <= names
    assert "retro_kernels/ops/topk_chunks/tiles.json" in names
    assert not [name for name in names if name.endswith((".so", ".o"))]
    assert not [name for name in names if name.endswith(".jsonl") and not name.startswith("examples/")]  # records


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory) -> Path:
    """Built from the source distribution, for one instruction set and not optimised: only the contents matter."""
    settings = {**os.environ, "RETRO_KERNELS_ISAS": "portable", "CXXFLAGS": "-O0 -w"}
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python has it from 3.11.4 on
        archive.extractall(folder, **safely)
    (source,) = folder.glob("retro_kernels-*")
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, source, env=settings)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    """A new environment with the wheel; torch and its dependencies come from here, by a path."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel, env=BARE)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "here.pth").write_text(sysconfig.get_paths()["purelib"])  # without editable installs
    return folder


@pytest.mark.nightly
def test_what_the_wheel_holds(wheel):
    assert wheel.name.startswith(f"retro_kernels-{__version__}-")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "retro_kernels/py.typed",
        "retro_model/py.typed",
        "retro_bench/__main__.py",
        "retro_bench/ops/topk_chunks.py",
        "retro_kernels/ops/topk_chunks/tiles.json",
    } <= names
    assert not [name for name in names if name.startswith(("bench/", "tests/", "csrc/", "docs/", "examples/"))]


@pytest.mark.nightly
def test_it_works_outside_the_tree(environment, tmp_path):
    def outside(program, *arguments):
        return run(environment / "bin" / program, *arguments, cwd=tmp_path, env=BARE)

    assert all(str(environment) in line for line in outside("python", "-c", CODE).split())
    for program in ("retro-bench", "retro-model"):
        assert outside(program, "--version") == f"{program} {__version__}\n"
    assert "chunked_cross_attention" in outside("retro-bench", "list")
    assert "retrofit" in outside("retro-model", "--help")


@pytest.mark.nightly
def test_the_installed_gate_serves_a_repository(environment, tmp_path):
    """A wrong result is red in a repository outside this tree; `tests.bench.foreign` has more cases."""
    repository = foreign.repository(tmp_path / "repository")
    foreign.plant(repository, "wrong result")
    cheap = ("--root", str(repository), "--no-static", "--pairs", "1", "--threads", "1")
    done = foreign.gate(repository, *cheap, installed=environment / "bin" / "retro-bench")
    assert done.returncode == 2 and "decay/cxx/rows/float32/fwd" in done.stdout, done.stdout + done.stderr


def test_a_tree_without_its_sources_is_refused(tmp_path):
    """It would install silently and run the reference."""
    for name in ("setup.py", "tools/build_extensions.py", "retro_kernels/built_from.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    done = subprocess.run([sys.executable, "setup.py", "--version"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and "csrc is missing" in done.stderr
