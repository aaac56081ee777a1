"""Another repository: its tests under `pytest --emulate`, its calls on the command line."""

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ptx_emulator.command import main

SOURCES = Path(__file__).resolve().parents[1] / "src"

KERNELS = """
import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@triton.jit
def scale_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, 2 * tl.load(x_ptr + at, at < n), at < n)


@triton.jit
def clock_kernel(x_ptr):
    tl.store(x_ptr, tl.inline_asm_elementwise("mov.u32 $0, %clock;", "=r", [], tl.int32, False, 1))


def scaled(n=2048):
    x = torch.randn(2048, device="cuda")
    y = torch.empty(2048, device=DEVICE)
    scale_kernel[(2,)](x, y, n, BLOCK=2048)
    return x, y


def test_values():
    x, y = scaled()
    assert y.is_cuda and torch.equal(y, 2 * x)


def test_bounds():
    scaled(2049)


def test_cleanup_fails_after_a_refusal():
    try:
        test_clock()
    finally:
        raise AssertionError("cleanup")


def test_clock():
    clock_kernel[(1,)](torch.zeros(1, dtype=torch.int32, device="cuda"))
"""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    path = tmp_path_factory.mktemp("theirs") / "test_theirs.py"
    path.write_text(KERNELS)
    entries = tomllib.loads((SOURCES.parent / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    (installed := path.parent / "ptx_emulator-0.dist-info").mkdir()
    (installed / "entry_points.txt").write_text("[pytest11]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()))
    (installed / "METADATA").write_text("Name: ptx-emulator\n")
    return path


@pytest.mark.nightly
def test_their_tests(theirs):
    """One passes, one fails with its line of source, one needs an unsupported feature; without the option all skip."""
    base = [sys.executable, "-W", "ignore", "-m", "pytest", "-rs", theirs.name]
    env = {"PYTHONPATH": f"{SOURCES}:{theirs.parent}", "PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    run = lambda *more: subprocess.run([*base, *more], cwd=theirs.parent, capture_output=True, text=True, env=env)  # noqa: E731
    named = ("-p", "ptx_emulator.plugin")  # it is loaded once all the same
    done = run("--emulate", "90", *(("-n", "2") if importlib.util.find_spec("xdist") else ()))
    assert done.returncode == 1 and "2 failed, 1 passed, 1 skipped" in done.stdout, done.stdout
    assert "scale_kernel: out of bounds of argument x_ptr: byte 8192 of 8192" in done.stdout
    assert "at test_theirs.py:14" in done.stdout and "AssertionError: cleanup" in done.stdout
    assert "emulated on sm_90" in done.stdout and "1 not run: not emulated: register %clock" in done.stdout
    assert "1 launches of 1 kernels executed, 1 refused, 0 skipped" in done.stdout
    assert "4 skipped" in run(*named).stdout
    done = run("--emulate", "90", "-k", "clock", *named)
    assert done.returncode == 1 and "no launch was executed" in done.stdout, done.stdout


def test_their_calls_on_the_command_line(theirs, capsys):
    call = f"{theirs}::scaled"
    assert main(["run", call, "--arch", "80"]) == 0
    out = capsys.readouterr().out
    assert "scale_kernel, sm_80, grid (2, 1, 1), 4 warps" in out and "test_theirs.py:14" in out
    assert main(["run", f"{theirs}::test_bounds"]) == 2
    assert "argument x_ptr: byte 8192" in capsys.readouterr().out
    assert main(["estimate", call]) == 0
    assert "estimated for one H200" in capsys.readouterr().out
    for wrong, said in ((f"{theirs}::nobody", "has no function nobody"), ("nowhere.py::f", "expected FILE.py::FUNC")):
        assert main(["run", wrong]) == 4
        assert said in capsys.readouterr().err
