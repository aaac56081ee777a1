"""Output of a demonstration: results.json, report.txt, pictures, and results of parts for a later run."""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table


def as_json(value: object) -> object:
    """Return the value after a round trip through JSON: tuples become lists."""
    return json.loads(json.dumps(value))


class Report:
    """Printer of a demonstration, which records its lines and keeps the results of its parts.

    folder: for the files; made if it is missing. plan: the settings that parts depend on; a part that another plan made
    is made again. quiet: print nothing, but record. minutes: begin no part after these.
    """

    def __init__(self, folder: Path, plan: object = None, quiet: bool = False, minutes: float = math.inf):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.plan, self.minutes, self.start = folder, repr(plan), minutes, time.perf_counter()
        self.earlier = 0.0  # seconds of parts that earlier processes made
        self.timings: dict[str, float] = {}  # seconds of each stage
        self.console = Console(record=True, width=130, file=io.StringIO() if quiet else None)

    def part(self, name: str, make: Callable[[], dict]) -> dict:
        """Return the result of `make`, or the result in the folder: a stopped run continues after its last part."""
        path, start = self.folder / "parts" / f"{name.replace(' ', '-')}.pt", time.perf_counter()
        kept = torch.load(path, weights_only=True) if path.exists() else {}
        if kept.get("plan") == self.plan:
            self.earlier += kept["seconds"]
            return kept["made"]
        if start - self.start > 60 * self.minutes:
            sys.exit(f"stopped after {self.minutes:g} minutes, before {name}; the same command continues")
        kept = {"plan": self.plan, "made": make(), "seconds": time.perf_counter() - start}
        path.parent.mkdir(exist_ok=True)
        torch.save(kept, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
        return kept["made"]

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Context manager: print the stage's name, then its seconds, and keep them."""
        self.say(f"[bold]{name}[/bold]")
        start = time.perf_counter()
        yield
        self.timings[name] = round(time.perf_counter() - start, 1)
        self.say(f"  {self.timings[name]} s")

    def say(self, text: str) -> None:
        """Print a line without wrapping it."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def table(self, title: str, columns: list[str], rows: list[list]) -> None:
        """Print a table; floats have three digits."""
        table = Table(*columns, title=title)
        for row in rows:
            table.add_row(*(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row))
        self.console.print(table)

    def figure(self, name: str, panels: int = 1, **options):
        """Return a figure and its axes; `figure.save()` writes it to the folder."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(1, panels, squeeze=False, **options)
        figure.save = lambda: (figure.savefig(self.folder / name, dpi=110, bbox_inches="tight"), pyplot.close(figure))
        return figure, axes[0]

    def finish(self, results: dict) -> dict:
        """Write report.txt, and results.json with the seconds of each stage or of the whole; return the results."""
        seconds = round(self.earlier + time.perf_counter() - self.start, 1)
        threads = torch.get_num_threads()
        results |= {"seconds": self.timings or seconds, "torch": torch.__version__, "threads": threads}
        (self.folder / "results.json").write_text(json.dumps(results, indent=1, default=float) + "\n")
        self.say(f"{seconds:.0f} s; report.txt, results.json and pictures are in {self.folder}")
        (self.folder / "report.txt").write_text(self.console.export_text(), encoding="utf-8")
        return results
