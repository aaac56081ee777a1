"""Host time is measured for every op without a GPU, and an increase is reported."""

import pytest

from retro_bench import main
from retro_bench.commands import ab as ab_command
from retro_bench.compare import ab_host
from retro_bench.measure import host
from tests.conftest import COMPILED, INTERPRETER

pytestmark = pytest.mark.skipif(INTERPRETER or COMPILED, reason="launches are replaced in this process")


def test_every_op_is_measured_on_both_backends(monkeypatch):
    monkeypatch.setattr(host, "BATCHES", 1)
    monkeypatch.setattr(host, "CALLS", 1)
    times = host.measure(("cpu",))
    assert {name.split("/")[0] for name in times} == {*ab_command.OPERATORS, "floor"}
    assert min(times.values()) > 0
    pytest.importorskip("triton")
    for op in ("leaky_average", "merge_attention"):
        times = host.measure(("triton",), (op,))
        assert list(times) == [f"{op}/triton/training/fwd", f"{op}/triton/training/fwdbwd", "floor/fwdbwd"]
    assert list(host.measure(("triton",), ("rms_norm", "cross_entropy"))) == ["floor/fwdbwd"]  # no kernel


def test_the_command_takes_patterns(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(host, "measure", lambda backends, kernels: asked.append(kernels) or {"a": 1e-6, "b": 1e-6})
    assert main(["host", "--op", "r*_norm,leaky*"]) == 0 and asked == [("leaky_average", "rms_norm")]
    assert main(["host", "--op", "topk*,norm*"]) == 4 and "--op norm*: matches none" in capsys.readouterr().err


def test_only_what_stays_slower_is_told(monkeypatch):
    """`a` is slower in both batches, `b` in one alone; `c` is within the limit."""
    base = {"a": 20e-6, "b": 20e-6, "c": 20e-6}
    batches = iter(
        [[base | {"a": 30e-6, "b": 30e-6, "c": 22e-6}] * ab_host.ROUNDS, [base | {"a": 31e-6}] * ab_host.ROUNDS]
    )
    heads: list = []

    def measured(side, kernels):
        if side == "base":
            return base
        if not heads:
            heads.extend(next(batches))
        return heads.pop()

    monkeypatch.setattr(ab_host, "_measure", measured)
    assert ab_host.compare("base", "head", (), lambda text: None) == ["a: host time 31.0 us, was 20.0"]
    monkeypatch.setattr(ab_host, "_measure", lambda side, kernels: None if side == "base" else base)
    assert ab_host.compare("base", "head", (), lambda text: None) is None
