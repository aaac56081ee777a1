"""Progress in a file: a line at once, some in between, one at the end."""

import io

import pytest

from retro_model.base import progress

pytest.importorskip("rich")


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_training_says_in_a_file_how_far_it_is(capsys, clock):
    with progress.training("RETRO", 100) as report:
        assert capsys.readouterr().err == "RETRO: 0 of 100\n"
        for step in range(100):
            clock[0] += 1.0
            report(step, {"loss": 2.0, "tokens": 10})
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10 and all("loss 2.000" in line for line in lines)
    assert lines[0].startswith("RETRO: 10 of 100, loss 2.000") and lines[-1].startswith("RETRO: 100 of 100")


def test_scoring_says_so_too(capsys, clock):
    with progress.counting("scoring") as report:
        assert capsys.readouterr().err == "scoring: begins\n"
        report(3, 7)
        assert capsys.readouterr().err == ""
        report(7, 7)
    assert capsys.readouterr().err == "scoring: 7 of 7\n"


def test_a_terminal_gets_a_bar(monkeypatch):
    class Terminal(io.StringIO):
        isatty = staticmethod(lambda: True)

    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with progress.counting("scoring") as report:
        report(7, 7)
    assert "7/7" in progress.sys.stderr.getvalue()
