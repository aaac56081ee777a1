"""Plant faults one at a time and report those that survive: `python -m tools.mutants [PATH ...]`, or `make mutants`.

For every target the tests run once as they are, which sets their time limit; then once for each fault. C++ is rebuilt
for one instruction set. Exit code 1 where a fault survives that explained.json does not name. One seed plants the same
faults in the same sources. `--json FILE` continues a run: faults that FILE notes as noticed are not planted again.
"""

from __future__ import annotations

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

# a mutant may take this many times the tests' time, but at least LEAST_S; beyond that it counts as noticed
LEAST_S, SLACK = (60, 4.0)
EXPLAINED = Path(__file__).resolve().parent / "explained.json"


def sampled_faults(target: targets.Target, tree: Path, seed: int) -> list[operators.Fault]:
    """Return every rare fault of the file and `target.count` others, at most one a line."""
    faults = operators.of(target.path, (tree / target.path).read_text())
    rare, faults = ([f for f in faults if f.rare is kind] for kind in (True, False))
    rng = random.Random(f"{seed} {target.path}")
    rng.shuffle(faults)
    return rare + sorted({f.line: f for f in faults}.values(), key=lambda f: rng.random())[: target.count]


def build(tree: Path, isa: str) -> bool:
    done = trees.build(tree, isa, CXXFLAGS="-O1")
    return done.returncode == 0 and not re.search(r"failed|left out", done.stdout)


def noticed(target: targets.Target, tree: Path, limit: float | None) -> tuple[str | None, float]:
    """Return how the tests notice ("tests", "time" or None), and the seconds they took."""
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


def judge(target: targets.Target, fault: operators.Fault, tree: Path, limit: float, isa: str) -> str:
    """killed | timeout | unbuildable | survived. The tree is restored afterwards."""
    path = tree / target.path
    source = path.read_text()
    path.write_text(fault.apply(source))
    try:
        if target.path.startswith("csrc/") and not build(tree, isa):
            return "unbuildable"
        return {"tests": "killed", "time": "timeout", None: "survived"}[noticed(target, tree, limit)[0]]
    finally:
        path.write_text(source)


def explained() -> dict[str, dict[str, str]]:
    """Read path -> {"line -> line": why no test can notice}."""
    return json.loads(EXPLAINED.read_text())


def noticed_before(file: Path | None) -> dict[tuple[str, int, str], str]:
    """Return (path, line, fault) -> outcome of the faults that an earlier run into `file` finished."""
    lines = file.read_text().splitlines() if file and file.exists() else []
    outcomes = {(r["path"], r["line"], r["fault"]): r["outcome"] for r in map(json.loads, lines)}
    return {fault: outcome for fault, outcome in outcomes.items() if outcome != "survived"}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__.split("\n\n")[0])
    parser.add_argument("paths", nargs="*", metavar="PATH", help="only targets whose path matches (* and ? allowed)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--isa", default="avx2", help="instruction set that C++ is built for beside portable (default avx2)"
    )
    parser.add_argument(
        "--tree",
        type=Path,
        metavar="DIR",
        help="plant in this copy (default: a temporary one); kept, so that C++ builds are incremental",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="append a line a fault; those it has, survivors apart, are not planted again",
    )
    parser.add_argument("--list", action="store_true", help="show the faults and run nothing")
    arguments = parser.parse_args(argv)
    wanted = [
        t
        for t in targets.TARGETS
        if not arguments.paths or any(fnmatch.fnmatchcase(t.path, p) for p in arguments.paths)
    ]
    if arguments.list:
        for target in wanted:
            for fault in sampled_faults(target, trees.ROOT, arguments.seed):
                print(f"{target.path}:{fault.line}: {fault.text}")
        return 0
    with tempfile.TemporaryDirectory(prefix="retro-mutants-") as folder:
        counts = run(wanted, trees.copy(arguments.tree or Path(folder)), arguments)
    print(", ".join(f"{count} {word}" for word, count in sorted(counts.items())))
    return int(counts["survived"] > 0 or counts["target unusable"] > 0)


def run(wanted: list[targets.Target], tree: Path, arguments: argparse.Namespace) -> Counter[str]:
    counts: Counter[str] = Counter()
    if any(t.path.startswith("csrc/") for t in wanted) and not build(tree, arguments.isa):
        raise SystemExit("the copy does not build as it is")
    before = noticed_before(arguments.json)
    for target in wanted:
        faults = sampled_faults(target, tree, arguments.seed)
        done = [f for f in faults if (target.path, f.line, f.text) in before]
        counts.update(before[target.path, f.line, f.text] for f in done)
        if len(done) == len(faults):
            continue
        how, seconds = noticed(target, tree, None)
        if how:
            print(f"{target.path}: its tests fail without a fault", flush=True)
            counts["target unusable"] += 1
            continue
        for fault in (f for f in faults if f not in done):
            outcome = judge(target, fault, tree, max(SLACK * seconds, LEAST_S), arguments.isa)
            why = explained().get(target.path, {}).get(fault.text)
            outcome = "explained" if outcome == "survived" and why else outcome
            counts[outcome] += 1
            print(f"{outcome:<11} {target.path}:{fault.line}: {fault.text}", flush=True)
            if arguments.json:
                with open(arguments.json, "a") as f:
                    f.write(
                        json.dumps({"path": target.path, "line": fault.line, "fault": fault.text, "outcome": outcome})
                        + "\n"
                    )
        if target.path.startswith("csrc/"):
            build(tree, arguments.isa)
    return counts


if __name__ == "__main__":
    sys.exit(main())
