"""compare a repository's working tree with a commit

Checks out the commit beside the working tree, builds both and checks both. Times them in fresh pairs of processes. A
plug-in of the repository is imported from each side. Exit code 1: a slow-down beyond 5% that a second batch reproduces,
host time beyond 15%, a kernel that vanished, or a static regression. 2: a wrong result. 3: the machine is too noisy to
tell. 6: a measurement could not be compared, e.g. because the base does not run. A measurement of the head alone is new
and passes.
"""

import argparse
import collections
import dataclasses
import subprocess
import sys
from pathlib import Path

from ..compare import ab, ab_host, ab_pytest, ab_static, affected
from ..measure import choose
from ..records import environment
from ..registry import OPERATORS, of_plugins
from ..report import markdown, tables
from . import emulator, exits, options, progress

HEADER = ("measurement", "verdict", "head/base", "interval", "second batch", "control")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--base", required=True, metavar="REF", help="compare with this commit, branch, tag or folder")
    add("--root", type=Path, metavar="DIR", help="the repository (default: that of the working directory)")
    add("--build", metavar="COMMAND", help="shell command that builds a tree, run in both")
    add("--no-build", action="store_true", help="both trees are built already")
    options.add_selection(parser, device=False)
    halves = parser.add_mutually_exclusive_group()
    halves.add_argument("--static-only", action="store_true", help="compile for GPUs and compare; time nothing")
    halves.add_argument("--no-static", action="store_true", help="time only")
    add("--from-diff", action="store_true", help="time only ops that the files changed since the base can affect")
    options.add_launches(parser)
    options.add_arch(parser, "90")
    add("--threads", type=options.positive, help="CPU threads of a call (default: what torch chose)")
    add("--pairs", type=options.positive, default=ab.WORKER_PAIRS, help=f"worker pairs (default {ab.WORKER_PAIRS})")
    suite = "time this pytest-benchmark suite of the repository on both commits, and nothing else"
    add("--pytest", metavar="PATH", help=suite)
    add("--quiet", action="store_true", help="print no progress")
    add("--markdown", type=options.output, metavar="FILE", help="also write the result as Markdown for a pull request")


def execute(arguments: argparse.Namespace) -> int:
    options.arches(arguments.arch)
    if arguments.pytest:
        _alone(arguments)
        arguments.no_static = True
    if not arguments.no_static and (why := emulator.missing()):
        print(f"static metrics: not compared: {why}")
        if arguments.static_only:
            return exits.NOT_COMPARED
        arguments.no_static = True
    root = repository(arguments.root)
    selection = None if arguments.pytest else options.selection(arguments)
    plugins = tuple(folder_of(name, root) for name in arguments.plugin)
    say = progress.Progress(0, arguments.quiet).note
    outcomes, slower, compared, lines = [], None, None, []
    if arguments.markdown:  # an earlier run may have left it
        arguments.markdown.unlink(missing_ok=True)
    try:
        with ab.checked_out(arguments.base, root) as base:
            timed = (
                [] if arguments.static_only or arguments.pytest else _items(selection, arguments, plugins, root, say)
            )
            if (timed or arguments.build or arguments.pytest) and not arguments.no_build:
                _build(arguments.build, base, root, say)
            narrowed = arguments.from_diff and environment.ours(root)
            if timed and not narrowed and any(not Path(folder).is_absolute() for _, folder in plugins):
                named = None if selection.ops == of_plugins(arguments.plugin) else selection.ops
                fields = dataclasses.asdict(selection) | {"ops": named}  # the base's plug-in may register others
                timed += [item for item in ab.listed(base, root, fields, plugins) if item not in timed]
            if timed:
                threads = arguments.threads or environment.environment()["threads"]
                say(ab.longest(len(timed), arguments.pairs))
                outcomes += ab.compare(base, root, timed, threads, say, arguments.pairs)
                if environment.ours(root) and exit_code(outcomes, None) != exits.NUMERICS:  # wrong: not timed
                    ops = tuple(dict.fromkeys(item.op for item in timed))
                    slower = ab_host.compare(base, root, ops, say)
                    lines = ["host time: not compared: a tree can't be measured"] if slower is None else []
            if arguments.pytest:
                outcomes += ab_pytest.compare(base, root, arguments.pytest, arguments.threads, say, arguments.pairs)
            if not arguments.no_static:
                parts = arguments.launch or [f"{name}/" for name in options.ops(arguments) if arguments.op]
                here = tuple(one for one in plugins if present(base, *one))
                if plugins and not here:
                    compared = ab_static.Comparison(0, 0, [], f"the base has no plug-in {', '.join(arguments.plugin)}")
                else:
                    compared = ab_static.compare(base, root, arguments.arch, parts, say, here)
    except (ValueError, RuntimeError) as e:
        raise exits.UsageError(str(e)) from None
    finally:
        if outcomes:  # an interrupted run prints its verdicts too
            print(tables.align([HEADER, *map(_cells, outcomes)]))
    lines += [] if slower is None else [f"host time: {len(slower)} calls slower", *slower]
    lines += [] if arguments.pytest else static_lines(compared)
    code = exit_code(outcomes, compared)
    code = exits.REGRESSION if slower and code != exits.NUMERICS else code
    said = verdict(code, outcomes)
    print(*lines, said, sep="\n")
    if arguments.markdown:
        arguments.markdown.write_text(as_markdown(outcomes, [said, *lines], arguments.base))
    return code


def _alone(arguments: argparse.Namespace) -> None:
    """Refuse options that `--pytest` cannot obey."""
    names = ("plugin", "op", "case", "backend", "dtype", "mode", "baselines", "launch", "from_diff")
    if given := [name for name in (*names, "static_only") if getattr(arguments, name)]:
        raise exits.UsageError(f"--pytest: times a suite alone; leave out --{given[0].replace('_', '-')}")
    if Path(arguments.base).is_dir():
        raise exits.UsageError("--pytest: --base must be a commit, because the suite is copied into its checkout")


def repository(folder: Path | None) -> Path:
    """Return the top of the repository that holds `folder` or the working directory. Raises UsageError outside one."""
    start = (folder or Path.cwd()).resolve()
    if not start.is_dir():
        raise exits.UsageError(f"--root {folder}: no such folder")
    done = subprocess.run(["git", "-C", str(start), "rev-parse", "--show-toplevel"], capture_output=True, text=True)
    if done.returncode == 0:
        return Path(done.stdout.strip())
    if start == environment.ROOT:  # a copy of this project without its history, in a checkout of another project
        return start
    raise exits.UsageError(f"--root: {start} is in no git repository; name one with --root DIR")


def folder_of(plugin: str, root: Path) -> tuple[str, str]:
    """Return a plug-in and its folder for a worker, relative where the folder lies in `root`."""
    top = sys.modules[plugin.partition(".")[0]]
    folder = Path(next(iter(top.__path__)) if hasattr(top, "__path__") else top.__file__).resolve().parent
    inside = folder.is_relative_to(root) and not folder.is_relative_to(Path(sys.prefix).resolve())
    return plugin, str(folder.relative_to(root) if inside else folder)


def present(tree: Path, plugin: str, folder: str) -> bool:
    """Whether a tree has the module of a plug-in."""
    module = tree / folder / plugin.replace(".", "/")
    return module.is_dir() or module.with_suffix(".py").exists()


def _build(command: str | None, base: Path, root: Path, say: ab.Say) -> None:
    if not command and not environment.ours(root):
        say("no --build: both trees are used as they are")
        return
    say("building both trees")
    ab.build(root, command)
    ab.build(base, command, like=root)


def _items(
    selection: choose.Selection,
    arguments: argparse.Namespace,
    plugins: tuple[tuple[str, str], ...],
    root: Path,
    say: ab.Say,
) -> list[ab.Item]:
    """Return the items of the head to time. With --from-diff: only those that the changed files can affect."""
    if arguments.from_diff:
        changed = affected.changed_files(root, arguments.base)
        known = affected.ops(changed, OPERATORS, root) if environment.ours(root) else OPERATORS if changed else ()
        names = tuple(name for name in options.ops(arguments) if name in known)
        say(f"changed files affect: {', '.join(names) or 'no op on a CPU'}")
        if not names:
            return []
        selection = dataclasses.replace(selection, ops=names)
    return ab.items(selection, plugins)


def exit_code(outcomes: list[ab.Outcome], compared: ab_static.Comparison | None) -> int:
    """Wrong numbers come before regressions, regressions before doubt. 5 if nothing was measured."""
    verdicts = {outcome.verdict for outcome in outcomes}
    if "numerics" in verdicts:
        return exits.NUMERICS
    if verdicts & {"regression", "vanished"} or (compared and compared.worse):
        return exits.REGRESSION
    if "not compared" in verdicts or (compared and compared.failed):
        return exits.NOT_COMPARED
    if "inconclusive" in verdicts:
        return exits.INCONCLUSIVE
    measured = verdicts & {"ok", "warn", "faster", "new"} or (compared and (compared.launches or compared.reason))
    return exits.OK if measured else exits.NOTHING_MEASURED


def verdict(code: int, outcomes: list[ab.Outcome]) -> str:
    """Return the last line of the output: the verdict, and how many measurements have which."""
    counts = collections.Counter(outcome.verdict for outcome in outcomes)
    many = f": {', '.join(f'{n} {name}' for name, n in counts.items())}" if counts else ""
    if set(counts) == {"new"}:
        many = ": every measurement is new, so nothing was compared with the base"
    return f"Verdict: {exits.MEANINGS[code]} (exit code {code}){many}"


def static_lines(compared: ab_static.Comparison | None) -> list[str]:
    if compared is None:
        return ["static metrics: not compared"]
    if compared.reason:
        return [f"static metrics: not compared: {compared.reason}", *compared.worse]
    differ = f"{compared.differ} of {compared.launches} launches differ in their sources"
    return [f"static metrics: {len(compared.worse)} regressions; {differ}", *compared.worse]


def as_markdown(outcomes: list[ab.Outcome], more: list[str], base: str) -> str:
    """Return a comment in Markdown: changes first, the rest folded."""
    order = ("numerics", "vanished", "regression", "not compared", "inconclusive", "warn", "faster", "new", "not run")
    order += ("ok",)
    lines = [markdown.line(_cells(o)) for o in sorted(outcomes, key=lambda o: order.index(o.verdict))]
    first, *worse = more
    table = markdown.folded(markdown.header(HEADER), lines)
    worse = [f"- `{line}`" for line in worse]
    return "\n".join([markdown.MARKER, f"Against `{base}`", "", *table, "", first, *worse, ""])


def _cells(outcome: ab.Outcome) -> tuple[str, ...]:
    first = outcome.first
    value, second, control = (f"{r.value:.3f}" if r else "-" for r in (first, outcome.second, outcome.control))
    interval = f"{first.low:.3f} .. {first.high:.3f}" if first and first.low else outcome.reason[:80] or "-"
    return (outcome.item.id, outcome.verdict, value, interval, second, control)
