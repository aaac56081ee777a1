"""Options that several commands share."""

import argparse
import math
import os
import re
from pathlib import Path
from typing import Any

from ..measure import choose
from ..records import environment, record
from ..registry import CASES, MODES, OPERATORS
from . import exits, progress

DTYPES = ("float32", "float16", "bfloat16")
#: architectures that are compiled for by default
ARCHES = (80, 90, 100)
EVERY_ARCH = (80, 86, 89, 90, 100, 120)
AMD_ARCHES = ("gfx942", "gfx950", "gfx1100")


def add_selection(parser: argparse.ArgumentParser, device: bool = True) -> None:
    """Add --device --op --backend --case --dtype --mode --baselines. Without `device` it is the CPU."""
    if device:
        text = "run on this device (default: cuda where there is one)"
        parser.add_argument("--device", choices=("cpu", "cuda"), help=text)
    else:
        parser.set_defaults(device="cpu")
    add_ops(parser)
    _add_names(parser, "--backend", f"select backends of {', '.join(choose.contender_names(baselines=False))}")
    _add_names(parser, "--dtype", f"select types of {', '.join(DTYPES)}")
    _add_names(parser, "--mode", f"select passes of {', '.join(MODES)}")
    _add_names(parser, "--baselines", f"time all, none or some of {', '.join(choose.contender_names(baselines=True))}")


def add_ops(parser: argparse.ArgumentParser, cases: bool = True) -> None:
    """Add --op, and --case with `cases`."""
    _add_names(parser, "--op", f"select ops of {', '.join(OPERATORS)}; * and ? allowed")
    if cases:
        _add_names(parser, "--case", f"select cases of {', '.join(dict.fromkeys(n for _, n in CASES))}")


def _add_names(parser: argparse.ArgumentParser, option: str, text: str) -> None:
    parser.add_argument(option, type=names, metavar="NAME[,NAME]", help=text)


def add_executed(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands that execute launches: --launch, --case and --dtype."""
    add_ops(parser, cases=False)
    add_launches(parser)
    _add_names(parser, "--case", "select cases of launches; * and ? allowed")
    parser.add_argument("--dtype", choices=DTYPES, help="select a type (default bfloat16; of a plug-in all)")


def add_launches(parser: argparse.ArgumentParser) -> None:
    text = "select GPU launches whose id OP/triton/KERNEL:CASE:smARCH/TYPE contains one of these"
    parser.add_argument("--launch", type=names, metavar="PART[,PART]", help=text)


def add_arch(parser: argparse.ArgumentParser, default: str) -> None:
    text = f"compile for these of {', '.join(map(str, (*EVERY_ARCH, *AMD_ARCHES)))} (default {default})"
    parser.add_argument("--arch", default=default, metavar="ARCH[,ARCH]", help=text)


def ops(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the ops that --op selects. Raises UsageError for a pattern that matches none."""
    return choose.matching("op", arguments.op, OPERATORS)


def machine(arguments: argparse.Namespace):
    """Return the `ptx_emulator.machines.Machine` that --machine names. Raises UsageError for an unknown one."""
    from ptx_emulator import machines

    try:
        return machines.machine(arguments.machine)
    except ValueError as error:
        raise exits.UsageError(f"--{error}") from None


def parts(arguments: argparse.Namespace) -> tuple[str, ...] | None:
    """Return the parts of launch ids that --launch or --op selects; None for all. Raises UsageError for both."""
    if arguments.launch and arguments.op:
        raise exits.UsageError("--op, --launch: name one of them; a launch's id begins with its op")
    return arguments.launch or (tuple(f"{name}/" for name in ops(arguments)) if arguments.op else None)


def launch_matches(launch, arguments: argparse.Namespace) -> bool:
    """Whether --case and --dtype select a launch. The default type is bfloat16, or every type of a plug-in."""
    dtype = arguments.dtype or (launch.dtype if launch.recorded else "bfloat16")
    return launch.dtype == dtype and choose.matches(launch.case.split(":")[1], arguments.case)


def selection(arguments: argparse.Namespace) -> choose.Selection:
    """Return the selection of a command line. Raises UsageError for an unknown name or a missing device."""
    device = arguments.device
    if device != "cpu":
        import torch

        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if device == "cuda" and not torch.cuda.is_available():
            why = "torch.cuda.is_available() is False on this machine"
            raise exits.UsageError(f"--device cuda: {why}; --device cpu runs what it can")
    return named(arguments, device)


def named(arguments: argparse.Namespace, device: str) -> choose.Selection:
    """Select cases for `device`, whether or not this machine has it. Raises UsageError for unknown names."""
    for names, known, what in ((arguments.dtype, DTYPES, "dtype"), (arguments.mode, MODES, "mode")):
        for name in names or ():
            if name not in known:
                raise exits.UsageError(f"--{what} {name}: expected one of {', '.join(known)}")
    baselines = () if arguments.baselines == ("none",) else arguments.baselines
    names = (getattr(arguments, option) for option in ("op", "backend", "case", "dtype", "mode"))
    selected = choose.Selection(device, *names, baselines)
    if not choose.cases(selected):
        raise exits.UsageError("the selection holds no case; `retro-bench list` shows them")
    return selected


def add_effort(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--threads", type=positive, help="use this many CPU threads in torch and the kernels (default: torch's)")
    add("--seed", type=int, help="draw inputs with this seed, e.g. of a record (default: a fresh seed)")
    add("--quiet", action="store_true", help="print no progress")
    text = "limit the time, with less effort per case as it runs short; one case of every op runs in any case"
    add_deadline(parser, text)


def add_deadline(parser: argparse.ArgumentParser, text: str = "limit the time; exit with 3 if cases are left") -> None:
    parser.add_argument("--deadline", type=seconds, metavar="SECONDS", help=text)


def arches(text: str) -> list[int | str]:
    """Return --arch as numbers of NVIDIA and names of AMD. Raises UsageError for an unknown architecture."""
    known = {str(arch): arch for arch in (*EVERY_ARCH, *AMD_ARCHES)}
    wrong = [arch for arch in text.split(",") if arch not in known]
    if wrong:
        raise exits.UsageError(f"--arch: expected some of {', '.join(known)}; got {', '.join(wrong)}")
    return [known[arch] for arch in text.split(",")]


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number; got {text}")
    return value


def seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:  # NaN included
        raise argparse.ArgumentTypeError(f"expected a number of seconds; got {text}")
    return value


def output(text: str) -> Path:
    """Return a file that can be written, and make its folder, so that a wrong path is refused before any work."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"expected a file that can be written; got {path}")
    return path


def records(path: Path) -> list[dict[str, Any]]:
    """Read all records of a file, and name an incomplete last line. Raises UsageError if the file is missing, holds
    something else, or is a rehearsal's.
    """
    try:
        found = record.read(path)
        if record.torn(path):
            progress.say(f"{path}: the last line is incomplete and left out, because its writer was interrupted")
    except (OSError, record.BadRecord) as e:
        raise exits.UsageError(str(e)) from None
    if not environment.rehearsing() and any(r["environment"].get("rehearsal") for r in found):
        raise exits.UsageError(f"{path}: expected measured records; got those of a rehearsal")
    return found


def names(text: str) -> tuple[str, ...]:
    """Split "a,b". A comma before a space belongs to a name, as in "documents, masked"."""
    return tuple(name.strip() for name in re.split(r",(?! )", text) if name.strip())
