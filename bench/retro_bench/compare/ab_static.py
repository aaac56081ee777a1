"""The static half of `ab`: compile the launches that differ between two trees and compare their metrics. Needs no GPU.

Launches with equal fingerprints have equal machine code under one toolchain, so they are not compiled. The base does
not compile a launch that the head lacks: it is a regression without that.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..commands import exits
from ..records import record
from ..static import regressions
from . import tree as trees

Say = Callable[[str], None]


@dataclass(frozen=True)
class Comparison:
    """`launches`: of the base. `differ`: launches of either tree that were compiled because their sources differ.

    reason: why nothing was compared; failed: it is a fault, not the lack of anything to compare.
    """

    launches: int
    differ: int
    worse: list[str]
    reason: str = ""
    failed: bool = False


def compare(
    base: Path, head: Path, arches: str, parts: list[str], say: Say, plugins: tuple[tuple[str, str], ...] = ()
) -> Comparison:
    """Return the regressions from `base` to `head`, a head that fails included."""
    with tempfile.TemporaryDirectory(prefix="retro-ab-") as name:
        folder = Path(name)
        _static = functools.partial(static, head, plugins, arches, parts, folder)
        before, after = _both(_listing, base, head, _static, folder)
        if after is None:
            return Comparison(len(before or ()), 0, [f"head: {_last_words(folder / 'head.log')}"])
        if before is None:
            return Comparison(0, 0, [], f"base: {_last_words(folder / 'base.log')}", failed=True)
        if not before:
            return Comparison(0, 0, [], "every launch is new" if after else "")
        lost = regressions.vanished(before, after)
        ids = [i for i in before.keys() | after.keys() if before.get(i) != after.get(i)]
        say(f"static metrics: {len(ids)} of {len(before)} launches differ in their sources")
        if not ids:
            return Comparison(len(before), 0, [])
        for side, listing in (("base", before.keys() & after.keys()), ("head", after)):
            (folder / f"{side}-ids.json").write_text(json.dumps([i for i in ids if i in listing]))
        rows = _both(_rows, base, head, _static, folder, say)
        if rows[0] is None:
            why = f"the base does not compile: {_last_words(folder / 'base.log')}"
            return Comparison(len(before), len(ids), lost, why, failed=True)
        if rows[1] is None:
            lost.append(f"head does not compile: {_last_words(folder / 'head.log')}")
            return Comparison(len(before), len(ids), lost)
        other = regressions.changed(*rows)
        return Comparison(len(before), len(ids), lost + regressions.regressions(*rows), "; ".join(other), bool(other))


def _both(what: Callable, base: Path, head: Path, *rest) -> list:
    """Call `what` for both trees at once: nothing here is timed."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda tree: what(*tree, *rest), (("base", base), ("head", head))))


def _listing(side: str, tree: Path, static: Callable[..., bool], folder: Path) -> dict[str, str] | None:
    path = folder / f"{side}-listing.json"
    done = static(side, tree, ["--fingerprints", str(path)]) and path.exists()
    return json.loads(path.read_text()) if done else None


def _rows(side: str, tree: Path, static: Callable[..., bool], folder: Path, say: Say) -> list[dict[str, Any]] | None:
    say(f"static metrics of {side}")
    path = folder / f"{side}.jsonl"
    more = ["--counters", "--only", str(folder / f"{side}-ids.json"), "--json", str(path)]
    if not static(side, tree, more):
        return None
    return record.read(path) if path.exists() else []


def static(
    root: Path,
    plugins: tuple[tuple[str, str], ...],
    arches: str,
    parts: list[str],
    folder: Path,
    side: str,
    tree: Path,
    more: list[str],
) -> bool:
    """Run `static` of this harness on the kernels of `tree`. Return whether its result can be read.

    more: options; the last is the file of results. With it exit code 1 counts: the comparison names what can't launch.
    """
    folders = os.pathsep.join(place for _, place in plugins)
    command = [sys.executable, trees.__file__, str(tree), str(root), folders, "static", "--arch", arches, *more]
    if parts:
        command += ["--launch", ",".join(parts)]
    for name, _ in plugins:
        command += ["--plugin", name]
    with open(folder / f"{side}.log", "w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, cwd=tree).returncode
    return code in (exits.OK, exits.NOTHING_MEASURED) or (code == exits.REGRESSION and Path(more[-1]).exists())


def _last_words(log: Path) -> str:
    return (log.read_text().strip() or "no output").splitlines()[-1]
