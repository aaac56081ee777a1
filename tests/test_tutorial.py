"""The tutorial runs whole, and retrieval helps as far as the text says so."""

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.nightly
def test_the_tutorial_runs(tmp_path, monkeypatch):
    client, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    for needed in ("ipykernel", "tokenizers"):
        pytest.importorskip(needed)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    book = nbformat.read(ROOT / "docs" / "tutorial.ipynb", as_version=4)
    client.NotebookClient(
        book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    said = "".join(output.get("text", "") for cell in book.cells for output in cell.get("outputs", []))
    line = r"bits per byte: ([\d.]+) with retrieval, ([\d.]+) with random neighbours, ([\d.]+) without"
    on, random, off = map(float, re.search(line, said).groups())
    assert on < random < off  # most of the gain is the control's too, as the text says
    assert random - on < off - random
    if real := dict(re.findall(r"SmolLM2-135M (.+): ([\d.]+) bits", said)):  # the model's folder
        assert real["with the library"] < min(real["alone"], real["with random passages"])
