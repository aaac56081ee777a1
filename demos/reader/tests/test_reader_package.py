"""The wheel of the demonstration: it holds the page, and its program runs outside the checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytest.importorskip("build")


def test_the_wheel_holds_the_page_and_the_program_runs(tmp_path):
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("retro_reader-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {*archive.namelist()}
        (entry,) = [archive.read(name).decode() for name in names if name.endswith("entry_points.txt")]
    page = {f"retro_reader/page/{path.name}" for path in (ROOT / "retro_reader" / "page").iterdir() if path.is_file()}
    assert len(page) > 5 and page <= names and "retro-reader = retro_reader.__main__:command" in entry
    environment = {**os.environ, "PYTHONPATH": str(wheel)}
    said = subprocess.run(
        [sys.executable, "-m", "retro_reader", "ask", "--help"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert said.stdout.startswith("usage: retro-reader ask"), said.stderr
