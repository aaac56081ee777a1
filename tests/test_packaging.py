"""From the source distribution to a wheel to an environment outside the tree, where an op runs on the `cpu` backend."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytest.importorskip("build")
pytestmark = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("c++", "g++", "clang++")) or not (ROOT / ".git").exists(),
    reason="needs a C++ compiler and a git checkout",
)

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
    """Built from what git tracks, so that nothing lying about in the checkout helps."""
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
    assert {"LICENSE", "setup.py", "retro_kernels/py.typed", "retro_kernels/ops/topk_chunks/tiles.json"} <= names
    assert not [name for name in names if name.endswith((".so", ".o", ".jsonl"))]


def test_wheel_works_outside_the_tree(sdist, tmp_path):
    # one instruction set, not optimised: this is about what is in the package, and takes seconds
    settings = {**os.environ, "RETRO_KERNELS_ISAS": "portable", "CXXFLAGS": "-O0 -w"}
    with tarfile.open(sdist) as archive:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python has it from 3.11.4 on
        archive.extractall(tmp_path, **safely)
    (source,) = tmp_path.glob("retro_kernels-*")
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, source, env=settings)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "retro_kernels/py.typed",
        "retro_model/py.typed",
        "retro_bench/__main__.py",
        "retro_bench/ops/topk_chunks.py",
        "retro_bench/emulate/emulator.cpp",
        "retro_kernels/ops/topk_chunks/tiles.json",
    } <= names
    assert not [name for name in names if name.startswith(("bench/", "tests/", "csrc/", "docs/", "examples/"))]

    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    (packages,) = environment.glob("lib/python*/site-packages")
    # torch and its like from here, as a folder on the path: an editable install of this tree there stays out
    (packages / "here.pth").write_text(sysconfig.get_paths()["purelib"])
    outside = tmp_path / "outside"
    outside.mkdir()
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    assert all(str(environment) in line for line in run(python, "-c", CODE, cwd=outside, env=bare).split())
    assert "chunked_cross_attention" in run(environment / "bin" / "retro-bench", "list", cwd=outside, env=bare)
    assert "demo" in run(environment / "bin" / "retro-model", "--help", cwd=outside, env=bare)


def test_a_tree_without_its_sources_is_refused(tmp_path):
    """It would install without a word and run the reference."""
    shutil.copy2(ROOT / "setup.py", tmp_path)
    done = subprocess.run([sys.executable, "setup.py", "--version"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and "csrc is missing" in done.stderr
