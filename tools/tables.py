"""Write the tables of the pages from the records in bench/results.

`make docs` runs it (`python -m tools.tables`). A test compares the pages with the records.
"""

import re
import statistics
from pathlib import Path

from retro_bench.report import ranges

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/performance.md")
PROCESSORS = {  # column -> its records
    "Zen 5, AVX-512": "cpu-zen5-2core-*.jsonl",
    "Zen 5 held to AVX2": "cpu-zen5-avx2-*.jsonl",
    "Zen 4, AVX-512": "cpu-zen4-2core-*.jsonl",
    "Zen 3, AVX2": "cpu-zen3-2core-*.jsonl",
    "Xeon, AMX": "cpu-xeon-2core-*.jsonl",
}
CASES = {  # first cells of a row -> a record's id
    "chunked_cross_attention, RETRO 172m | forward": "chunked_cross_attention/cpu/retro-172m/float32/fwd",
    "chunked_cross_attention, RETRO 172m | forward + backward": "chunked_cross_attention/cpu/retro-172m/float32/fwdbwd",
    "relative_attention, causal, 1024 tokens | forward + backward": "relative_attention/cpu/decoder-1k/float32/fwdbwd",
    "topk_chunks, 1024 queries of 100,000 chunks | forward": "topk_chunks/cpu/precompute-100k/float32/fwd",
}
BLOCK = re.compile(r"(<!-- (\w+)[^>]*-->\n\n).*?(\n\n<!-- end of \2 -->)", re.DOTALL)


def speeds() -> str:
    """Return a Markdown table of ratios to the fastest baseline: the median of a processor's runs, and their range."""
    columns = {
        name: [ranges.of_run(ranges.timed(path)) for path in ROOT.glob(f"bench/results/{files}")]
        for name, files in PROCESSORS.items()
    }
    rows = [f"| op, case | pass | {' | '.join(columns)} |", f"|---|---|{'---|' * len(columns)}"]
    for case, id_ in CASES.items():
        cells = [_cell([run[id_] for run in runs if id_ in run]) for runs in columns.values()]
        rows.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _cell(ratios: list[float]) -> str:
    if len(ratios) == 1:
        return f"{ratios[0]:.1f}x"
    return f"{statistics.median(ratios):.1f}x ({min(ratios):.1f} to {max(ratios):.1f})"


TABLES = {"speeds": speeds}


def page(text: str) -> str:
    """Return a page with its tables replaced."""
    return BLOCK.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


if __name__ == "__main__":
    for name in PAGES:
        (ROOT / name).write_text(page((ROOT / name).read_text(encoding="utf-8")), encoding="utf-8")
