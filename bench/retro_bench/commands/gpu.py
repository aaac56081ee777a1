"""run the first hours on a GPU in stages: right, fast, tune, look

A stage is a list of commands, each in its own process, with one deadline. Progress is saved after each command: a
stage that was cut off continues, and --again starts it anew. Needs no network. A missing tool is named and skipped. A
command that breaks does not stop the stage. --rehearse runs the same lists on a CPU with the smallest cases, to test
that every command is accepted. Its records are marked, and reports and comparisons refuse them.
"""

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ..records import environment, record
from . import exits, options
from .progress import say

MOST_WORKERS = 16  # of pytest; the CUDA context of each takes some 0.5 GB
LIMIT_S = 570  # deadline of a stage, which stays under ten minutes with its start
#: shapes of the published models, one for each op and pass
HEADLINE = ("retro-1.5b", "rpt-16k", "decoder-2k", "encoder-self-b512", "rpt-window-16k", "decoder-1k")
HEADLINE += ("precompute-1m", "rpt-retriever-b32", "mosaics-b64")
SMALLEST = ("decode-1", "encoder-cross", "rpt-retriever", "mosaics")
#: commands whose files list the cases that the time limit left out
MEASURING = ("check", "run", "profile")
#: exit codes of a step that ran to its end; a step with another exit code runs again
FINISHED = (exits.OK, exits.REGRESSION, exits.NUMERICS)


@dataclass(frozen=True)
class Step:
    """One command of a stage."""

    name: str
    command: str  # arguments of `retro-bench`, or of the program `tool`; `words` fills in {device}, {cases} and others
    seconds: int  # estimate for an H200 with compiled kernels
    tool: str | None = None
    needs: tuple[str, ...] = ()  # modules without which the step is skipped
    variables: tuple[tuple[str, str], ...] = ()  # added to the environment


_MEASURED = "--device {device} --case {cases} --quiet --deadline {left}"
_EVERYTHING = "--device {device} {every} --quiet --deadline {left}"
_FOUND = "--error-exitcode 2"
_PREDICTIONS = "retro_bench.measure.predictions"
#: Nsight Compute replays each launch some 40 times, so each call is made once and at most 60 launches are counted.
_FEW = "--launch-count 60 --kill yes"
_ONCE = "{python} -m retro_bench profile --calls 1 --device {device} --case {cases}"
_CHECKED = "{python} -m retro_bench check --device {device} --case {small} --mode fwd --quiet --deadline {left}"

#: The caching allocator puts many tensors into one block: memcheck would miss accesses past the end of a tensor.
_UNCACHED = (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),)

STAGES = {
    "right": (
        Step("doctor", "doctor --no-noise", 15),
        Step("check", f"check {_MEASURED} --json {{out}}/check.jsonl", 40),
        Step("check again", f"check {_MEASURED} --json {{out}}/check.jsonl", 40),  # a race may show in one alone
        Step("check all", f"check {_EVERYTHING} --baselines none --json {{out}}/check.jsonl", 80),
        Step("check all again", f"check {_EVERYTHING} --baselines none --json {{out}}/check.jsonl", 80),
        Step("tests", "-m pytest -q -p no:cacheprovider {tests}", 120, "python", ("pytest", "hypothesis")),
        Step("memory errors", f"--tool memcheck {_FOUND} {_CHECKED}", 60, "compute-sanitizer", (), _UNCACHED),
        Step("races", f"--tool racecheck {_FOUND} {_CHECKED}", 60, "compute-sanitizer"),
    ),
    "fast": (
        Step("headline", f"run {_MEASURED} {{run}}", 120),
        Step("table", "report {out}/run.jsonl --format md --output {out}/run.md", 5),
        Step("predictions", f"-m {_PREDICTIONS} {{device}} {{left}} {{out}}/predicted.jsonl {{part}}", 60, "python"),
        Step("host time", "host --json {out}/host.json", 30),
        Step("baselines", f"run {_MEASURED} --baselines all {{baselines}}", 140),
        Step("all", f"run {_EVERYTHING} {{all}}", 200),
    ),
    "tune": (Step("tiles", "tune --device {device} --case {cases} --deadline {left} --json {out}/tuned.jsonl", 540),),
    "look": (
        Step("profile", f"profile {_MEASURED} --trace {{out}}/traces --json {{out}}/profile.jsonl", 120),
        Step("replay", f"profile {_MEASURED} --mode decode,fwd {{graphs}} --json {{out}}/graphs.jsonl", 60),
        Step("counters", f"--set full {_FEW} --target-processes all -f -o {{out}}/ncu {_ONCE}", 180, "ncu"),
        Step("timeline", f"profile -t cuda,nvtx -f true -o {{out}}/nsys {_CHECKED}", 60, "nsys"),
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, folder = parser.add_argument, "write records, traces and progress to this folder (default bench-gpu)"
    limit = f"stop each stage after this time (default {LIMIT_S})"
    add("stage", choices=(*STAGES, "all"), help="run this stage, or all in turn")
    add("--out", type=Path, default=Path("bench-gpu"), metavar="DIR", help=folder)
    add("--deadline", type=options.seconds, default=LIMIT_S, metavar="SECONDS", help=limit)
    add("--again", action="store_true", help="start again from the first command")
    add("--rehearse", action="store_true", help="run the smallest cases, on a CPU")


def execute(arguments: argparse.Namespace) -> int:
    arguments.out.mkdir(parents=True, exist_ok=True)
    return worst([stage(name, arguments) for name in (STAGES if arguments.stage == "all" else [arguments.stage])])


def worst(codes: list[int]) -> int:
    """Return the code of all steps: NOTHING_MEASURED if none of them could run."""
    return next(
        (code for code in (exits.NUMERICS, exits.INCONCLUSIVE, exits.OK) if code in codes), exits.NOTHING_MEASURED
    )


def stage(name: str, arguments: argparse.Namespace) -> int:
    """Run the steps of a stage that are left. Return NUMERICS for wrong numbers, INCONCLUSIVE if a step is left."""
    begun, codes, state = time.monotonic(), [], arguments.out / f"{name}.json"
    known = {} if arguments.again or not state.exists() else json.loads(state.read_text())
    todo = [step for step in STAGES[name] if not isinstance(known.get(step.name), int)]
    expected = sum(step.seconds for step in todo) / 60
    say(f"{name}: {len(todo)} steps, about {expected:.0f} min on an H200, at most {arguments.deadline / 60:.0f} min")
    for step in STAGES[name]:
        left = arguments.deadline - (time.monotonic() - begun)
        if isinstance(known.get(step.name), int):
            say(f"{name}: {step.name}: done before, exit code {known[step.name]}")
            codes.append(known[step.name])
        elif why := missing(step):
            say(f"{name}: {step.name}: {why}")
            known[step.name] = why
        elif left <= 0:
            say(f"{name}: {step.name}: no time is left; run the stage again")
            codes.append(exits.INCONCLUSIVE)
        else:
            code = run(step, arguments, left)
            say(f"{name}: {step.name}: exit code {code}, {time.monotonic() - begun:.0f} s into the stage")
            idle = arguments.rehearse and code == exits.NOTHING_MEASURED  # a CPU has no tiles to tune
            done = code in (exits.OK, exits.NUMERICS) or (step.tool is None and code in FINISHED) or idle
            known[step.name] = code if done else f"exit code {code}"
            codes.append(code if done else exits.INCONCLUSIVE)
        if known:
            state.write_text(json.dumps(known, indent=1) + "\n")
    return worst(codes)


def missing(step: Step) -> str | None:
    """Name the first requirement of the step that this machine lacks."""
    if step.tool not in (None, "python") and not shutil.which(step.tool):
        return f"{step.tool} is not installed"
    absent = [name for name in step.needs if importlib.util.find_spec(name) is None]
    return f"{absent[0]} is not installed" if absent else None


def run(step: Step, arguments: argparse.Namespace, left: float) -> int:
    """Run one step in its own process until the stage's time is over. Its output goes to a log next to the records.

    Return its exit code, or INCONCLUSIVE if the time limit left out a part of the step.
    """
    command = words(step, arguments, left)
    say("  " + shlex.join(command))
    variables = {environment.REHEARSAL: "1"} if arguments.rehearse else {"TRITON_INTERPRET": "0"} | dict(step.variables)
    with open(arguments.out / f"{step.name.replace(' ', '-')}.log", "a", encoding="utf-8") as log:
        code = supervised(command, log, variables, left + 20)
    name, files = step.command.split()[0], [b for a, b in itertools.pairwise(command) if a in ("--json", "--resume")]
    kept = [Path(file) for file in files if name in MEASURING and step.tool is None and Path(file).exists()]
    return exits.INCONCLUSIVE if code == exits.OK and any(map(record.left, kept)) else code


def supervised(command: list[str], log: IO[str], variables: dict[str, str], seconds: float) -> int:
    """Run a command for at most `seconds`. Return its exit code, or INCONCLUSIVE if it ran out of time."""
    environ = os.environ | variables
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environ, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return exits.INCONCLUSIVE
    finally:  # its children end with it, so that none of them runs during the next measurement
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def words(step: Step, arguments: argparse.Namespace, left: float) -> list[str]:
    """Return the step's command with its blanks filled in."""
    small, rehearse = ",".join(SMALLEST), arguments.rehearse
    blanks = {
        "device": "cpu" if rehearse else "cuda",
        "cases": small if rehearse else ",".join(HEADLINE),
        "small": small,
        "every": f"--case {small}" if rehearse else "",
        "tests": shlex.join(tests(rehearse)),
        "part": "relative_delta" if rehearse else "",
        "graphs": "" if rehearse else "--cuda-graph",
        **{name: records(arguments, name) for name in ("run", "baselines", "all")},
        "out": str(arguments.out),
        "left": f"{left:.0f}",
        "python": sys.executable,
    }
    filled = shlex.split(step.command.format(**blanks))
    if step.tool == "python":
        return [sys.executable, *filled]
    return [step.tool, *filled] if step.tool else [sys.executable, "-m", "retro_bench", *filled]


def records(arguments: argparse.Namespace, name: str) -> str:
    """Return the options of `run` that name its file. The file of an interrupted step is continued."""
    path = arguments.out / f"{name}.jsonl"
    return f"--resume {path}" if path.exists() and not arguments.again else f"--json {path} --fresh"


def tests(rehearse: bool) -> list[str]:
    """Return pytest's selection: the tests of values, one process a core where pytest-xdist is installed."""
    if rehearse:
        return [str(environment.ROOT / "tests" / "ops" / "test_validation.py")]
    jobs = ["-n", str(min(environment.available_cores(), MOST_WORKERS))] if importlib.util.find_spec("xdist") else []
    files = [str(environment.ROOT / "tests" / name) for name in ("ops", "model/test_captured.py")]
    return [*files, "-k", "values or decod or empty or dropout or on_a_gpu", *jobs]
