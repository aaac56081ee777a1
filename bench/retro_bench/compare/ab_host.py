"""The host half of `ab`: host time of calls in either tree, in fresh processes by turns."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from . import tree

ROUNDS = 3  # pairs of processes; a second batch of as many where a call looks slower
Say = Callable[[str], None]
BAR, GRAIN_S = 1.15, 2e-6  # slower by 15%, and by more than the noise of clock and allocator


def compare(base: Path, head: Path, ops: tuple[str, ...], say: Say) -> list[str] | None:
    """Return the calls whose host time exceeded the bar twice. None where a tree can't be measured."""
    slower = _slower(base, head, ops, say)
    if not slower:
        return None if slower is None else []
    say(f"host time: {len(slower)} calls seem slower: a second batch")
    again = _slower(base, head, ops, say) or {}
    return [
        f"{name}: host time {after * 1e6:.1f} us, was {before * 1e6:.1f}"
        for name, (before, after) in again.items()
        if name in slower
    ]


def _slower(base: Path, head: Path, ops: tuple[str, ...], say: Say) -> dict[str, tuple[float, float]] | None:
    least: dict[Path, dict[str, float]] = {}
    for number in range(ROUNDS):
        for side in (base, head) if number % 2 == 0 else (head, base):
            measured = _measure(side, ops)
            if measured is None:
                say(f"host time: {'the base' if side == base else 'the head'} can't be measured")
                return None
            known = least.setdefault(side, measured)
            least[side] = {name: min(value, measured.get(name, value)) for name, value in known.items()}
    return slower(least[base], least[head])


def slower(before: dict[str, float], after: dict[str, float]) -> dict[str, tuple[float, float]]:
    """Return the calls that took at least BAR times as long, and GRAIN_S longer.

    >>> slower({"a": 20e-6, "b": 20e-6, "c": 1e-6}, {"a": 26e-6, "b": 21e-6, "c": 2e-6})
    {'a': (2e-05, 2.6e-05)}
    """
    names = sorted(name for name in before.keys() & after.keys() if not name.startswith("floor"))
    limits = {name: max(BAR * before[name], before[name] + GRAIN_S) for name in names}
    return {name: (before[name], after[name]) for name in names if after[name] > limits[name]}


def _measure(side: Path, ops: tuple[str, ...]) -> dict[str, float] | None:
    with tempfile.TemporaryDirectory(prefix="retro-host-") as folder:
        out = Path(folder) / "host.json"
        command = [sys.executable, tree.__file__, str(side), str(side), "", "host", "--json", str(out)]
        command += ["--op", ",".join(ops)] if ops else []
        environ = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=side)
        return json.loads(out.read_text()) if done.returncode == 0 else None
