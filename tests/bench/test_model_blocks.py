"""The plugin of whole models' blocks: what it times computes what it should, and the check would notice if not."""

import pytest
import torch

import bench
from bench import registry


@pytest.fixture
def plugin():
    """Registered for one test: other tests count what is registered by default."""
    before = [dict(table) for table in (registry.OPERATORS, registry.CASES, registry.CONTENDERS)]
    from bench.models import blocks as model_blocks

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
    from bench.models import steps as model_steps
    from retro_model.memory_mosaics import MosaicsConfig

    said: list[str] = []
    config = MosaicsConfig(40, d_model=64, num_heads=1, num_layers=2, persistent_slots=224)
    contenders = model_steps.mosaics_contenders(config, (2, 24))
    rows = {(r["dtype"], r["model"]): r for r in model_steps.run(contenders, rounds=1, steps=2, say=said.append)}
    assert len(rows) == len(said) == 6
    over = f"over_{model_steps.TRANSFORMER}"
    for dtype, rel in (("float32", 1e-5), ("bfloat16", 2e-2)):
        ours, authors = (rows[dtype, name] for name in (model_steps.MOSAICS, model_steps.AUTHORS))
        assert [s["loss"] for s in ours["samples"]] == pytest.approx([s["loss"] for s in authors["samples"]], rel=rel)
        assert ours[over]["seconds"] == ours["seconds"] / rows[dtype, model_steps.TRANSFORMER]["seconds"]
        assert rows[dtype, model_steps.TRANSFORMER][over] == {"seconds": 1.0, "cpu_seconds": 1.0}


def test_retros_steps_and_what_they_are_made_of(monkeypatch):
    from bench.models import steps as model_steps

    monkeypatch.setattr(
        model_steps.ceilings, "measure", lambda device: {"flops_per_s": {"float32": 1e11}, "bytes_per_s": 1e10}
    )
    config = model_steps.retro_config(12).replace(vocab_size=50)
    contenders = model_steps.retro_contenders(config, (1, 128))
    (baseline, retro) = rows = model_steps.run(contenders, rounds=1, steps=1, dtypes=["float32"], say=lambda line: None)
    model_steps.floors(contenders, rows, say=lambda line: None)
    assert (baseline["model"], retro["model"]) == (model_steps.BASELINE, model_steps.RETRO)
    # every matrix by every token, forward and two gradients; positions by displacements, without one for the sinusoids
    d, heads, n = config.d_model, config.num_heads * config.head_dim, 128
    of_tokens = config.num_layers * (4 * d * heads + 2 * d * config.d_ff) + config.vocab_size * d
    of_positions = config.num_layers * d * heads
    assert baseline["floor"]["product_flops"] == 2 * n * (3 * of_tokens + 2 * of_positions)
    assert retro["floor"]["product_flops"] > baseline["floor"]["product_flops"]
    assert 0 < baseline["floor"]["kernels_seconds"] < 60 and baseline["over_floor"] > 0
    # what reads and writes memory beside them, in floats: 10 a parameter, and some an activation
    parameters = sum(p.numel() for p in contenders[model_steps.BASELINE].build().parameters())
    per_token = config.num_layers * (2 * 5 * d + 5 * config.d_ff + 2 * 6 * d) + 5 * d + 2 * config.vocab_size
    bound = baseline["bound"]
    assert sum(bound["moved_bytes"].values()) == 4 * (10 * parameters + config.vocab_size * d + n * per_token)
    assert bound["moved_seconds"] == sum(bound["moved_bytes"].values()) / 1e10
    least = bound["products_alone_seconds"] + baseline["floor"]["kernels_seconds"] + bound["moved_seconds"]
    floor = baseline["floor"]["products_seconds"] + baseline["floor"]["kernels_seconds"]
    assert baseline["bound_over_floor"] == pytest.approx(least / floor)
