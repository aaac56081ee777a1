"""Plant faults one at a time and report those that survive: `python -m tools.mutants [PATH ...]`.

The tests of a target run once without a fault, which sets their time limit, and once with each fault. The exit code is
1 if a fault survives that explained.json does not explain. A seed plants the same faults in the same sources. `--json
FILE` continues a run: faults that were noticed are not planted again.
"""

import argparse
import fnmatch
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests import trees
from tools.mutants import operators, targets

# time limit of the tests with a fault: SLACK times their time without one, and at least LEAST_S; then it is noticed
LEAST_S, SLACK = 60, 4.0
ISA = "avx2"  # C++ is built for it beside portable
EXPLAINED = Path(__file__).resolve().parent / "explained.json"


def sampled_faults(target: targets.Target, tree: Path, seed: int) -> list[operators.Fault]:
    """Return every rare fault of the file and `target.count` others, at most one per line."""
    faults = operators.of(target.path, (tree / target.path).read_text())
    rare, faults = ([f for f in faults if f.rare is kind] for kind in (True, False))
    rng = random.Random(f"{seed} {target.path}")
    rng.shuffle(faults)
    return rare + sorted({f.line: f for f in faults}.values(), key=lambda f: rng.random())[: target.count]


def build(tree: Path) -> bool:
    done = trees.build(tree, ISA, CXXFLAGS="-O1")
    return done.returncode == 0 and not re.search(r"failed|left out", done.stdout)


def noticed(target: targets.Target, tree: Path, limit: float | None) -> tuple[str | None, float]:
    """Run the tests. Return how they notice a fault ("tests", "time" or None), and their seconds."""
    present = [test for test in target.tests if (tree / test).exists()]
    command = [sys.executable, "-m", "pytest", *present, "-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly"]
    environ = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONDONTWRITEBYTECODE": "1"}
    if target.interpreted:
        environ["TRITON_INTERPRET"] = "1"
    begun = time.monotonic()
    try:
        code = subprocess.run(command, cwd=tree, env=environ, capture_output=True, timeout=limit).returncode
    except subprocess.TimeoutExpired:
        return "time", time.monotonic() - begun
    return (None if code == 0 else "tests"), time.monotonic() - begun


def judge(target: targets.Target, fault: operators.Fault, tree: Path, limit: float) -> str:
    """Return "killed", "timeout", "unbuildable" or "survived". The tree is restored."""
    path = tree / target.path
    source = path.read_text()
    path.write_text(fault.apply(source))
    try:
        if target.path.startswith("csrc/") and not build(tree):
            return "unbuildable"
        return {"tests": "killed", "time": "timeout", None: "survived"}[noticed(target, tree, limit)[0]]
    finally:
        path.write_text(source)


def noticed_before(file: Path | None) -> dict[tuple[str, int, str], str]:
    """Return (path, line, fault) -> outcome of the faults that an earlier run into `file` finished."""
    lines = file.read_text().splitlines() if file and file.exists() else []
    outcomes = {(r["path"], r["line"], r["fault"]): r["outcome"] for r in map(json.loads, lines)}
    return {fault: outcome for fault, outcome in outcomes.items() if outcome != "survived"}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__.split("\n\n")[0])
    add, lines = parser.add_argument, "append a line per fault; skip the faults that this file has, except survivors"
    add("paths", nargs="*", default=["*"], metavar="PATH", help="select targets by path; * and ? allowed")
    add("--seed", type=int, default=1)
    add("--json", type=Path, metavar="FILE", help=lines)
    add("--list", action="store_true", help="show the faults and run nothing")
    arguments = parser.parse_args(argv)
    wanted = [t for t in targets.TARGETS if any(fnmatch.fnmatchcase(t.path, p) for p in arguments.paths)]
    if arguments.list:
        for target in wanted:
            for fault in sampled_faults(target, trees.ROOT, arguments.seed):
                print(f"{target.path}:{fault.line}: {fault.text}")
        return 0
    with tempfile.TemporaryDirectory(prefix="retro-mutants-") as folder:
        counts = run(wanted, trees.copy(Path(folder)), arguments)
    print(", ".join(f"{count} {word}" for word, count in sorted(counts.items())))
    return int(counts["survived"] > 0 or counts["target unusable"] > 0)


def run(wanted: list[targets.Target], tree: Path, arguments: argparse.Namespace) -> Counter[str]:
    counts: Counter[str] = Counter()
    if any(t.path.startswith("csrc/") for t in wanted) and not build(tree):
        raise SystemExit("the copy does not build as it is")
    before = noticed_before(arguments.json)
    for target in wanted:
        faults = sampled_faults(target, tree, arguments.seed)
        done = [f for f in faults if (target.path, f.line, f.text) in before]
        counts.update(before[target.path, f.line, f.text] for f in done)
        if len(done) == len(faults):
            continue
        # "line -> line" of a fault that no test can notice: why
        explained = json.loads(EXPLAINED.read_text()).get(target.path, {})
        how, seconds = noticed(target, tree, None)
        if how:
            print(f"{target.path}: its tests fail without a fault", flush=True)
            counts["target unusable"] += 1
            continue
        for fault in (f for f in faults if f not in done):
            outcome = judge(target, fault, tree, max(SLACK * seconds, LEAST_S))
            outcome = "explained" if outcome == "survived" and fault.text in explained else outcome
            counts[outcome] += 1
            print(f"{outcome:<11} {target.path}:{fault.line}: {fault.text}", flush=True)
            row = {"path": target.path, "line": fault.line, "fault": fault.text, "outcome": outcome}
            if arguments.json:
                with open(arguments.json, "a") as f:
                    f.write(json.dumps(row) + "\n")
        if target.path.startswith("csrc/"):
            build(tree)
    return counts


if __name__ == "__main__":
    sys.exit(main())
