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
        table.update(
            {key: item for key, item in kept.items() if (key if isinstance(key, str) else key[0]) not in BLOCKS}
        )


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


def test_whole_steps_of_every_way_have_one_loss(plugin):
    """The authors' way is the same model: the same losses, before a step and after it."""
    from bench import model_steps
    from retro_model.memory_mosaics import MosaicsConfig

    said: list[str] = []
    config = MosaicsConfig(40, d_model=64, num_heads=1, num_layers=2, persistent_slots=224)
    rows = {(r["dtype"], r["model"]): r for r in model_steps.run(config, (2, 24), rounds=1, steps=2, say=said.append)}
    assert len(rows) == len(said) == 6
    for dtype, rel in (("float32", 1e-5), ("bfloat16", 2e-2)):
        ours, authors = (rows[dtype, name] for name in (model_steps.MOSAICS, model_steps.AUTHORS))
        assert [s["loss"] for s in ours["samples"]] == pytest.approx([s["loss"] for s in authors["samples"]], rel=rel)
        assert ours["over_transformer"]["seconds"] == ours["seconds"] / rows[dtype, model_steps.TRANSFORMER]["seconds"]
        assert rows[dtype, model_steps.TRANSFORMER]["over_transformer"] == {"seconds": 1.0, "cpu_seconds": 1.0}
