"""Selection of a command line: cases, types, modes and contenders, and why a contender can't run one of them."""

import fnmatch
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..commands.exits import UsageError
from ..records import environment
from ..registry import CASES, CONTENDERS, DTYPES, OPERATORS, Case, Contender, contenders_of

YARDSTICK = "eager"
MEMORY_SHARE = 0.8  # of free memory: the rest is for the allocator and the oracle
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}


@dataclass(frozen=True)
class Selection:
    """Patterns of a command line, with `*` and `?`. None selects the default. No baselines: (); all: ("all",)."""

    device: str = "cpu"
    ops: tuple[str, ...] | None = None
    backends: tuple[str, ...] | None = None
    cases: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    modes: tuple[str, ...] | None = None
    baselines: tuple[str, ...] | None = None


class EmptySelection(UsageError):
    """Error: a name on the command line matches nothing."""


def matches(name: str, patterns: tuple[str, ...] | None) -> bool:
    return patterns is None or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def matching(option: str, patterns: tuple[str, ...] | None, known: Iterable[str]) -> tuple[str, ...]:
    """Return the known names that an option selects. Raises EmptySelection for a pattern that matches none."""
    for pattern in patterns or ():
        if not any(matches(name, (pattern,)) for name in known):
            raise EmptySelection(f"--{option} {pattern}: matches none of {', '.join(known)}")
    return tuple(name for name in known if matches(name, patterns))


def contender_names(baselines: bool) -> list[str]:
    """Return the names of all baselines, or of all other contenders."""
    return list(dict.fromkeys(c.name for c in CONTENDERS.values() if (c.role == "baseline") == baselines))


def cases(selection: Selection) -> list[Case]:
    """Return the selected cases. Raises EmptySelection for an unknown op, case, backend or baseline."""
    ops = matching("op", selection.ops, OPERATORS)
    names = matching("case", selection.cases, dict.fromkeys(name for _, name in CASES))
    matching("backend", selection.backends, contender_names(baselines=False))
    matching("baselines", selection.baselines, [*contender_names(baselines=True), "all", "none"])
    return [
        case
        for case in CASES.values()
        if case.op in ops and case.name in names and (selection.cases or selection.device in case.devices)
    ]


def dtypes(case: Case, selection: Selection) -> list[str]:
    usual = case.dtypes.get(selection.device, DTYPES[selection.device])
    return list(usual) if selection.dtypes is None else list(selection.dtypes)


def modes(case: Case, selection: Selection) -> list[str]:
    return [mode for mode in case.modes if matches(mode, selection.modes)]


def contenders(case: Case, selection: Selection) -> Iterator[Contender]:
    """Yield the yardstick, the kernels, and the other baselines. The reference is a kernel only if no other can run."""
    everyone = contenders_of(case.op)
    kernels = [c for c in everyone if c.role != "baseline" and matches(c.name, selection.backends)]
    if selection.backends is None and any(c.role == "ours" and able(c, case, selection.device) for c in kernels):
        kernels = [c for c in kernels if c.role != "reference"]
    baselines = [c for c in everyone if c.role == "baseline" and _wanted(c, selection)]
    yield from (c for c in baselines if c.name == YARDSTICK)
    yield from kernels
    yield from (c for c in baselines if c.name != YARDSTICK)


def able(contender: Contender, case: Case, device: str) -> bool:
    return device in contender.devices and not contender.reason(case, None, device)


def _wanted(contender: Contender, selection: Selection) -> bool:
    if contender.name == YARDSTICK:
        return True  # the check needs it
    if selection.baselines is None:
        return selection.device in contender.default_on and selection.device in contender.devices
    return "all" in selection.baselines or matches(contender.name, selection.baselines)


def unsupported_case(case: Case, device: str) -> str | None:
    """Return why this machine can't run the case at all, or None."""
    free = environment.free_memory(device)
    if free is not None and case.memory_gib * 2**30 > free:
        return f"needs {case.memory_gib:g} GiB; {free / 2**30:.1f} GiB are free"
    return None


def unsupported(contender: Contender, case: Case, dtype: str, device: str, backward: bool) -> str | None:
    """Return why this contender can't serve the case, or None. Nothing is called to find out."""
    why = contender.reason(case, dtype, device)
    if why:
        return why
    if device not in contender.devices:
        return f"runs on {', '.join(contender.devices)} only"
    if backward and not contender.differentiable:
        return "has no gradient"
    needed, free = contender.peak_bytes(case, ITEMSIZE[dtype], backward), environment.free_memory(device)
    if free is not None and needed > MEMORY_SHARE * free:
        return f"needs about {needed / 2**30:.1f} GiB beyond its inputs; {free / 2**30:.1f} GiB are free"
    return None
