"""One process of `ab --pytest`: runs benchmarks of one tree. `python pytest_side.py TREE ROOT FILE WORDS...`

Writes {"collected": [id], "times": {id: seconds}, "cases": {id: {name: text}}, "left": {id: reason}, "wrong": text} to
FILE. A module that the head imports from its repository, ROOT, comes from TREE.
"""

import importlib.util
import json
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SKIPPED = "skipped: "  # a reason of `left` begins with it


class Watch:
    """Plug-in of pytest that notes the benchmarks that are collected, fail or are skipped."""

    def __init__(self):
        self.collected, self.left = [], {}
        self.pytest_collectreport = self.pytest_runtest_logreport = self.note

    def pytest_collection_finish(self, session):
        self.collected = [i.nodeid for i in session.items if "benchmark" in getattr(i, "fixturenames", ())]

    def note(self, report) -> None:
        if report.failed:
            lines = report.longreprtext.splitlines() or ["failed"]
            errors = [line[2:].strip() for line in lines if line.startswith("E ")] or lines[:1]
            # a syntax error begins with its file
            self.left[report.nodeid] = errors[-1 if errors[0].startswith("File ") else 0]
        elif report.skipped and isinstance(report.longrepr, tuple):
            self.left[report.nodeid] = SKIPPED + report.longrepr[2].removeprefix("Skipped: ")


def elsewhere(tree: Path, root: Path) -> str:
    """Name an imported module that the tree has and that came from another place, as an installed package does."""
    for name, module in list(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or tree)
        head = file.is_relative_to(root) and (tree / file.relative_to(root)).exists()
        own = [tree / part / f"{name}{end}" for part in ("", "src") for end in (".py", "/__init__.py")]
        if not file.is_relative_to(tree) and (head or any(path.exists() for path in own)):
            return f"{name} is no module of the tree but installed, so both sides would time it: {file}"
    return ""


def main(tree: Path, root: Path, out: Path, words: list[str]) -> None:
    import pytest
    import tree as trees

    sys.path[:] = [str(trees.moved(Path(p).resolve(), tree, root)) for p in sys.path if Path(p).resolve() != HERE]
    sys.path[:0] = [str(path) for path in (tree / "src", tree) if path.exists()]
    watch, times = Watch(), out.with_suffix(".times")
    words += ["--rootdir", str(tree), "--benchmark-only", "--benchmark-enable", f"--benchmark-json={times}", "-q"]
    words += ["-p", "no:cacheprovider", "--continue-on-collection-errors"]
    words += [word for name, word in (("xdist", "-n0"), ("pytest_cov", "--no-cov")) if importlib.util.find_spec(name)]
    code = pytest.main(words, plugins=[watch])
    found = json.loads(times.read_text())["benchmarks"] if times.exists() and times.stat().st_size else []
    answer = {"collected": watch.collected, "times": {}, "cases": {}, "left": watch.left}
    for one in (one for one in found if one["fullname"] not in watch.left):
        answer["times"][one["fullname"]] = one["stats"]["min"]
        params = (one["params"] or {}).items()
        answer["cases"][one["fullname"]] = {name: re.sub(r" at 0x\w+", "", str(value)) for name, value in params}
    answer["wrong"] = elsewhere(tree, root) or ("" if code in (0, 1, 2, 5) else f"pytest ended with code {code}")
    out.write_text(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), Path(sys.argv[3]), sys.argv[4:])
