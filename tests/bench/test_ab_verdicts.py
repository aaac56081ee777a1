"""`ab` on a small repository: its words and its exit codes if a tree can't be compared."""

import subprocess

import pytest

from retro_bench.commands import ab as ab_command
from retro_bench.compare import ab, ab_static, gate_statistics
from retro_bench.compare.gate_statistics import Ratio
from tests.bench import foreign

PLUGIN = """
import retro_bench

SIZE = 64


def operator(name, case):
    retro_bench.register(
        retro_bench.Operator(
            name,
            ("y",),
            ("x",),
            build=lambda case, draw: {"x": draw.normal(2, SIZE)},
            call=lambda arguments, backend: (arguments["x"] * 2,),
            work=lambda case, itemsize, mode: retro_bench.Work(1.0, 8.0),
        )
    )
    retro_bench.register(retro_bench.Contender(name, "eager", lambda x: x * 2))
    retro_bench.register(retro_bench.Contender(name, "mine", lambda x: x + x, role="ours"))
    types = {"cpu": ("float32",), "cuda": ("float32",)}
    retro_bench.register(retro_bench.Case(name, "small", case, "a test", modes=("fwd",), dtypes=types))


operator("twice", {"B": 2})
"""
WRONG = PLUGIN.replace("x + x", "x + x + 1")
RIGHT = Ratio(1, 1, 1)


@pytest.fixture
def gate(tmp_path):
    """Run `ab` with one plug-in in the commit and another in the working tree; None: no file."""

    def run(base: str | None, head: str, *more: str) -> subprocess.CompletedProcess:
        git = [*foreign.GIT, "-C", str(tmp_path)]
        plug = tmp_path / "kernels" / "plug.py"
        plug.parent.mkdir()
        (tmp_path / "README").write_text("kernels")
        if base is not None:
            plug.write_text(base)
        for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "base"]):
            subprocess.run([*git, *command], check=True)
        plug.write_text(head)
        given = ["--plugin", "kernels.plug", "--base", "HEAD", "--threads", "1", "--pairs", "1", *more]
        return foreign.bench(tmp_path, "ab", *given)

    return run


@pytest.mark.parametrize(
    ("base", "head", "code", "verdict", "said"),
    [
        (None, PLUGIN, 0, "new", "every measurement is new, so nothing was compared"),
        (None, WRONG, 2, "numerics", "wrong numbers"),
        ("import no_such_module", PLUGIN, 6, "not compared", "base: --plugin kernels.plug"),
        (WRONG, PLUGIN, 6, "not compared", "base: y: error"),
        (WRONG, WRONG, 2, "numerics", "wrong numbers"),
        (
            PLUGIN,
            PLUGIN.replace("SIZE = 64", "SIZE = 96"),
            6,
            "not compared",
            "x: float32 [2, 96], was float32 [2, 64]",
        ),
        (PLUGIN, PLUGIN.replace('{"B": 2}', '{"B": 3}'), 6, "not compared", "B: 3, was 2"),
    ],
    ids=["first", "first-wrong", "base-broken", "base-wrong", "both-wrong", "other-inputs", "other-shape"],
)
def test_what_is_not_compared_is_never_green_in_silence(gate, base, head, code, verdict, said):
    done = gate(base, head, "--no-static", "--quiet")
    out = " ".join(done.stdout.split())
    assert done.returncode == code, done.stdout + done.stderr
    assert f"twice/mine/small/float32/fwd {verdict} " in out and said in out and f"(exit code {code})" in out
    assert done.stderr == ""


def test_the_first_launches_of_a_repository_are_new_and_green(gate):
    done = gate(None, PLUGIN, "--static-only")
    assert done.returncode == 0 and "static metrics: not compared: the base has no plug-in" in done.stdout, done.stderr


def code(*verdicts, compared=None):
    item = ab.Item("leaky_average", "cpu", "mosaics", "float32", "fwd")
    return ab_command.exit_code([ab.Outcome(item, v, "", RIGHT, None, RIGHT) for v in verdicts], compared)


def test_a_comparison_that_failed_has_a_code_of_its_own():
    assert code("ok", "not compared", "inconclusive") == 6 and code("not compared", "regression") == 1
    assert code("new") == 0 and code("not run") == 5 and code("ok", "not run") == 0
    broken = ab_static.Comparison(0, 0, [], "the base does not compile", failed=True)
    assert code("ok", compared=broken) == 6 and code(compared=broken) == 6
    assert code(compared=ab_static.Comparison(0, 0, [], "the base has no plug-in x")) == 0
    assert code(compared=ab_static.Comparison(0, 0, [])) == 5


def test_a_refusal_of_a_later_batch_is_no_verdict(monkeypatch):
    slow, same = ([1.0] * 4, [1.2] * 4), ([1.0] * 4, [1.0] * 4)
    for later, side, verdict in (
        ("b", "head", "numerics"),
        ("b", "base", "not compared"),
        ("a", "head", "not compared"),
    ):
        asked = []

        def batch(base, other, items, *rest, later=later, side=side, asked=asked):
            asked.append(other)
            broken = other == later and asked.count(other) > (other == "b")
            return {
                i: ab.Refusal(side, "error", "died") if broken else [slow if other == "b" else same] * 5 for i in items
            }

        monkeypatch.setattr(ab, "batch", batch)
        (outcome,) = ab.compare("a", "b", ["item"], 1, lambda text: None)
        assert outcome.verdict == verdict and "died" in outcome.reason


def test_one_pair_of_processes_has_no_interval():
    estimate = gate_statistics.ratio([([1.0] * 40, [1.2] * 40)])
    assert estimate.value == pytest.approx(1.2) and not gate_statistics.settled(estimate)
    assert not gate_statistics.unchanged(estimate) and not gate_statistics.looks_slower(estimate)
    assert gate_statistics.verdict(estimate, estimate, RIGHT) == "inconclusive"
    item = ab.Item("leaky_average", "cpu", "mosaics", "float32", "fwd")
    assert "-" in ab_command._cells(ab.Outcome(item, "inconclusive", "", estimate))


def test_ab_says_beforehand_how_long_it_may_take_and_is_quiet_if_asked(gate):
    done = gate(PLUGIN, WRONG, "--no-static")  # a refusal ends at once
    assert done.returncode == 2, done.stdout + done.stderr
    assert "at most" in done.stderr and "worker pair 1 of 1" in done.stderr
    assert done.stderr.index("at most") < done.stderr.index("worker pair 1 of 1")
    last = done.stdout.splitlines()[-1]
    assert last.startswith("Verdict: ") and f"(exit code {done.returncode})" in last
