"""Write the tables of the pages from the records in bench/results.

`make docs` runs it (`python -m tools.tables`). A test compares the pages with the records.
"""

import re
from pathlib import Path

from retro_bench.records import record
from retro_bench.report import summary

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/performance.md")
PROCESSORS = {  # column -> its record
    "Zen 5, AVX-512": "cpu-zen5-2core-2026-11-23.jsonl",
    "Zen 4, AVX-512": "cpu-zen4-2core-2026-11-28.jsonl",
    "Zen 3, AVX2": "cpu-zen3-2core-2026-11-27.jsonl",
    "Xeon, AMX": "cpu-xeon-amx-2core-2026-11-24.jsonl",
    "Xeon, AVX-512": "cpu-xeon-2core-2026-11-27.jsonl",
}
CASES = {  # first cells of a row -> a record's id
    "chunked_cross_attention, RETRO 172m | forward": "chunked_cross_attention/cpu/retro-172m/float32/fwd",
    "chunked_cross_attention, RETRO 172m | forward + backward": "chunked_cross_attention/cpu/retro-172m/float32/fwdbwd",
    "relative_attention, causal, 1024 tokens | forward + backward": "relative_attention/cpu/decoder-1k/float32/fwdbwd",
    "topk_chunks, 1024 queries of 100,000 chunks | forward": "topk_chunks/cpu/precompute-100k/float32/fwd",
}
BLOCK = re.compile(r"(<!-- (\w+)[^>]*-->\n\n).*?(\n\n<!-- end of \2 -->)", re.DOTALL)


def speeds() -> str:
    """Return a Markdown table of ratios to the fastest baseline, one processor's record per column."""
    records = {name: record.read(ROOT / "bench" / "results" / file) for name, file in PROCESSORS.items()}
    columns = {name: _ratios(rows) for name, rows in records.items()}
    commits = [rows[0]["git"]["sha"][:7] for rows in records.values()]
    lines = [f"| op, case | pass | {' | '.join(columns)} |", f"|---|---|{'---|' * len(columns)}"]
    for case, id_ in CASES.items():
        lines.append(f"| {case} | {' | '.join(ratios.get(id_, '') for ratios in columns.values())} |")
    return "\n".join([*lines, f"| commit | | {' | '.join(commits)} |"])


def _ratios(records: list[dict]) -> dict[str, str]:
    """Return id -> ratio to the fastest baseline, of the timed records of one run."""
    timed = [one for one in record.latest(records).values() if one["time"]]
    rows = summary.rows(timed)
    return {row.record["id"]: f"{row.rival_speedup:.1f}x" for row in rows if row.rival_speedup is not None}


TABLES = {"speeds": speeds}


def page(text: str) -> str:
    """Return a page with its tables replaced."""
    return BLOCK.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


if __name__ == "__main__":
    for name in PAGES:
        (ROOT / name).write_text(page((ROOT / name).read_text(encoding="utf-8")), encoding="utf-8")
