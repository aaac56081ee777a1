"""this tree against a git ref: CPU kernels interleaved, static metrics of both

Checks out the ref beside this tree, builds both, checks both, and times them in fresh pairs of processes. Fails (1) at a slow-down beyond
5% that a second batch reproduces, at a kernel that vanished, and at any static regression; 3 where the machine is too noisy to tell.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from .. import ab, environment, exits, plan, record, static
from ..registry import contenders_of
from ..report import markdown, terminal
from . import _options

HEADER = ("measurement", "verdict", "head/base", "interval", "second batch", "control")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", required=True, metavar="REF", help="commit, branch or tag to compare with")
    _options.add_selection(parser)
    parser.add_argument("--static-only", action="store_true", help="compile for GPUs and compare; time nothing")
    parser.add_argument("--no-static", action="store_true", help="time only")
    parser.add_argument("--arch", default="90", help="for the static metrics, comma-separated (default 90)")
    parser.add_argument("--threads", type=_options.positive, default=torch.get_num_threads())
    parser.add_argument("--pairs", type=_options.positive, default=ab.WORKER_PAIRS, help=f"worker pairs (default {ab.WORKER_PAIRS})")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the result as Markdown for a pull request")


def execute(arguments: argparse.Namespace) -> int:
    chosen = _options.selection(argparse.Namespace(**{**vars(arguments), "device": "cpu"}))
    outcomes, worse, compared = [], [], False
    try:
        with ab.checked_out(arguments.base) as base:
            if not arguments.static_only:
                say("building both trees")
                ab.build(base)
                ab.build(environment.ROOT)
                outcomes = ab.compare(base, environment.ROOT, items(chosen), arguments.threads, say, arguments.pairs)
            if not arguments.no_static:
                worse, compared = _static(base, arguments)
    except (ValueError, RuntimeError) as e:
        raise exits.UsageError(str(e)) from None
    print(table(outcomes))
    if compared:
        print("\n".join(["", f"static metrics: {len(worse)} regressions", *worse]))
    if arguments.markdown:
        arguments.markdown.write_text(as_markdown(outcomes, worse, arguments.base))
    return exit_code(outcomes, worse, compared)


def items(chosen: plan.Selection) -> list[ab.Item]:
    """Every case, type and mode of every CPU kernel (or of the backends that were named)."""
    found = []
    for case in plan.cases(chosen):
        names = [c.name for c in contenders_of(case.kernel) if c.role != "baseline" and plan.matches(c.name, chosen.backends or ("cpu",))]
        for dtype in plan.dtypes(case, chosen):
            found += [ab.Item(case.kernel, name, case.name, dtype, mode) for name in names for mode in plan.modes(case, chosen)]
    return found


def exit_code(outcomes: list[ab.Outcome], worse: list[str], compared: bool) -> int:
    """Numerics before regressions before doubt; nothing at all is 5."""
    verdicts = {outcome.verdict for outcome in outcomes}
    if "numerics" in verdicts:
        return exits.NUMERICS
    if verdicts & {"regression", "vanished"} or worse:
        return exits.REGRESSION
    if verdicts & {"inconclusive", "skipped"}:
        return exits.INCONCLUSIVE
    measured = verdicts & {"ok", "warn", "faster"} or compared
    return exits.OK if measured else exits.NOTHING_MEASURED


def _static(base: Path, arguments: argparse.Namespace) -> tuple[list[str], bool]:
    """Regressions of the static metrics, both trees compiled by this toolchain; (.., False) where there is nothing to compile."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="retro-ab-") as folder:
        for name, tree in (("base", base), ("head", environment.ROOT)):
            say(f"static metrics of {name}")
            path = Path(folder) / f"{name}.jsonl"
            command = [sys.executable, str(ab.HERE / "tree.py"), str(tree), "static", "--arch", arguments.arch, "--json", str(path)]
            for kernel in arguments.kernel or ():
                command += ["--kernel", kernel]
            done = subprocess.run(command, capture_output=True, text=True, cwd=tree)
            if done.returncode not in (exits.OK, exits.REGRESSION):
                say(f"no static metrics of {name}: {(done.stderr.strip() or 'nothing to compile').splitlines()[-1]}")
            rows.append(record.read(path) if path.exists() else [])
    return (static.regressions(*rows), True) if rows[0] else ([], False)


def table(outcomes: list[ab.Outcome]) -> str:
    return terminal.align([HEADER, *map(_cells, outcomes)])


def as_markdown(outcomes: list[ab.Outcome], worse: list[str], base: str) -> str:
    """What changed in sight, the rest folded."""
    order = ("numerics", "vanished", "regression", "inconclusive", "warn", "faster", "skipped", "new", "ok")
    header = "| " + " | ".join(HEADER) + " |\n|" + "---|" * len(HEADER)
    lines = ["| " + " | ".join(map(markdown.escape, _cells(o))) + " |" for o in sorted(outcomes, key=lambda o: order.index(o.verdict))]
    static_lines = ["", f"Static metrics: {len(worse)} regressions", *(f"- `{line}`" for line in worse)]
    return "\n".join([f"Against `{base}`", "", *markdown.folded(header, lines), *static_lines]) + "\n"


def _cells(outcome: ab.Outcome) -> tuple[str, ...]:
    if outcome.first is None:
        return (outcome.item.id, outcome.verdict, "-", outcome.reason[:80], "-", "-")
    value, second, control = (f"{r.value:.3f}" if r else "-" for r in (outcome.first, outcome.second, outcome.control))
    return (outcome.item.id, outcome.verdict, value, f"{outcome.first.low:.3f} .. {outcome.first.high:.3f}", second, control)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
