"""What every demonstration leaves in its folder: report.txt, results.json and pictures."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table


class Report:
    """Prints, and keeps what was printed.

    Args:
        folder: made where it is missing.
        quiet: print nothing, keep all.
    """

    def __init__(self, folder: Path, quiet: bool = False):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.start = folder, time.perf_counter()
        self.console = Console(record=True, width=130, file=io.StringIO() if quiet else None)
        self.quiet = quiet

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False)

    def table(self, title: str, columns: list[str], rows: list[list]) -> None:
        """Floats with three digits, everything else as it is."""
        table = Table(*columns, title=title)
        for row in rows:
            table.add_row(*(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row))
        self.console.print(table)

    def figure(self, name: str, panels: int = 1, **options):
        """(figure, its axes); `save` writes it."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(1, panels, squeeze=False, **options)
        figure.save = lambda: (figure.savefig(self.folder / name, dpi=110, bbox_inches="tight"), pyplot.close(figure))
        return figure, axes[0]

    def finish(self, results: dict) -> dict:
        """Writes results.json, with the time that all took, and report.txt; the results."""
        seconds = round(time.perf_counter() - self.start, 1)
        results = results | {"seconds": seconds, "torch": torch.__version__, "threads": torch.get_num_threads()}
        (self.folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        self.say(f"{seconds:.0f} s; report.txt, results.json and pictures lie in {self.folder}")
        (self.folder / "report.txt").write_text(self.console.export_text(), encoding="utf-8")
        return results
