"""`ab` on a small repository: its words and its exit codes if a tree can't be compared."""

import os
import subprocess
import sys
import time

import pytest

import retro_bench
from retro_bench.commands import ab as ab_command
from retro_bench.compare import ab, ab_static, gate_statistics
from retro_bench.compare.gate_statistics import Ratio
from tests import trees
from tests.bench import foreign

PLUGIN = """
import os

import retro_bench


class Deadly:
    def __radd__(self, x):
        os._exit(9)


def operator(name, case, size, extra, mine="mine"):
    retro_bench.register(
        retro_bench.Operator(
            name,
            ("y",),
            ("x",),
            build=lambda case, draw: {"x": draw.normal(2, size)},
            call=lambda arguments, backend: (arguments["x"] * 2,),
            work=lambda case, itemsize, mode: retro_bench.Work(1.0, 8.0),
        )
    )
    retro_bench.register(retro_bench.Contender(name, "eager", lambda x: x * 2))
    retro_bench.register(retro_bench.Contender(name, mine, lambda x: x + x + extra, role="ours"))
    types = {"cpu": ("float32",), "cuda": ("float32",)}
    retro_bench.register(retro_bench.Case(name, "small", case, "a test", modes=("fwd",), dtypes=types))
"""
RIGHT, ITEM = Ratio(1, 1, 1), ab.Item("leaky_average", "cpu", "mosaics", "float32", "fwd")
WRONG, DEADLY, RENAMED = "0) -> 1)", "0) -> Deadly())", '0) -> 0, "other")'
SIZE, CASE = "64 -> 96", '{"B": 2} -> {"B": 3}'


def plugin(**operators: str) -> str:
    """Return a plug-in with an operator of each name: right, or changed as the text says."""
    text = PLUGIN
    for name, change in operators.items():
        old, _, now = change.partition(" -> ")
        line = f'operator("{name}", {{"B": 2}}, 64, 0)\n'
        assert not old or line.count(old) == 1
        text += line.replace(old, now)
    return text


@pytest.fixture
def gate(tmp_path):
    """Run `ab` with one plug-in in the commit and another in the working tree; None: no file."""

    def run(base: str | None, head: str, *more: str) -> subprocess.CompletedProcess:
        plug = tmp_path / "kernels" / "plug.py"
        plug.parent.mkdir()
        (tmp_path / "README").write_text("kernels")
        if base is not None:
            plug.write_text(base)
        trees.commit(tmp_path)
        plug.write_text(head)
        given = ["--plugin", "kernels.plug", "--base", "HEAD", "--threads", "1", "--pairs", "1", *more]
        return foreign.bench(tmp_path, "ab", *given)

    return run


@pytest.mark.parametrize(
    ("base", "head", "code", "verdicts"),
    [
        pytest.param(
            None,
            plugin(first=""),
            0,
            {"first": ("new", "every measurement is new, so nothing was compared")},
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "import no_such_module",
            plugin(any=""),
            6,
            {"any": ("not compared", "base: --plugin kernels.plug")},
            marks=pytest.mark.nightly,
        ),
        (
            plugin(wrong=WRONG, mended=WRONG, renamed="", inputs="", shape="", gone=""),
            plugin(deadly=DEADLY, wrong=WRONG, mended="", renamed=RENAMED, inputs=SIZE, shape=CASE),
            2,
            {
                "deadly": ("numerics", "head: the worker died with code 9"),
                "wrong": ("numerics", "head: y: error"),
                "mended": ("not compared", "base: y: error"),
                "renamed/other": ("new", "base: no plug-in of this tree registers it"),
                "renamed": ("vanished", "head: no plug-in of this tree registers it"),
                "gone": ("vanished", "head: no plug-in of this tree registers it"),
                "inputs": ("not compared", "x: float32 [2, 96], was float32 [2, 64]"),
                "shape": ("not compared", "B: 3, was 2"),
            },
        ),
    ],
    ids=["first", "base-broken", "all"],
)
def test_what_is_not_compared_is_never_green_in_silence(gate, base, head, code, verdicts):
    quiet = code != 2  # else it says beforehand how long it may take
    done = gate(base, head, "--no-static", *["--quiet"] * quiet)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert done.returncode == code, done.stdout + done.stderr
    assert f"(exit code {code})" in lines[-1] and lines[-1].startswith("Verdict: ")
    for name, (verdict, said) in verdicts.items():
        kernel = name if "/" in name else f"{name}/mine"
        (line,) = [line for line in lines if line.startswith(f"{kernel}/small/float32/fwd {verdict} ")]
        assert said in line or said in lines[-1], line
    assert len(lines) == len(verdicts) + 4  # a head, its line, static metrics, the verdict
    assert "worker pair 1 of 1" in done.stderr.partition("at most")[2] if not quiet else done.stderr == ""


def test_the_first_launches_of_a_repository_are_new_and_green(gate):
    done = gate(None, plugin(first=""), "--static-only")
    assert done.returncode == 0 and "static metrics: not compared: the base has no plug-in" in done.stdout, done.stderr


def code(*verdicts, compared=None):
    return ab_command.exit_code([ab.Outcome(ITEM, v, "", RIGHT, None, RIGHT) for v in verdicts], compared)


def test_exit_codes():
    assert code("ok", "warn", "faster") == 0 and code("ok", "regression") == 1 and code("vanished") == 1
    assert code("regression", "numerics") == 2 and code("ok", "inconclusive") == 3
    assert code("regression", "inconclusive") == 1 and code() == 5
    assert code("ok", compared=ab_static.Comparison(3, 1, ["spills"])) == 1
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
            taken = ab.Refusal(side, "error", "died") if broken else [slow if other == "b" else same] * 5
            return [(item, taken) for item in items]

        monkeypatch.setattr(ab, "batch", batch)
        (outcome,) = ab.compare("a", "b", ["item"], 1, lambda text: None)
        assert outcome.verdict == verdict and "died" in outcome.reason


def test_one_pair_of_processes_has_no_interval():
    estimate = gate_statistics.ratio([([1.0] * 40, [1.2] * 40)])
    assert estimate.value == pytest.approx(1.2) and not gate_statistics.settled(estimate)
    assert not gate_statistics.unchanged(estimate) and not gate_statistics.looks_slower(estimate)
    assert gate_statistics.verdict(estimate, estimate, RIGHT) == "inconclusive"
    assert "-" in ab_command._cells(ab.Outcome(ITEM, "inconclusive", "", estimate))


def test_a_terminated_ab_removes_its_checkout(tmp_path):
    """SIGTERM acts as Ctrl-C."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "plug.py").write_text(plugin(first=""))
    trees.commit(tree)
    command = [sys.executable, "-m", "retro_bench", "ab", "--plugin", "plug", "--base", "HEAD", "--no-static"]
    environ = os.environ | {"PYTHONPATH": f"{trees.ROOT}:{trees.ROOT / 'bench'}", "TMPDIR": str(tmp_path)}
    where = {"cwd": tree, "env": environ, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*command, "--build", "touch begun; exec sleep 100"], **where)
    while not (tree / "begun").exists() and process.poll() is None:
        time.sleep(0.05)
    assert list(tmp_path.glob("retro-ab-*"))
    process.terminate()
    assert "interrupted" in process.communicate()[1] and process.returncode == 5
    assert not list(tmp_path.glob("retro-ab-*"))


def test_an_interrupted_ab_keeps_what_was_judged(monkeypatch, tmp_path, capsys):
    """Every verdict is printed. A page of an earlier run is removed."""

    def batch(base, other, items, *rest):
        yield items[0], [([1.0] * 4, [1.0] * 4)] * 5
        yield items[1], ab.Refusal("head", "error", "died")
        raise KeyboardInterrupt

    monkeypatch.setattr(ab, "batch", batch)
    (tmp_path / "retro_kernels").mkdir()
    page = tmp_path / "a.md"
    page.write_text("all is well")
    command = ["ab", "--base", str(tmp_path), "--no-static", "--no-build", "--op", "leaky_average"]
    command += ["--dtype", "float32"]
    assert retro_bench.main([*command, "--markdown", str(page)]) == 5
    said = capsys.readouterr()
    assert " ok " in said.out and " numerics " in said.out and "head: died" in said.out
    assert "Verdict" not in said.out and "interrupted" in said.err and not page.exists()
