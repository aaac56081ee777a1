"""Plant faults in a copy of this tree and print the verdicts of `ab`: python -m tests.bench.proof.

A C++ kernel idles for 5% and 10% of its time; then a tree is compared with itself, with and without a process that
keeps one core busy. It takes minutes. test_planted.py has the faults that need no timing.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from retro_bench.compare import ab as trees
from tests.bench import plants

TIMED = ["--no-static", "--no-build", "--dtype", "float32", "--mode", "fwd", "--threads", "1"]
TIMED += ["--op", "topk_chunks", "--case", "rpt-retriever"]
HEADER = """\
| planted | expected | exit code | verdict | head/base | interval | control | minutes |
|---|---|---|---|---|---|---|---|"""
BUSY = "import torch\ntorch.set_num_threads(1)\na = torch.randn(512, 512)\nwhile True:\n    a @ a"


@dataclass(frozen=True)
class Row:
    planted: str
    expected: tuple[int, ...]  # expected exit codes
    code: int
    said: tuple[str, ...]  # verdict, head/base, interval, control
    minutes: float

    def __str__(self) -> str:
        good = "" if self.code in self.expected else " (WRONG)"
        expected = " or ".join(map(str, self.expected))
        return (
            "| " + " | ".join((self.planted, expected, f"{self.code}{good}", *self.said, f"{self.minutes:.1f}")) + " |"
        )


def ab(planted: str, expected: tuple[int, ...], base: Path, head: Path) -> Row:
    begun = time.monotonic()
    command = [sys.executable, "-m", "retro_bench", "ab", "--base", str(base), *TIMED]
    environ = os.environ | {"PYTHONPATH": str(head / "bench")}
    done = subprocess.run(command, cwd=head, env=environ, capture_output=True, text=True)
    return Row(planted, expected, done.returncode, said(done.stdout, done.stderr), (time.monotonic() - begun) / 60)


def said(out: str, err: str) -> tuple[str, ...]:
    """Return verdict, head/base, interval and control of the one measurement."""
    for line in out.splitlines():
        cells = re.split(r"\s{2,}", line)
        if line.startswith("topk_chunks/cpu/") and len(cells) == 6:
            return cells[1], cells[2], cells[3].replace(" .. ", " to "), cells[5]
    return (err.strip().splitlines() or ["nothing"])[-1][:80], "-", "-", "-"


def rows(base: Path, head: Path, runs: int) -> Iterator[Row]:
    for percent, codes in ((5, (0, 1)), (10, (1,))):  # 5% is the threshold: a warning or a failure
        plant = plants.slower(percent)
        restored(head, plant)
        trees.build(head)
        for _ in range(runs):
            yield ab(plant.name, codes, base, head)
    restored(head)
    trees.build(head)
    for _ in range(runs):
        yield ab("nothing", (0,), base, head)
    for _ in range(runs):
        busy = subprocess.Popen([sys.executable, "-c", BUSY])
        try:
            yield ab("nothing, a core busy", (0, 3), base, head)
        finally:
            busy.kill()
            busy.wait()


def restored(head: Path, *faults: plants.Plant) -> None:
    """Restore the tree as committed and apply these faults."""
    subprocess.run(["git", "checkout", "-q", "--", "."], cwd=head, check=True)
    for fault in faults:
        fault.apply(head)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--runs", type=int, default=3, help="of each timed comparison (default 3)")
    arguments, wrong = parser.parse_args(), False
    with tempfile.TemporaryDirectory(prefix="retro-proof-") as folder:
        head = plants.copy_tree(Path(folder) / "head")
        trees.build(head)
        base = plants.copy_tree(Path(folder) / "base", head)
        print(HEADER, flush=True)
        for row in rows(base, head, arguments.runs):
            print(row, flush=True)
            wrong |= row.code not in row.expected
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
