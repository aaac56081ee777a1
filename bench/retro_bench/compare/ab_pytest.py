"""`ab --pytest`: run the head's pytest-benchmark suite on the code of both trees, in fresh processes that alternate.

The suite of the head is copied into the checkout of the base, so that one name means one benchmark on both sides. The
sample of a process is the minimum of its rounds. Verdicts are those of the other measurements of `ab`.
"""

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import ab, pytest_side


@dataclass(frozen=True)
class Benchmark:
    id: str  # pytest's id of the test


def compare(base: Path, head: Path, path: str, threads: int | None, say: ab.Say, pairs: int) -> Iterator[ab.Outcome]:
    """Yield one verdict per benchmark of the head, and one for each that only the base has.

    Raises ValueError for a path that holds no tests of the head, and if the code under test comes from neither tree.
    """
    place, run = path.partition("::")[0], functools.partial(_run, head, threads)
    _expect_tests(head, place)
    before = run(base, [path, "--collect-only"])["collected"] if (base / place).exists() else []
    now = run(head, [path, "--collect-only"])
    if now["wrong"]:
        raise ValueError(f"--pytest {path}: {now['wrong']}")
    _lend(head, base, place)
    items = [Benchmark(name) for name in now["collected"]]
    broken = {name: why for name, why in now["left"].items() if not why.startswith(pytest_side.SKIPPED)}
    yield from (ab.Outcome(Benchmark(name), "numerics", f"head: {why}") for name, why in broken.items())
    gone = [name for name in before if name not in now["collected"] and name.partition("::")[0] not in broken]
    yield from (ab.Outcome(Benchmark(name), "vanished", "head: no such benchmark") for name in gone)

    def once(other: Path, some: list[Benchmark]) -> ab.Samples:
        words = [path] if len(some) == len(items) else [one.id for one in some]
        samples: dict[Benchmark, ab.Taken] = {item: [] for item in some}
        for number in range(pairs):
            say(f"pair of processes {number + 1} of {pairs}")
            got, sides, begun = {}, {"base": base, "head": other}, time.monotonic()
            for side in sides if number % 2 == 0 else reversed(sides):
                got[side] = run(sides[side], words)
            if number == 0 and some is items:
                say(ab.from_now_on(time.monotonic() - begun, pairs))
            for item in (item for item in some if isinstance(samples[item], list)):
                answers = (_answer(item.id, got[side], item.id in before or side == "head") for side in sides)
                pair = tuple([got[side]["times"].get(item.id)] for side in sides)
                samples[item] = ab.refusal_of(*answers) or [*samples[item], pair]
        yield from samples.items()

    yield from ab.judged(once, base, head, items, say)


def _answer(name: str, got: dict, known: bool) -> dict:
    """Return the answer of one side in the form of a worker's. known: the side should have this benchmark."""
    if name in got["times"] and not got["wrong"]:
        return {"ok": True, "case": got["cases"][name]}
    left = got["left"]
    why = got["wrong"] or left.get(name) or left.get(name.partition("::")[0]) or "did not run"
    lacking = not got["wrong"] and (not known or why.startswith(pytest_side.SKIPPED))
    return {"status": "unsupported" if lacking else "error", "reason": why}


def _run(root: Path, threads: int | None, tree: Path, words: list[str]) -> dict:
    """Run a part of the suite in a process of its own."""
    # in a worker of xdist, pytest-benchmark would refuse to measure
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environ |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
    with tempfile.TemporaryDirectory(prefix="retro-pytest-") as folder:
        out = Path(folder) / "side.json"
        command = [sys.executable, pytest_side.__file__, str(tree), str(root), str(out), *words]
        done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=tree)
        if out.exists():
            return json.loads(out.read_text())
        last = f"no output\n{done.stdout}\n{done.stderr}".strip().splitlines()[-1]
        return {"collected": [], "times": {}, "cases": {}, "left": {}, "wrong": f"pytest died: {last}"}


def _expect_tests(root: Path, place: str) -> None:
    if importlib.util.find_spec("pytest_benchmark") is None:
        raise ValueError("--pytest: needs pytest-benchmark; pip install pytest-benchmark")
    inside, named = (root / place).resolve(), any(part.startswith(("test", "bench")) for part in Path(place).parts)
    if Path(place).is_absolute() or not inside.exists() or not inside.is_relative_to(root.resolve()):
        raise ValueError(f"--pytest {place}: expected a file or folder of tests, relative to {root}")
    if inside.is_dir() and not named:
        why = "because it is copied into the base, where the code under test must stay"
        raise ValueError(f"--pytest {place}: expected a folder in one named test... or bench..., {why}")


def _lend(head: Path, base: Path, place: str) -> None:
    """Replace the tests in the checkout of the base by the head's tests and each conftest.py above them."""
    if (head / place).is_dir():
        shutil.rmtree(base / place, ignore_errors=True)
        shutil.copytree(head / place, base / place, ignore=shutil.ignore_patterns("__pycache__", ".benchmarks"))
    shared = [folder / "conftest.py" for folder in Path(place).parents]
    for file in (file for file in (Path(place), *shared) if (head / file).is_file()):
        (base / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(head / file, base / file)
