"""The plugin of whole models' blocks: what it times computes what it should, and the check would notice if not."""

import pytest
import torch

import bench
from bench import registry


@pytest.fixture
def plugin():
    """Registered for one test: other tests count what is registered by default."""
    before = [dict(table) for table in (registry.OPERATORS, registry.CASES, registry.CONTENDERS)]
    from bench import model_blocks

    if model_blocks.MOSAICS not in registry.OPERATORS:
        model_blocks.add()
    yield model_blocks
    for table, kept in zip((registry.OPERATORS, registry.CASES, registry.CONTENDERS), before):
        table.clear()
        table.update({key: item for key, item in kept.items() if (key if isinstance(key, str) else key[0]) not in BLOCKS})


BLOCKS = ("mosaics_block", "transformer_block")
CHECK = ["check", "--kernel", ",".join(BLOCKS), "--case", "tiny", "--dtype", "float32", "--baselines", "all"]


def test_every_way_computes_the_same_block(plugin, capsys):
    assert bench.main(CHECK) == 0
    out = capsys.readouterr().out
    assert out.count(" ok ") == 3 and "by_matrices" in out


def test_a_mask_that_leaks_the_target_fails(plugin, monkeypatch, capsys):
    """With the diagonal visible a token reads its own value, which holds the next token."""
    monkeypatch.setattr(torch.Tensor, "triu", lambda self, k, triu=torch.Tensor.triu: triu(self, k + 1))
    assert bench.main(CHECK) == 2
    assert "by_matrices" in capsys.readouterr().out
