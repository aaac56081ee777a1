"""The README's Python runs as it stands, one block after the other, each by itself."""

import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)


def test_there_are_blocks():
    assert len(BLOCKS) == 3


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_runs(number, tmp_path, monkeypatch, capsys):
    if "retro_model.data" in BLOCKS[number]:
        pytest.importorskip("tokenizers")
        pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict = {}
    exec(compile(BLOCKS[number], f"README.md, block {number}", "exec"), names)
    if "logits" in names:
        assert names["logits"].shape == (2, 100, 256) and [len(text) for text in names["texts"]] == [35, 72]
    if "on" in names:
        assert (tmp_path / "run" / "model" / "state.json").exists() and "bits per byte" in capsys.readouterr().out
