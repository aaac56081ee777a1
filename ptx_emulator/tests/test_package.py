"""ptx_emulator as a package: its README runs, and its wheel works outside the tree."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

HOME = Path(__file__).resolve().parents[1]


def first_lines() -> str:
    """Return the code of the README's first example, and a line that checks its result."""
    code = re.search(r"```python\n(.*?)```", (HOME / "README.md").read_text(), re.S)[1]
    assert len([line for line in code.splitlines() if line]) <= 10
    return f"{code}\nassert torch.equal(out, x + y)\nprint(ptx_emulator.__file__)\n"


def run(*command, **options) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_the_first_lines_of_the_readme_run(tmp_path):
    (tmp_path / "first.py").write_text(first_lines())
    environ = {**os.environ, "PYTHONPATH": str(HOME / "src")}
    assert str(HOME) in run(sys.executable, "first.py", cwd=tmp_path, env=environ)


@pytest.mark.nightly
def test_a_wheel_contains_the_built_emulator_and_works_in_a_fresh_environment(tmp_path):
    pytest.importorskip("build")
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # pip searches it for packages
    bare["XDG_CACHE_HOME"] = str(tmp_path)
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, HOME)
    (wheel,) = tmp_path.glob("ptx_emulator-*.whl")
    fresh = tmp_path / "fresh"
    run(sys.executable, "-m", "venv", "--without-pip", fresh)
    python = fresh / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel, env=bare)
    (packages,) = fresh.glob("lib/python*/site-packages")
    # torch and triton come from here, by their paths and without editable installs
    found = [path for path in sys.path if path.endswith("site-packages")] or [sysconfig.get_paths()["purelib"]]
    (packages / "here.pth").write_text("\n".join(found))
    (tmp_path / "first.py").write_text(f"{first_lines()}\ndef call(): add[(4,)](x, y, out, 1000, BLOCK=256)\n")
    assert str(fresh) in run(python, "first.py", cwd=tmp_path, env=bare)
    said = run(python.with_name("ptx-emulator"), "run", "first.py::call", cwd=tmp_path, env=bare)
    assert "1 launches: nothing wrong" in said and list(packages.glob("ptx_emulator/ptx.*.so"))
    assert not list(tmp_path.glob("ptx-emulator/*.so")), "compiled the emulator, which the wheel contains"
    run(python, "-m", "pytest", "-p", "ptx_emulator.plugin", "--version", cwd=tmp_path, env=bare)
