"""A run with a time limit, on a clock that the test moves: slow machines, slow baselines, cases that are left out."""

import time
from pathlib import Path

import pytest
import torch

import retro_bench
import retro_kernels as rk
from retro_bench.check import numerics
from retro_bench.commands import measuring
from retro_bench.measure import ceilings, choose, timing
from retro_bench.measure.pace import Pace
from retro_bench.measure.samples import Effort
from retro_bench.records import record
from tests.bench.helpers import rates

SLOW_S = 20.0


class Clock:
    """Clock that shows `rate` seconds for each real one, and `skipped` more."""

    def __init__(self, rate=1.0):
        self.rate, self.skipped, self.real = rate, 0.0, time.perf_counter

    def __call__(self):
        return self.rate * self.real() + self.skipped


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    for name in ("perf_counter", "monotonic"):
        monkeypatch.setattr(time, name, made)
    return made


@pytest.fixture
def small(tables):
    """Two ops with two small cases each, in both types."""
    cases = [("rms_norm", {"B": 1, "N": 16, "D": 16}), ("cross_entropy", {"N": 8, "V": 64})]
    tables.CASES.clear()
    for op, shape in cases:
        for name in ("first", "second"):
            retro_bench.register(retro_bench.Case(op, name, shape, "a test"))
    for key in [key for key in tables.CONTENDERS if key[0] not in dict(cases)]:
        del tables.CONTENDERS[key]
    for key in [key for key in tables.OPERATORS if key not in dict(cases)]:
        del tables.OPERATORS[key]
    return [op for op, _ in cases]


def slow_down(tables, clock, seconds=SLOW_S):
    """Make every call of every baseline take this long, forward passes and backward passes. Count the calls."""
    calls = []

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out):
            return out.view_as(out)

        @staticmethod
        def backward(ctx, grad):
            calls.append("backward")
            clock.skipped += seconds
            return grad

    def slowed(one):
        def function(**arguments):
            calls.append(f"{one.op}/{one.name}")
            clock.skipped += seconds
            out = one.function(**arguments)
            return Backward.apply(out) if isinstance(out, torch.Tensor) and out.requires_grad else out

        return retro_bench.Contender(**{**vars(one), "function": function})

    for one in list(tables.CONTENDERS.values()):
        if one.role == "baseline":
            retro_bench.register(slowed(one), replace=True)
    return calls


def run(path, *more):
    code = retro_bench.main(["run", "--device", "cpu", "--quiet", "--no-ceilings", "--json", str(path), *more])
    return code, list(record.latest(record.read(path)).values())


def test_every_op_comes_first_in_float32_then_in_bfloat16_then_the_rest(small):
    steps = [(case.op, case.name, dtype) for case, dtype, _ in measuring.planned(choose.Selection("cpu"))]
    for i, (name, dtype) in enumerate((n, d) for n in ("first", "second") for d in ("float32", "bfloat16")):
        assert steps[2 * i : 2 * i + 2] == [(op, name, dtype) for op in small]


def test_slow_baselines_leave_a_green_run_within_its_limit(small, tables, clock, tmp_path, capsys):
    """Every kernel of every op has a time. A baseline's first call is its only sample and is not differentiated."""
    calls, begun = slow_down(tables, clock), clock()
    code, records = run(tmp_path / "a.jsonl", "--deadline", "420")
    assert code == 0 and clock() - begun < 420 + SLOW_S
    assert "backward" not in calls
    kernels = [r for r in records if r["role"] != "baseline"]
    assert {r["op"] for r in kernels if r["time"] and r["dtype"] == "float32"} == set(small)
    slow = [r for r in records if r["role"] == "baseline" and r["time"]]
    assert {r["op"] for r in slow} == set(small) and all(len(r["time"]["samples"]) == 1 for r in slow)
    refused = [r for r in records if r["role"] == "baseline" and r["mode"] == "fwdbwd"]
    assert refused and all("its forward pass takes 20 s" in r["reason"] for r in refused)
    assert all(len(r["time"]["samples"]) > 1 for r in kernels if r["time"])
    said = capsys.readouterr().out
    assert "x eager, 1 sample" in said


@pytest.mark.parametrize("rate", [10, 100])
def test_a_slow_machine_leaves_a_green_run_that_shows_every_op(small, clock, tmp_path, capsys, rate):
    clock.rate = rate
    code, records = run(tmp_path / "a.jsonl", "--deadline", "60")
    assert code == 0
    timed = {r["op"] for r in records if r["role"] != "baseline" and r["time"] and r["dtype"] == "float32"}
    assert timed == set(small)


def test_a_limit_of_zero_times_one_case_of_every_op_and_lists_the_rest_once(small, tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    code, records = run(path, "--deadline", "0")
    assert code == 0 and {(r["op"], r["case"]["name"], r["dtype"]) for r in records} == {
        (op, "first", "float32") for op in small
    }
    said = capsys.readouterr().out
    for op in small:
        assert said.count(f"{op}: first float32 (eager") == 1, said
    assert "bfloat16; second float32, bfloat16" in said
    last = "\n".join(said.splitlines()[-20:])
    assert "Right?    yes: 2 of 2 checks of 2 ops pass" in last and "Missing?  cases of 2 ops" in last
    command = ["run", "--device", "cpu", "--quiet", "--no-ceilings", "--samples", "1", "--seconds", "0"]
    assert retro_bench.main([*command, "--resume", str(path)]) == 0
    assert record.left(path) == [] and "Left out" not in capsys.readouterr().out


def test_wrong_numbers_fail_a_run_that_reached_its_limit(small, tmp_path):
    def wrong(**arguments):
        return 1.01 * rk.rms_norm(**arguments, backend="reference")

    retro_bench.register(retro_bench.Contender("rms_norm", "mine", wrong, role="ours"))
    assert run(tmp_path / "a.jsonl", "--deadline", "0")[0] == 2


def test_a_check_that_reached_its_limit_says_so(small, tmp_path, capsys):
    assert retro_bench.main(["check", "--device", "cpu", "--quiet", "--deadline", "0"]) == 0
    said = capsys.readouterr().out
    assert "Left out" in said and "Right?    yes" in said


def test_an_op_without_a_time_is_no_success(small, tables, tmp_path):
    def greedy(**arguments):
        raise torch.OutOfMemoryError("Tried to allocate 80 GiB")

    for name in ("cpu", "reference"):
        old = tables.CONTENDERS["rms_norm", name]
        retro_bench.register(retro_bench.Contender(**{**vars(old), "function": greedy, "outputs": None}), replace=True)
    assert run(tmp_path / "a.jsonl", "--deadline", "0")[0] == 5


def test_the_first_call_is_the_only_sample_if_it_is_long(clock):
    calls = []

    def call(seconds):
        calls.append(seconds)
        clock.skipped += seconds

    times = timing.measure({"slow": lambda: call(20), "fast": lambda: call(0.01)}, "cpu", Effort())
    assert calls.count(20) == 1 and times["slow"]["samples"] == [pytest.approx(20, rel=0.01)]
    assert len(times["fast"]["samples"]) >= 3
    timing.measure({"asked": lambda: call(30)}, "cpu", Effort(least=3, slow_s=1e9, once_s=1e9))
    assert calls.count(30) >= 3  # --samples: the user wants them


def test_a_first_call_that_compiles_is_no_slow_baseline(small, tables, clock, tmp_path):
    eager, compiled = tables.CONTENDERS["rms_norm", "eager"].function, []

    def compiles(**arguments):
        if not compiled:
            compiled.append(True)
            clock.skipped += 30
        return eager(**arguments)

    retro_bench.register(retro_bench.Contender("rms_norm", "compiled", compiles))
    _, records = run(tmp_path / "a.jsonl", "--op", "rms_norm", "--dtype", "float32", "--case", "first")
    (one,) = [r for r in records if r["backend"] == "compiled" and r["mode"] == "fwdbwd"]
    assert compiled and one["time"]["minimum"] < 1


def test_baselines_share_what_the_kernels_of_every_op_leave():
    now = [0.0]
    pace = Pace([1.0] * 8, 200, required=4, begun=0.0, clock=lambda: now[0])
    assert pace.affords("float32", yardstick=True)
    now[0] = 40.0
    pace.count("float32", 40.0, slow=0.0)  # the first call imported a library
    assert pace.affords("float32", yardstick=False)
    now[0] = 80.0
    pace.count("float32", 40.0, slow=20.0)
    assert pace.affords("float32", yardstick=True)
    assert not pace.affords("float32", yardstick=False)  # three more yardsticks would not fit
    now[0] = 159.0
    assert not pace.affords("float32", yardstick=True)
    assert not pace.affords("bfloat16", yardstick=True)  # as slow as float32, as far as is known
    assert Pace([1.0]).affords("float32", yardstick=False)
    now[0] = 1000.0
    assert not pace.over()  # the kernels of every op are timed
    pace.done = 4
    assert pace.over()


def test_a_gradient_without_a_yardstick_has_the_limit_of_a_function():
    measured = {"out": numerics.Errors(1e-3, 1e-3), "d_query": numerics.Errors(5e-2, 5e-2)}
    verdict = numerics.judge(measured, {"out": numerics.Errors(1e-3, 1e-3)}, "bfloat16", "all")
    assert verdict.tensors["d_query"]["yardstick"] is None
    assert verdict.tensors["d_query"]["limit"] == numerics.SAME_FUNCTION["bfloat16"]


def test_the_last_lines_of_a_run_answer_a_newcomer(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)  # The last lines name the file of records.
    run(Path("a.jsonl"), "--samples", "2", "--seconds", "0", "--case", "first", "--mode", "fwd")
    last = capsys.readouterr().out.splitlines()[-20:]
    assert max(map(len, last)) <= 80
    text = " ".join(" ".join(last).split())
    for words in (
        "Right? yes: ",
        "fastest baseline of the same run (",
        "float32 mean",
        "all ",
        "Missing? nothing",
        "Records:",
    ):
        assert words in text, text


def test_a_slow_product_is_called_once_for_its_ceiling(clock):
    calls = []

    def product():
        calls.append(1)
        clock.skipped += 20

    assert ceilings._best(product, "cpu") == pytest.approx(20, rel=0.01) and len(calls) == 1


def test_ceilings_take_a_tenth_of_a_run_and_interrupt_no_timing(small, clock, tmp_path, monkeypatch):
    """Timing takes so long that they are due several times."""
    running, measured = [], []

    def measure(device):
        assert not running
        measured.append(clock())
        clock.skipped += 40
        return rates(1e12, 1e13)

    def outcomes(*arguments, true=timing.outcomes):
        running.append(True)
        clock.skipped += 300
        yield from true(*arguments)
        running.pop()

    monkeypatch.setattr(ceilings, "measure", measure)
    monkeypatch.setattr(timing, "outcomes", outcomes)
    begun = clock()
    command = ["run", "--device", "cpu", "--quiet", "--seconds", "0", "--json", str(tmp_path / "a.jsonl")]
    retro_bench.main([*command, "--deadline", "9000"])
    assert len(measured) >= 3 and 40 * (len(measured) - 2) <= 0.1 * (clock() - begun)
