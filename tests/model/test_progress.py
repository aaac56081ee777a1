"""Progress bars: what they say of a training and of scores, in a file as on a terminal."""

import pytest

from retro_model.base import progress

pytest.importorskip("tqdm")


def test_training_says_how_far_it_is(capsys):
    with progress.training("RETRO", 100) as report:
        for step in range(100):
            report(step, {"loss": 2.0, "tokens": 10, "waiting": 0.5})
    bars = capsys.readouterr().err.split("\r")
    assert len(bars) < 5 and "RETRO: 100%" in bars[-1] and "100/100" in bars[-1]  # a file gets a bar every 10 seconds
    assert "loss 2.000" in bars[-1] and "tokens/s" in bars[-1] and "50% waiting for data" in bars[-1]


def test_scoring_says_so_too(capsys):
    with progress.counting("scoring") as report:
        report(3, 7)
        report(7, 7)
    assert "scoring: 100%" in (said := capsys.readouterr().err) and "7/7" in said
