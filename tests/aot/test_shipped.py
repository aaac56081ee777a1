"""Folders of compiled kernels: used by the same Triton elsewhere, refused by another."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

import retro_kernels as rk
from retro_kernels.compile import aot, shipped
from retro_kernels.compile.target import KNOWN
from retro_kernels.testing import stub
from tests.conftest import COMPILED, INTERPRETER
from tests.refusals import refused

if INTERPRETER or COMPILED:
    pytest.skip("launches are replaced in this process", allow_module_level=True)
pytest.importorskip("triton")

ONLY = "merge_attention/merge_attention_forward"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder that was made in one place and moved to another."""
    made, moved = (tmp_path_factory.mktemp("kernels") / name for name in ("made", "moved"))
    assert aot.main(["--arch", "90", "--kernel", ONLY, "--cache", str(made), "--jobs", "1"]) == 0
    made.rename(moved)
    return moved


def test_what_was_compiled_elsewhere_is_not_compiled_again(folder, tmp_path, monkeypatch):
    from triton.compiler.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    launches = [case.launch for _, case in aot.cases(KNOWN[90], ONLY)]
    assert rk.warm_up(cache=folder) == len(launches) > 0
    assert rk.warm_up(cache=folder) == len(launches)  # a second time: nothing is lost
    shutil.move(folder, tmp_path / "gone")  # installed kernels do not need the folder
    compiled, heard, make = [], [], ASTSource.make_ir
    monkeypatch.setattr(ASTSource, "make_ir", lambda source, *a, **b: compiled.append(source) or make(source, *a, **b))
    try:
        with stub.device(90, heard.append):
            for launch in launches:
                real = {
                    name: torch.zeros(1, dtype=value.dtype) if isinstance(value, torch.Tensor) else value
                    for name, value in launch.arguments.items()
                }
                dataclasses.replace(launch, arguments=real).run()
            assert len(heard) == len(launches) and not compiled
            monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "empty"))
        with stub.device(90):
            dataclasses.replace(launches[0], arguments=real | launches[0].arguments | real).run()
        assert compiled
    finally:
        shutil.move(tmp_path / "gone", folder)


def test_a_folder_that_does_not_fit_is_told_so(folder, tmp_path):
    message = "cache: expected a folder that `python -m retro_kernels.compile.aot --cache` made"
    refused(message, rk.warm_up, cache=tmp_path)
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    manifest = json.loads((other / shipped.MANIFEST).read_text())
    wrong = manifest | {"triton": "3.1.4", "python": "3.99", "compiler": "another"}
    (other / shipped.MANIFEST).write_text(json.dumps(wrong))
    refused(r"got a folder of triton 3\.1\.4 on Python 3\.99", rk.warm_up, cache=other)
    (other / shipped.MANIFEST).write_text(json.dumps(manifest | {"kernels": "another"}))
    refused("expected kernels of this version of retro_kernels", rk.warm_up, cache=other)


@pytest.mark.timeout(120)
def test_nothing_that_the_host_would_run_is_taken_over(folder, tmp_path, monkeypatch):
    """Libraries, links, pipes, names that point elsewhere and entries of other names are not copied."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    forged, secret = tmp_path / "forged", tmp_path / "secret.json"
    shutil.copytree(folder, forged)
    secret.write_text("secret")
    entry = next(e for e in sorted(forged.iterdir()) if e.is_dir())
    group = next(entry.glob("__grp__*.json"))
    listing = json.loads(group.read_text())
    listing["child_paths"] |= {"../../escaped.json": "x", "__triton_launcher.so": "x", str(secret): "x"}
    group.write_text(json.dumps(listing))
    honest = {file.name for file in entry.iterdir()}
    for name in (
        "__triton_launcher.so",
        "cuda_utils.cpython-311-x86_64-linux-gnu.so",
        "kernel.py",
        "a.cubin.so",
        ".x.json",
    ):
        (entry / name).write_bytes(b"host code")
    (entry / "link.json").symlink_to(secret)
    os.mkfifo(entry / "pipe.json")
    for name in ("..x", "A" * 51, "a" * 52, "B" * 52):
        shutil.copytree(folder / entry.name, forged / name)
    shutil.rmtree(forged / ("B" * 52))
    (forged / ("B" * 52)).symlink_to(folder / entry.name)
    assert rk.warm_up(cache=forged) == rk.warm_up(cache=folder)
    taken = tmp_path / "cache"
    assert {e.name for e in taken.iterdir()} == {e.name for e in folder.iterdir() if e.is_dir()}
    assert {file.name for file in (taken / entry.name).iterdir()} == honest
    for file in taken.rglob("__grp__*.json"):
        for name, path in json.loads(file.read_text())["child_paths"].items():
            assert Path(path) == file.parent / name and Path(path).is_file() and "/" not in name


@pytest.mark.timeout(60)
def test_a_manifest_that_is_no_file(tmp_path):
    os.mkfifo(tmp_path / shipped.MANIFEST)
    refused(r"cache: expected a folder that .* made; got .*no regular file", rk.warm_up, cache=tmp_path)
