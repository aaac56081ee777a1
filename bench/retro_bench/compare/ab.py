"""Compare two trees: fresh pairs of worker processes, interleaved A B B A. `gate_statistics` makes the verdict."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..measure import choose
from ..records import environment, record
from ..registry import contenders_of
from . import gate_statistics
from .affected import commit

WORKER_PAIRS, ABBA_PAIRS = 5, 20
MOST_BATCHES = 4  # of WORKER_PAIRS, while an interval is too wide
MOST_TAKES = 3 * MOST_BATCHES  # base against head, the control, and base against head again
LEAST_SAMPLE_S = 3e-3  # far above the clock's and the scheduler's grain
LONG_CALL_S = 20e-3  # in so long a call refilling a cache does not count
LONG_PAIR_S, LEAST_ABBA_PAIRS = 4.0, 8  # a long call needs fewer samples: each averages the machine's noise
# a pair of processes measures and checks a call of less than 0.1 s within this time
MOST_PAIR_S = 2 * LONG_PAIR_S
MOST_START_S = 15.0  # until a pair of processes has imported torch and the kernels
HERE = Path(__file__).resolve().parent
Say = Callable[[str], None]


@dataclass(frozen=True)
class Item:
    """One measurement that both trees make. plugins: (module, its folder) that register its case or contender."""

    op: str
    backend: str
    case: str
    dtype: str
    mode: str
    plugins: tuple[tuple[str, str], ...] = ()

    @property
    def id(self) -> str:
        return record.identity(self.op, self.backend, self.case, self.dtype, self.mode)


@dataclass(frozen=True)
class Refusal:
    """A tree can't make a measurement. side: "base", "head", or "both": neither can, or their cases differ."""

    side: str
    status: str
    reason: str


#: samples of the process pairs of an item, or why a tree has none
Taken = list[gate_statistics.Pair] | Refusal
#: yields an item as soon as it is sampled
Samples = Iterator[tuple[Item, Taken]]


@dataclass(frozen=True)
class Outcome:
    item: Item
    verdict: str  # of gate_statistics.verdict, or numerics | vanished | new | not compared | not run
    reason: str = ""
    first: gate_statistics.Ratio | None = None
    second: gate_statistics.Ratio | None = None
    control: gate_statistics.Ratio | None = None


def items(selection: choose.Selection, plugins: tuple[tuple[str, str], ...] = ()) -> list[Item]:
    """Return every case, type and mode of every op, or of the backends that the selection names."""
    found = []
    for case in choose.cases(selection):
        roles = ("ours", "reference") if selection.backends else ("ours",)
        able = [c for c in contenders_of(case.op) if c.role in roles and selection.device in c.devices]
        names = [c.name for c in able if choose.matches(c.name, selection.backends)]
        parts = itertools.product(choose.dtypes(case, selection), names, choose.modes(case, selection))
        found += [Item(case.op, name, case.name, dtype, mode, plugins) for dtype, name, mode in parts]
    return found


class Worker:
    """Process that runs the kernels of one tree. If the head imports a module from `root`, the process imports that
    module from its own tree.
    """

    def __init__(self, tree: Path, root: Path):
        self.tree, self.root = tree, root
        # passive waiting: the idle worker must not spin on the cores of the timed worker
        env = os.environ | {"OMP_WAIT_POLICY": "passive", "KINETO_LOG_LEVEL": "99"}
        command = [sys.executable, str(HERE / "ab_worker.py"), str(tree), str(root)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, **pipes, env=env, cwd=tree)

    def ask(self, message: dict) -> dict:
        line = ""
        with contextlib.suppress(BrokenPipeError):  # it died before it could read
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        if not line:
            return {"status": "error", "reason": f"the worker died with code {self.process.wait()}"}
        return json.loads(line)

    def alive(self) -> Worker:
        """Return this worker, or a new one of the same tree if it died."""
        if self.process.poll() is None:
            return self
        self.close()
        return Worker(self.tree, self.root)

    def close(self) -> None:
        self.process.kill()  # it is idle, or the run was interrupted
        with contextlib.suppress(BrokenPipeError):  # a dead worker leaves messages unread
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


def batch(
    base: Path,
    head: Path,
    items: list[Item],
    threads: int,
    check: bool,
    say: Say,
    worker_pairs: int = WORKER_PAIRS,
    root: Path | None = None,
) -> Samples:
    """Yield the samples of every item from fresh process pairs. root: of the head, which a control lacks."""
    samples: dict[Item, Taken] = {item: [] for item in items}
    for number in range(worker_pairs):
        say(f"worker pair {number + 1} of {worker_pairs}")
        begun = time.monotonic()
        workers = {"base": Worker(base, root or head), "head": Worker(head, root or head)}
        try:
            for item in items:
                if isinstance(samples[item], Refusal):
                    continue
                # a crash ends one measurement, not the next
                workers = {side: worker.alive() for side, worker in workers.items()}
                result = _measure(workers, item, threads, check and number == 0, seed=number)
                samples[item] = result if isinstance(result, Refusal) else [*samples[item], result]
                if isinstance(result, Refusal) or number == worker_pairs - 1:
                    yield item, samples[item]
        finally:
            for worker in workers.values():
                worker.close()
        if check and number == 0:  # after the first batch
            say(from_now_on(time.monotonic() - begun, worker_pairs))


def from_now_on(pair_s: float, worker_pairs: int) -> str:
    """Say how long the timing takes, when the time of the first pair of processes is known."""
    took = pair_s * worker_pairs / 60
    most = MOST_TAKES * took
    return (
        f"usually takes {took:.1f} min in all; at most {most:.1f} min, if all intervals are wide and all calls slower"
    )


def longest(measurements: int, worker_pairs: int) -> str:
    """Say how long the timing may take at most, before anything is known about the calls."""
    most = (measurements * MOST_PAIR_S + MOST_START_S) * worker_pairs * MOST_TAKES / 60
    limit = f"at most {most:.0f} min if no call takes 0.1 s and nothing else runs"
    return f"{measurements} measurements: {limit}; the first pair of processes tells the usual time"


def _measure(
    workers: dict[str, Worker], item: Item, threads: int, check: bool, seed: int
) -> gate_statistics.Pair | Refusal:
    wanted = vars(item) | {"seed": seed, "threads": threads, "check": check}
    answers = {side: worker.ask({"prepare": wanted}) for side, worker in workers.items()}
    if refusal := refusal_of(answers["base"], answers["head"]):
        return refusal
    slowest = max(answer["seconds"] for answer in answers.values())
    repeats = max(int(LEAST_SAMPLE_S / slowest), 1)
    affordable = int(LONG_PAIR_S / (4 * repeats * slowest))
    times: dict[str, list[float]] = {"base": [], "head": []}
    for pair in range(min(ABBA_PAIRS, max(affordable, LEAST_ABBA_PAIRS))):
        for side in ("base", "head", "head", "base") if pair % 2 == 0 else ("head", "base", "base", "head"):
            answer = workers[side].ask({"sample": repeats, "long": slowest > LONG_CALL_S})
            if "seconds" not in answer:
                return Refusal(side, answer["status"], answer["reason"])
            times[side].append(answer["seconds"])
    for side, worker in workers.items():
        answer = worker.ask({"finish": True})
        if not answer.get("ok"):
            return Refusal(side, answer["status"], answer["reason"])
    return times["base"], times["head"]


def refusal_of(base: dict, head: dict) -> Refusal | None:
    """Return why two prepared sides can't be compared. A head that is wrong comes first, whatever the base is."""
    if head.get("ok") and base.get("ok"):
        changed = record.differences(base["case"], head["case"])
        return Refusal("both", "error", f"the case changed: {changed}") if changed else None
    if {"unsupported"} == {base.get("status"), head.get("status")}:
        return Refusal("both", "unsupported", head["reason"])
    head_first = not head.get("ok") and (head["status"] != "unsupported" or base.get("ok"))
    side, answer = ("head", head) if head_first else ("base", base)
    return Refusal(side, answer["status"], answer["reason"])


def sampled(take: Callable[[list[Item]], Samples], items: list[Item], say: Say) -> Samples:
    """Sample the items by `take`, then again those whose interval is still wide: noise takes more process pairs."""
    pairs, left = collections.defaultdict(list), items
    for number in range(MOST_BATCHES):
        if number:
            say(f"{len(left)} of {len(items)} intervals are wide: more worker pairs")
        wide = []
        for item, more in take(left):
            if isinstance(more, Refusal):
                yield item, more
                continue
            pairs[item] += more
            if gate_statistics.settled(gate_statistics.ratio(pairs[item])) or number == MOST_BATCHES - 1:
                yield item, pairs[item]
            else:
                wide.append(item)
        left = wide
        if not left:
            return


def compare(
    base: Path, head: Path, items: list[Item], threads: int, say: Say, worker_pairs: int = WORKER_PAIRS
) -> Iterator[Outcome]:
    """Yield one verdict per item, from samples by `batch`."""

    def once(other: Path, some: list[Item]) -> Samples:  # numerics are checked when all items are first taken
        return batch(base, other, some, threads, some is items, say, worker_pairs, head)

    return judged(once, base, head, items, say)


def judged(once: Callable[[Path, list], Samples], base: Path, head: Path, items: list, say: Say) -> Iterator[Outcome]:
    """Yield one verdict per item, as soon as it exists. An item that may have changed gets a control, and a slower item
    gets a second batch too.

    once: takes one batch of samples of some items in the base and in another tree.
    """

    def take(what: str, other: Path, wanted: list) -> Samples:
        if wanted:
            say(what)
            yield from sampled(functools.partial(once, other), wanted, say)

    first, controls = {}, {}

    def outcome(item, second: gate_statistics.Ratio | None = None) -> Outcome:
        ratio, control = gate_statistics.ratio(first[item]), controls.get(item)
        verdict = gate_statistics.verdict(ratio, second, control) if control else "ok"
        return Outcome(item, verdict, "", ratio, second, control)

    for item, pairs in take("base against head", head, items):
        if isinstance(pairs, Refusal):
            yield _refused(item, pairs)
            continue
        first[item] = pairs
        if gate_statistics.unchanged(gate_statistics.ratio(pairs)):
            yield outcome(item)
            del first[item]
    for item, pairs in take(f"control, base against base, of {len(first)}", base, list(first)):
        if isinstance(pairs, Refusal):  # both sides are the base
            yield _refused(item, Refusal("base", "error", pairs.reason))
            continue
        controls[item] = gate_statistics.ratio(pairs)
        if not gate_statistics.looks_slower(gate_statistics.ratio(first[item])):
            yield outcome(item)
            del controls[item]
    for item, pairs in take(f"second batch of {len(controls)}", head, list(controls)):
        yield _refused(item, pairs) if isinstance(pairs, Refusal) else outcome(item, gate_statistics.ratio(pairs))


def listed(tree: Path, root: Path, selection: dict, plugins: tuple[tuple[str, str], ...]) -> list[Item]:
    """List the items that a tree would measure of a selection."""
    worker = Worker(tree, root)
    answer = worker.ask({"list": selection, "plugins": plugins})
    worker.close()
    return [Item(*fields, plugins) for fields in answer.get("items", [])]


def _refused(item: Item, refusal: Refusal) -> Outcome:
    """Return the outcome of a contender that one side refused.

    A head that fails is a failure. A contender that only the base has is "vanished". A contender that only the head has
    is "new".
    """
    known = {"base": ("new", "not compared"), "head": ("vanished", "numerics"), "both": ("not run", "not compared")}
    unsupported, failed = known[refusal.side]
    reason = refusal.reason if refusal.side == "both" else f"{refusal.side}: {refusal.reason}"
    return Outcome(item, unsupported if refusal.status == "unsupported" else failed, reason)


@contextlib.contextmanager
def checked_out(ref: str, root: Path = environment.ROOT) -> Iterator[Path]:
    """Yield a temporary worktree of the commit `ref`, or the folder of that name. Raises ValueError for another."""
    if ref and Path(ref).is_dir():
        yield Path(ref).resolve()
        return
    sha = commit(ref, root)
    with tempfile.TemporaryDirectory(prefix="retro-ab-") as folder:
        path = Path(folder) / "base"
        worktree = ["git", "-C", str(root), "worktree"]
        done = subprocess.run([*worktree, "add", "--detach", str(path), sha], capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"--base {ref}: {done.stderr.strip().splitlines()[-1]}")
        try:
            yield path
        finally:
            subprocess.run([*worktree, "remove", "--force", str(path)], capture_output=True)


def build(tree: Path, command: str | None = None, like: Path | None = None) -> None:
    """Build a tree by lines of bash, up to the first that fails; without them, its extensions by its setup.py.

    like: a tree that is built; its extensions are copied where the C++ is the same. Raises RuntimeError with the first
    error.
    """
    option = "setup.py" if command is None else "--build"
    if command is None:
        if not (tree / "setup.py").exists():
            return
        if like is not None and sources(tree) == sources(like):
            for binary in (like / "retro_kernels").glob("*.so"):
                shutil.copy2(binary, tree / "retro_kernels")
            return
        command = f"{shlex.quote(sys.executable)} setup.py -q build_ext --inplace"
    done = subprocess.run(["bash", "-e", "-o", "pipefail", "-c", command], cwd=tree, capture_output=True, text=True)
    said = f"{done.stdout}{done.stderr}".strip() or "no output"
    # The setup.py of an older tree only warns of a failure and leaves an old binary, which must not be measured.
    if done.returncode or re.search(r"building extension .* failed", said):
        first = next((line for line in said.splitlines() if re.search(r"\berror\s*:", line)), said.splitlines()[-1])
        raise RuntimeError(f"{option} failed in {tree.name}: {first}")


def sources(tree: Path) -> dict[str, bytes]:
    """Read the sources of the extensions: path -> contents."""
    builders = (tree / name for name in ("setup.py", "tools/build_extensions.py"))
    paths = [p for p in (*builders, *(tree / "csrc").rglob("*")) if p.is_file()]
    return {p.relative_to(tree).as_posix(): p.read_bytes() for p in paths}
