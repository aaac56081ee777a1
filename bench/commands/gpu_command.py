"""the first hours on a GPU, in stages: right, fast, tune, look

Each stage is a list of commands, each in a process of its own, with a deadline for the stage. What is done is written
down as it ends, so a stage that was cut off goes on where it was; --again forgets that. Needs no network; a tool that
is not installed is named and passed over. --rehearse runs the same lists on a CPU with the smallest cases, to see that
every command is accepted and leaves what it should.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from .. import exits
from . import _options

LIMIT_S = 570  # of a stage: under ten minutes, with what starting takes
#: the shapes of the published models, one an op and direction
HEADLINE = (
    "retro-1.5b",
    "rpt-16k",
    "decoder-2k",
    "encoder-self-b512",
    "rpt-window-16k",
    "decoder-1k",
    "precompute-1m",
    "rpt-retriever-b32",
    "mosaics-b64",
)
SMALLEST = ("decode-1", "encoder-cross", "rpt-retriever", "mosaics")
#: exit codes after which a step is done: it ran, whatever it found; an interrupted or impossible one is tried again
FINISHED = (exits.OK, exits.REGRESSION, exits.NUMERICS)


@dataclass(frozen=True)
class Step:
    """`command`: arguments of `bench`, or with `tool` of that
    program; {device}, {cases}, {out} and {left} are filled in.
    """

    name: str
    command: str
    tool: str | None = None


STAGES = {
    "right": (
        Step("doctor", "doctor --no-noise"),
        Step("check", "check --device {device} --case {cases} --json {out}/check.jsonl --quiet --deadline {left}"),
        # a race shows in one of two
        Step(
            "check again", "check --device {device} --case {cases} --json {out}/check.jsonl --quiet --deadline {left}"
        ),
        Step(
            "check all", "check --device {device} --baselines none --json {out}/check.jsonl --quiet --deadline {left}"
        ),
        Step(
            "memory errors",
            "--tool memcheck --error-exitcode 2 {python} -m bench check --device {device} --case {small} --mode fwd "
            "--quiet --deadline {left}",
            "compute-sanitizer",
        ),
    ),
    "fast": (
        Step("headline", "run --device {device} --case {cases} --json {out}/run.jsonl --quiet --deadline {left}"),
        Step(
            "compiled",
            "run --device {device} --case {cases} --baselines eager_compiled,flex --json {out}/compiled.jsonl --quiet "
            "--deadline {left}",
        ),
        Step("all", "run --device {device} --json {out}/all.jsonl --quiet --deadline {left}"),
        Step("table", "report {out}/run.jsonl --format md --output {out}/run.md"),
    ),
    "tune": (Step("tiles", "tune --device {device} --case {cases} --deadline {left}"),),
    "look": (
        Step(
            "profile",
            "profile --device {device} --case {cases} --trace {out}/traces --json {out}/profile.jsonl --quiet "
            "--deadline {left}",
        ),
        Step(
            "replay",
            "profile --device {device} --case {cases} --mode decode,fwd {graphs} --json {out}/graphs.jsonl --quiet "
            "--deadline {left}",
        ),
        Step(
            "counters",
            "--set full --target-processes all -f -o {out}/ncu {python} -m bench check --device {device} --case "
            "{small} --mode fwd --quiet --deadline {left}",
            "ncu",
        ),
        Step(
            "timeline",
            "profile -t cuda,nvtx -f true -o {out}/nsys {python} -m bench check --device {device} --case {small} "
            "--mode fwd --quiet",
            "nsys",
        ),
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stage", choices=(*STAGES, "all"), help="all: one after the other")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("bench-gpu"),
        metavar="DIR",
        help="records, traces and what is done (default bench-gpu)",
    )
    parser.add_argument(
        "--deadline",
        type=_options.seconds,
        default=LIMIT_S,
        metavar="SECONDS",
        help=f"of each stage (default {LIMIT_S})",
    )
    parser.add_argument("--again", action="store_true", help="forget what is done")
    parser.add_argument("--rehearse", action="store_true", help="a CPU stands in for the GPU")


def execute(arguments: argparse.Namespace) -> int:
    arguments.out.mkdir(parents=True, exist_ok=True)
    codes = [stage(name, arguments) for name in (STAGES if arguments.stage == "all" else [arguments.stage])]
    return next((code for code in (exits.NUMERICS, exits.INCONCLUSIVE, exits.USAGE) if code in codes), exits.OK)


def stage(name: str, arguments: argparse.Namespace) -> int:
    """Run what is left of a stage; the worst exit code of its steps."""
    begun, worst, state = time.monotonic(), exits.OK, arguments.out / f"{name}.json"
    done = {} if arguments.again or not state.exists() else json.loads(state.read_text())
    for step in STAGES[name]:
        left = arguments.deadline - (time.monotonic() - begun)
        if step.name in done:
            say(f"{name}: {step.name}: done before, exit code {done[step.name]}")
        elif step.tool and not shutil.which(step.tool):
            say(f"{name}: {step.name}: {step.tool} is not installed")
        elif left <= 0:
            say(f"{name}: {step.name}: no time is left; run the stage again")
            worst = worst or exits.INCONCLUSIVE
        else:
            code = run(step, arguments, left)
            say(f"{name}: {step.name}: exit code {code} after {arguments.deadline - left:.0f} s of the stage")
            if code in FINISHED:
                done[step.name] = code
                state.write_text(json.dumps(done, indent=1) + "\n")
            worst = code if code == exits.NUMERICS else worst or code
    return worst


def run(step: Step, arguments: argparse.Namespace, left: float) -> int:
    """One step in a process of its own, stopped when the stage's time
    is over; its output goes to a log beside the records.
    """
    command = words(step, arguments, left)
    say("  " + shlex.join(command))
    environ = os.environ | ({"TRITON_INTERPRET": "0"} if not arguments.rehearse else {})
    with open(arguments.out / f"{step.name.replace(' ', '-')}.log", "a", encoding="utf-8") as log:
        try:
            return subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, env=environ, timeout=left + 20
            ).returncode
        except subprocess.TimeoutExpired:
            return exits.INCONCLUSIVE


def words(step: Step, arguments: argparse.Namespace, left: float) -> list[str]:
    """The step's command with its blanks filled in."""
    small = ",".join(SMALLEST)
    blanks = {
        "device": "cpu" if arguments.rehearse else "cuda",
        "cases": small if arguments.rehearse else ",".join(HEADLINE),
        "small": small,
        "graphs": "" if arguments.rehearse else "--cuda-graph",
        "out": str(arguments.out),
        "left": f"{left:.0f}",
        "python": sys.executable,
    }
    filled = [word for part in step.command.split() if (word := part.format(**blanks))]
    return [step.tool, *filled] if step.tool else [sys.executable, "-m", "bench", *filled]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
