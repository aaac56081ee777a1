"""Every test that docs/reliability.md names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_every_test_that_reliability_names_exists():
    table = (ROOT / "docs/reliability.md").read_text().split("## Failures that must not happen")[1].split("\n## ")[0]
    rows = [line.split("|")[2] for line in table.splitlines() if line.startswith("| ")]
    named = [re.findall(r"`([^`]+)`", row) for row in rows[1:]]
    assert len(named) > 12 and all(named), "a row without a test"
    file = ""
    for name in (name for row in named for name in row if not name.startswith("make ")):
        path, _, test = name.rpartition("::") if "::" in name else ("", "", name)
        if test.endswith(".py"):
            path, test = test, ""
        if path:
            folders = [ROOT / folder for folder in ("tests", "ptx_emulator/tests", "demos/reader/tests")]
            files = (p for folder in folders for p in folder.rglob(Path(path).name))
            found = [p for p in files if str(p).endswith(path)]
            assert len(found) == 1, f"{name}: {len(found)} files {path}"
            file = found[0].read_text()
        assert not test or re.search(rf"^def {test}\(", file, re.MULTILINE), f"{name} is not in the file named last"
