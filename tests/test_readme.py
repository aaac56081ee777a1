"""The Python of the README and of the documentation runs as it stands, one block after the other, each by itself."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = {
    f"{page.relative_to(ROOT)}:{number}": code
    for page in PAGES
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S), 1)
}
LINK = re.compile(r"\]\(([^)#]+?)(?:#[^)]*)?\)")


def test_the_blocks_are_found():
    assert {"README.md:1", "docs/ops.md:1", "docs/retro.md:2"} <= set(BLOCKS)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_runs(name, tmp_path, monkeypatch, capsys):
    if "retro_model.data" in BLOCKS[name]:
        pytest.importorskip("tokenizers")
        pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict = {}
    exec(compile(BLOCKS[name], name, "exec"), names)
    if name == "docs/retro.md:1":
        assert names["logits"].shape == (2, 100, 256) and [len(text) for text in names["texts"]] == [35, 72]
    if name == "docs/retro.md:2":
        assert (tmp_path / "run" / "model" / "state.json").exists() and "bits per byte" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    """Pages of the API are made from docstrings by `make docs`; their sources are in docs/api."""
    links = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if not link.startswith("http")]
    assert not [link for link in links if not (page.parent / link).exists()]
