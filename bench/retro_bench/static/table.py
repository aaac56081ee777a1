"""Static metrics of every shipped kernel and configuration, Triton and CUDA C++. Needs no GPU."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..records import record
from . import cuda_kernels, triton_kernels


@dataclass(frozen=True)
class StaticSelection:
    """Launches and sources to compile."""

    arches: list[int | str]
    every: list[triton_kernels.CompiledCase]
    triton: list[triton_kernels.CompiledCase]  # the selected part of `every`
    cuda: list[cuda_kernels.Source]

    def __len__(self) -> int:
        """Number of rows as far as it is known: a CUDA source has one or more."""
        return len(self.triton) + len(self.cuda)


def select(
    arches: list[int | str], parts: tuple[str, ...] | None, only: Collection[str] | None = None
) -> StaticSelection:
    """Select the kernels with one of `parts` in their ids; `only`: ids of a listing. Raises NoToolchain."""
    every = triton_kernels.launches(arches, parts)
    triton = [launch for launch in every if launch.wanted and (only is None or launch.id in only)]
    cuda = [source for source in cuda_kernels.sources(arches, parts) if only is None or source.id in only]
    return StaticSelection(arches, every, triton, cuda)


def rows(
    selection: StaticSelection, keep: Path | None, jobs: int | None, counters: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield the static records of a selection in order, each as soon as it is done. Raises NoToolchain.

    counters: execute one CTA of each Triton launch on the emulator.
    """
    run = {"run": record.new_run()}
    with contextlib.nullcontext(keep) if keep else tempfile.TemporaryDirectory(prefix="retro-static-") as folder:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if selection.triton:
            for row in triton_kernels.rows(selection.arches, selection.triton, selection.every, folder, jobs, counters):
                yield row | run
        for source in selection.cuda:
            for row in cuda_kernels.rows(source, folder):
                yield row | run
