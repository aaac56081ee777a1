"""this tree against a git ref: CPU kernels interleaved, host time and static metrics of both

Checks out the ref beside this tree, builds both, checks both, and times them in fresh pairs of processes. Fails (1) at
a slow-down beyond 5% that a second batch reproduces, at host time a call beyond 15%, at a kernel that vanished, and at
any static regression; 3 where the machine is too noisy to tell.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from ..compare import ab, ab_host, ab_static, affected
from ..measure import choose
from ..records import environment
from ..registry import OPERATORS, contenders_of
from ..report import markdown, tables
from . import exits, options

HEADER = ("measurement", "verdict", "head/base", "interval", "second batch", "control")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--base",
        required=True,
        metavar="REF",
        help="commit, branch or tag to compare with, or the folder of another tree",
    )
    parser.add_argument("--no-build", action="store_true", help="both trees are built already")
    options.add_selection(parser)
    halves = parser.add_mutually_exclusive_group()
    halves.add_argument("--static-only", action="store_true", help="compile for GPUs and compare; time nothing")
    halves.add_argument("--no-static", action="store_true", help="time only")
    parser.add_argument(
        "--from-diff", action="store_true", help="time only kernels that the files changed since the base can affect"
    )
    parser.add_argument("--arch", default="90", help="for the static metrics, comma-separated (default 90)")
    parser.add_argument(
        "--launch",
        type=options.names,
        metavar="PART[,PART]",
        help="static: only launches with one of these in their id",
    )
    parser.add_argument("--threads", type=options.positive, help="CPU threads of a call (default: what torch chose)")
    parser.add_argument(
        "--pairs", type=options.positive, default=ab.WORKER_PAIRS, help=f"worker pairs (default {ab.WORKER_PAIRS})"
    )
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="also write the result as Markdown for a pull request"
    )


def execute(arguments: argparse.Namespace) -> int:
    options.arches(arguments.arch)
    if not (environment.ROOT / "setup.py").exists():
        raise exits.UsageError(
            f"ab: compares checkouts, and {environment.ROOT} is none; run `python -m bench ab` in one"
        )
    if arguments.markdown and not arguments.markdown.resolve().parent.is_dir():  # known now, not after an hour
        raise exits.UsageError(f"--markdown {arguments.markdown}: no such folder")
    selection = options.selection(argparse.Namespace(**{**vars(arguments), "device": "cpu"}))
    outcomes, slower, compared = [], None, None
    try:
        timed = [] if arguments.static_only else _items(selection, arguments, tuple(map(folder_of, arguments.plugin)))
        with ab.checked_out(arguments.base) as base:
            if timed:
                if not arguments.no_build:
                    say("building both trees")
                    ab.build(environment.ROOT)
                    ab.build(base, environment.ROOT)
                threads = arguments.threads or environment.environment()["threads"]
                outcomes = ab.compare(base, environment.ROOT, timed, threads, say, arguments.pairs)
                if exit_code(outcomes, None) != exits.NUMERICS:  # what is wrong is not timed
                    kernels = tuple(dict.fromkeys(item.kernel for item in timed))
                    slower = ab_host.compare(base, environment.ROOT, kernels, say)
            if not arguments.no_static:
                parts = arguments.launch or [
                    f"{name}/" for name in OPERATORS if selection.kernels and choose.matches(name, selection.kernels)
                ]
                compared = ab_static.compare(base, environment.ROOT, arguments.arch, parts, say)
    except (ValueError, RuntimeError) as e:
        raise exits.UsageError(str(e)) from None
    if outcomes:
        print(table(outcomes))
    lines = host_lines(slower) + static_lines(compared)
    print(*lines, sep="\n")
    if arguments.markdown:
        arguments.markdown.write_text(as_markdown(outcomes, lines, arguments.base))
    return (
        exits.REGRESSION
        if slower and exit_code(outcomes, compared) != exits.NUMERICS
        else exit_code(outcomes, compared)
    )


def folder_of(plugin: str) -> tuple[str, str]:
    """A plugin that is imported here, and where a worker finds it."""
    top = sys.modules[plugin.partition(".")[0]]
    place = Path(next(iter(top.__path__)) if hasattr(top, "__path__") else top.__file__)
    return plugin, str(place.resolve().parent)


def _items(
    selection: choose.Selection, arguments: argparse.Namespace, plugins: tuple[tuple[str, str], ...]
) -> list[ab.Item]:
    """What to time; with --from-diff only what the changed files can affect, which may be nothing."""
    if not arguments.from_diff:
        return items(selection, plugins)
    touched = affected.kernels(affected.changed_files(environment.ROOT, arguments.base), OPERATORS, environment.ROOT)
    names = tuple(name for name in OPERATORS if name in touched and choose.matches(name, selection.kernels))
    say(f"changed files affect: {', '.join(names) or 'no CPU kernel'}")
    return items(dataclasses.replace(selection, kernels=names), plugins) if names else []


def items(selection: choose.Selection, plugins: tuple[tuple[str, str], ...] = ()) -> list[ab.Item]:
    """Every case, type and mode of every CPU kernel (or of the backends that were named)."""
    timed_items = []
    for case in choose.cases(selection):
        names = [
            c.name
            for c in contenders_of(case.kernel)
            if c.role != "baseline" and choose.matches(c.name, selection.backends or ("cpu",))
        ]
        for dtype in choose.dtypes(case, selection):
            timed_items += [
                ab.Item(case.kernel, name, case.name, dtype, mode, plugins)
                for name in names
                for mode in choose.modes(case, selection)
            ]
    return timed_items


def exit_code(outcomes: list[ab.Outcome], compared: ab_static.Comparison | None) -> int:
    """Numerics before regressions before doubt; nothing at all is 5."""
    verdicts = {outcome.verdict for outcome in outcomes}
    if "numerics" in verdicts:
        return exits.NUMERICS
    if verdicts & {"regression", "vanished"} or (compared and compared.worse):
        return exits.REGRESSION
    if verdicts & {"inconclusive", "skipped"}:
        return exits.INCONCLUSIVE
    measured = verdicts & {"ok", "warn", "faster"} or compared
    return exits.OK if measured else exits.NOTHING_MEASURED


def host_lines(slower: list[str] | None) -> list[str]:
    return [] if slower is None else [f"host time: {len(slower)} calls slower", *slower]


def static_lines(compared: ab_static.Comparison | None) -> list[str]:
    if compared is None:
        return ["static metrics: not compared"]
    differ = f"{compared.differ} of {compared.launches} launches differ in their sources"
    head = f"static metrics: {len(compared.worse)} regressions; {differ}"
    return [head, *compared.worse]


def table(outcomes: list[ab.Outcome]) -> str:
    return tables.align([HEADER, *map(_cells, outcomes)])


def as_markdown(outcomes: list[ab.Outcome], more: list[str], base: str) -> str:
    """What changed in sight, the rest folded."""
    order = ("numerics", "vanished", "regression", "inconclusive", "warn", "faster", "skipped", "new", "ok")
    lines = [markdown.line(_cells(o)) for o in sorted(outcomes, key=lambda o: order.index(o.verdict))]
    first, *worse = more
    table = markdown.folded(markdown.header(HEADER), lines)
    return (
        "\n".join([markdown.MARKER, f"Against `{base}`", "", *table, "", first, *(f"- `{line}`" for line in worse)])
        + "\n"
    )


def _cells(outcome: ab.Outcome) -> tuple[str, ...]:
    if outcome.first is None:
        return (outcome.item.id, outcome.verdict, "-", outcome.reason[:80], "-", "-")
    value, second, control = (f"{r.value:.3f}" if r else "-" for r in (outcome.first, outcome.second, outcome.control))
    return (
        outcome.item.id,
        outcome.verdict,
        value,
        f"{outcome.first.low:.3f} .. {outcome.first.high:.3f}",
        second,
        control,
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
