"""`ab --pytest`: an existing pytest-benchmark suite on two commits. Its clock counts steps, so no time is measured."""

import importlib.util

import pytest

from tests import trees
from tests.bench import foreign

pytest.importorskip("pytest_benchmark")

CODE = """
STEPS = 0


def work(n):
    global STEPS
    STEPS += n
    return n
"""
#: pytest-benchmark's timer: seconds by steps of the code
CONFTEST = """
import itertools

import pytest

import mypkg

TICKS = itertools.count()


@pytest.fixture
def steps(benchmark):
    benchmark._timer = lambda: mypkg.STEPS * 1e-3 + next(TICKS) * 1e-9
    return benchmark
"""
SUITE = """
import pytest

import mypkg


@pytest.mark.parametrize("n", [10, 20])
def test_work(steps, n):
    assert steps.pedantic(mypkg.work, (n,), rounds=3) == n


def test_that_measures_nothing():
    assert False, "--benchmark-only leaves it out"
"""
TEST = "tests/benchmarks/test_speed.py"
SLOW = CODE.replace("STEPS += n", "STEPS += n + 2")


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """Run the gate: the first files are committed, the second ones are in the working tree."""
    needed = ["pytest_benchmark.plugin", *["xdist.plugin"] * (importlib.util.find_spec("xdist") is not None)]
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # the other plug-ins take a second of each process
    monkeypatch.setenv("PYTEST_ADDOPTS", " ".join(f"-p {name}" for name in needed))

    def write(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    def run(change, *more, base=None):
        options = "[tool.pytest.ini_options]\naddopts = '--benchmark-disable'\n"
        write({"mypkg/__init__.py": CODE, "pyproject.toml": options})
        write({"tests/benchmarks/conftest.py": CONFTEST, TEST: SUITE} if base is None else base)
        trees.commit(tmp_path)
        write(change)
        return foreign.bench(tmp_path, "ab", "--base", "HEAD", "--pytest", "tests/benchmarks", "--pairs", "2", *more)

    return run


MOVED = SUITE.replace("[10, 20]", "[10, 30]")


@pytest.mark.parametrize(
    ("change", "code", "verdicts", "said"),
    [
        (
            {TEST: MOVED, "mypkg/__init__.py": SLOW},
            1,
            ["test_work[10] regression 1.200", "test_work[20] vanished", "test_work[30] regression 1.067"],
            "2 regression",
        ),
        ({"mypkg/__init__.py": CODE.replace("return n", "return 0")}, 2, ["test_work[20] numerics"], "wrong numbers"),
        pytest.param(
            {TEST: SUITE.replace(".work, (n", ".more, (n"), "mypkg/__init__.py": CODE + "more = work"},
            6,
            ["not compared"],
            "base: ",
            marks=pytest.mark.nightly,
        ),
        ({TEST: "def broken(:"}, 2, ["test_speed.py numerics"], "SyntaxError: invalid syntax"),
    ],
    ids=["slower, vanished and new", "wrong", "base-fails", "broken"],
)
def test_the_suite_is_judged_like_kernels(suite, change, code, verdicts, said):
    done = suite(change, "--quiet")
    out = " ".join(done.stdout.split())
    assert done.returncode == code and done.stderr == "", done.stdout + done.stderr
    assert all(verdict in out for verdict in verdicts) and said in out and f"(exit code {code})" in out, out


def test_the_first_suite_of_a_repository_is_new(suite):
    """The code that it times may be older than the suite: then it is compared."""
    new = {"mypkg/__init__.py": CODE + "more = work", "tests/benchmarks/conftest.py": CONFTEST}
    done = suite(new | {TEST: SUITE.replace(".work, (n", ".more, (n")}, base={"README": "no tests"})
    assert done.returncode == 0 and "every measurement is new" in done.stdout, done.stdout + done.stderr
    assert "at most" in done.stderr and "pair of processes 1 of 2" in done.stderr


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--plugin", "this"], "leave out --plugin"),
        (["--pytest", "nowhere"], "expected a file or folder of tests"),
        (["--pytest", "mypkg"], "named test... or bench..."),
        (["--base", "."], "--base must be a commit"),
    ],
)
def test_what_the_suite_cannot_be_is_refused(suite, more, said):
    done = suite({}, *more)
    assert done.returncode == 4 and said in done.stderr, done.stdout + done.stderr


def test_code_that_is_installed_is_refused(suite, tmp_path_factory):
    """It would be timed twice. Here a conftest.py imports another copy."""
    site = tmp_path_factory.mktemp("site")
    (site / "mypkg").mkdir()
    (site / "mypkg" / "__init__.py").write_text(CODE)
    path = f"import sys\nsys.path.insert(0, {str(site)!r})\n"
    done = suite({"tests/benchmarks/conftest.py": path + CONFTEST})
    assert done.returncode == 4 and "mypkg is no module of the tree" in done.stderr, done.stdout + done.stderr
