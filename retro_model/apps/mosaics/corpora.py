"""Documents from text that is installed: the standard library's sources, the King James Bible."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

Split = tuple[list[str], list[str]]  # training and held-out documents


def stdlib() -> Split:
    """Return the sources of Python's standard library; the held-out packages are those of the RETRO demonstration."""
    from retro_model.apps.demo.corpus import VALIDATION, sources

    every = list(sources(Path(sysconfig.get_path("stdlib"))))
    if not every:
        raise FileNotFoundError("this Python has no sources of the standard library")
    held_out = [d.content for d in every if d.group in VALIDATION]
    return [d.content for d in every if d.group not in VALIDATION and d.group != "test"], held_out


HELD_OUT_BOOKS = ("Ruth", "Est", "Jonah", "Mark", "Phi", "1Jn")


def books() -> dict[str, str]:
    """Return the books of the King James Bible in order, printed by Debian's bible-kjv, without verse numbers."""
    if shutil.which("bible") is None:
        raise FileNotFoundError("needs the command `bible`: apt-get install bible-kjv")
    printed = subprocess.run(["bible", "-f", "gen1:1-rev22:21"], capture_output=True, text=True, check=True).stdout
    verses = [line.split(" ", 1) for line in printed.splitlines() if " " in line]
    book = lambda verse: verse[0].split(":")[0].rstrip("0123456789")  # noqa: E731 - "1Jo5:3" is of "1Jo"
    return {name: "\n".join(text for _, text in group) + "\n" for name, group in itertools.groupby(verses, book)}


def kjv() -> Split:
    """Return the books of the King James Bible; six are held out."""
    every = books()
    if missing := [name for name in HELD_OUT_BOOKS if name not in every]:
        raise ValueError(f"`bible`: expected a book {missing[0]}; got {', '.join(every)}")
    held_out = [every.pop(name) for name in HELD_OUT_BOOKS]
    return [*every.values()], held_out


CORPORA: dict[str, Callable[[], Split]] = {"stdlib": stdlib, "kjv": kjv}
