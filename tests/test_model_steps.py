"""Whole training steps: every type and contender has a row; ratios are to the first contender."""

from retro_model.memory_mosaics import MosaicsConfig
from tests.test_examples import example

steps = example("model_steps")

MOSAICS = MosaicsConfig(40, d_model=64, num_heads=1, num_layers=2, persistent_slots=224)


def test_a_row_a_type_and_model():
    said: list[str] = []
    contenders = steps.mosaics_contenders(MOSAICS, (2, 24))
    rows = {(r["dtype"], r["model"]): r for r in steps.run(contenders, rounds=2, steps=2, say=said.append)}
    assert len(rows) == len(said) == 4
    for dtype in steps.DTYPES:
        first, ours = rows[dtype, steps.TRANSFORMER], rows[dtype, steps.MOSAICS]
        over = f"over_{steps.TRANSFORMER}"
        assert first[over] == {"seconds": 1.0, "cpu_seconds": 1.0}
        assert ours[over]["seconds"] == ours["seconds"] / first["seconds"]
        assert ours["seconds"] == min(s["seconds"] for s in ours["samples"]) and len(ours["samples"]) == 4
        before, after = (s["loss"] for s in ours["samples"][:2])
        assert after < before  # the step trained the model


def test_retro_reads_neighbours_and_its_baseline_none():
    contenders = steps.retro_contenders(steps.retro_config(12).replace(vocab_size=50), (1, 128))
    baseline, retro = steps.run(contenders, rounds=1, steps=1, dtypes=["float32"], say=lambda line: None)
    assert (baseline["model"], retro["model"]) == (steps.BASELINE, steps.RETRO)
    assert contenders[steps.BASELINE].batch.neighbours is None
    assert contenders[steps.RETRO].batch.neighbours.shape[2] == steps.NEIGHBOURS
