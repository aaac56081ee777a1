"""Reports, comparison, static metrics and the machine-code reader, on hand-made records and listings."""

import json
import sys

import pytest

import retro_bench
from retro_bench.commands import ab as ab_command
from retro_bench.compare import ab
from retro_bench.records import machines, record
from retro_bench.report import html, markdown, terminal
from tests.bench.helpers import static_record, timed
from tests.fresh import python


def test_terminal_table_names_the_best_rival_of_the_same_function():
    text = terminal.times(
        [timed(), timed(backend="eager", role="baseline", speedup=None), timed(case="b", status="oom")]
    )
    row = next(line for line in text.splitlines() if line.startswith("a  "))
    assert "2.00x" in row and "1.50x toeplitz" in row and "10%" in row and "sdpa_plain" not in row
    assert "OOM: leaky_average/cpu/b/float32/fwd: because" in text


def test_a_missing_value_is_shown_as_a_dash_never_as_zero():
    row = terminal.times([timed(roofline=None, memory=None, speedup=None)]).splitlines()[-1].split()
    assert row.count("-") == 4


def test_markdown_shows_twenty_rows_and_folds_the_rest():
    text = markdown.table([timed(case=f"c{i}") for i in range(33)])
    shown, folded = text.split("<details>")
    assert shown.count("| leaky_average/") == 20 and folded.count("| leaky_average/") == 13 and "13 more" in folded
    bad = markdown.table([timed(status="numerics_fail", reason="a | b")])
    assert "**numerics_fail**" in bad and "a \\| b" in bad


def test_the_page_marks_what_is_wrong_and_escapes_names():
    name = '<b>"x"</b>&'
    records = [timed(case=name), timed(case="bad", status="numerics_fail"), timed(case="c", status="oom")]
    page = html.page([*records, static_record(stack_bytes=16), static_record("leaky_average")])
    assert "<b>" not in page and page.count("&lt;b&gt;&quot;x&quot;&lt;/b&gt;&amp;") == 2  # text and value
    assert "1 of 3 checks" in page and page.count("rgba(var(--bad), 0.6)") == 1  # the spill alone
    assert "OOM: leaky_average/cpu/c" in page and "1.50x" in page and "http" not in page
    assert "prefers-color-scheme: dark" in page and "src=" not in page


def test_tables_fit_the_terminal(monkeypatch):
    """80 columns: some columns are dropped, in order, and named; notes are wrapped. A pipe gets all columns."""
    records = [timed(), timed(case="b", status="oom", reason="out of memory " * 9)]
    for draw, some in ((terminal.times, records), (terminal.checks, records), (terminal.static, [static_record()])):
        for room in (60, 80, 100):
            monkeypatch.setenv("COLUMNS", str(room))
            text = draw(some)
            assert max(map(len, text.splitlines())) <= room, (draw, room)
            assert "narrow" in text or room > 60
            assert draw is not terminal.times or ("10%" in text) == (room > 60)
        monkeypatch.delenv("COLUMNS")
        assert "narrow" not in draw(some)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert "1.50x toeplitz" in terminal.times(records) and "---" in terminal.times(records)


def on(name="AMD EPYC", isa=("avx2",), cores=2, memory=24 << 30, **caches):
    """Return a record's description of its machine."""
    return {
        "environment": {"torch": "2", "triton": None, "threads": 2, "isa": list(isa), "cores": cores},
        "device": {"name": name, "memory_bytes": memory, "caches": caches or {"L3 Unified": 1 << 25}},
    }


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"isa": ("avx2", "avx512f")}, "isa avx2 against avx2 avx512f"),
        ({"cores": 4}, "cores 2 against 4"),
        ({"L3": 1 << 26}, "caches"),
        ({"memory": 48 << 30}, "memory 24 GiB against 48 GiB"),
        ({"name": "another"}, "device AMD EPYC against another"),
    ],
)
def test_one_name_is_not_one_machine(other, words, tmp_path, capsys):
    """Different machines of one name are neither compared nor in one table; missing facts match any."""
    sides = [timed(**on()), timed(**on(**other))]
    assert words in machines.difference(sides[:1], sides[1:])
    assert machines.difference(sides[:1], [timed(**on(memory=(24 << 30) + 4096))]) is None
    old = timed(environment={"torch": "2", "triton": None, "threads": 2}, device={"name": sides[1]["device"]["name"]})
    assert (machines.difference([old], sides[1:]) is None) and machines.difference(
        [sides[1] | {"time": None}], sides[:1]
    ) is None
    for name, records in zip("ab", sides, strict=True):
        record.Writer(tmp_path / name).write(records)
    files = [str(tmp_path / "a"), str(tmp_path / "b")]
    for form in ("term", "md", "html"):
        assert retro_bench.main(["report", *files, "--format", form]) == 6
        said = capsys.readouterr()
        assert words in said.err and not said.out
    assert retro_bench.main(["report", files[0], files[0]]) == 0


def test_a_share_above_the_ceiling_is_the_ceilings_error():
    good, wrong = timed(), timed(case="b", roofline={"floor_s": 1.85e-3, "bound": "memory", "fraction": 1.85})
    for draw in (terminal.times, markdown.table, html.page):
        assert "error of the ceiling" not in draw([good])
        assert "a share above 100% (!), up to 185%: an error of the ceiling" in draw([good, wrong]) and "185%!" in draw(
            [wrong]
        )


def test_static_records_are_rendered_too(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    record.Writer(path).write(static_record(registers=77, config="m64 w4"))
    for form in ("term", "md", "html"):
        assert retro_bench.main(["report", str(path), "--format", form]) == 0
        out = capsys.readouterr().out
        assert "77" in out and "m64 w4" in out and "Nothing to show" not in out


def test_records_of_an_op_that_is_gone_are_still_read(tmp_path, capsys):
    """Every reader takes the op's name from the record. The committed records name ops that were removed since."""
    path = str(tmp_path / "a.jsonl")
    record.Writer(tmp_path / "a.jsonl").write(timed(op="removed"))
    for form in ("term", "md", "html"):
        assert retro_bench.main(["report", path, "--format", form]) == 0 and "removed" in capsys.readouterr().out
    assert retro_bench.main(["history", path, "--record", str(tmp_path / "kept")]) == 0
    assert retro_bench.main(["history", "--report", str(tmp_path / "kept")]) == 0
    assert "removed/cpu" in capsys.readouterr().out


def test_markdown_begins_with_the_marker_by_which_a_comment_is_found():
    item = ab.Item("leaky_average", "cpu", "mosaics", "float32", "fwd")
    texts = [
        markdown.table([timed()]),
        ab_command.as_markdown([ab.Outcome(item, "new")], ab_command.static_lines(None), "main"),
    ]
    for text in texts:
        assert text.startswith("<!-- retro_kernels bench -->\n") and text.count("<!--") == 1


def test_a_record_that_no_json_reader_bears_is_refused(tmp_path, capsys):
    """Thousands of nested objects, a number of 5000 digits, one beyond every float: exit code 4."""
    good = json.dumps(timed())
    for name, text in (
        ("nested", "[" * 100_000 + "]" * 100_000),
        ("digits", good.replace('"seed": 1', f'"seed": {"9" * 5000}')),
        ("large", good.replace('"seed": 1', f'"seed": {"9" * 400}')),
    ):
        (tmp_path / name).write_text(text + "\n")
        assert retro_bench.main(["report", str(tmp_path / name)]) == 4, name
        assert f"{name}:1" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["report {path} --format html", "report {path}", "list", "--help"])
def test_what_measures_nothing_needs_no_torch(command, tmp_path):
    """Importing torch takes seconds; the test checks the loaded modules."""
    record.Writer(tmp_path / "a.jsonl").write(timed())
    arguments = [part.format(path=tmp_path / "a.jsonl") for part in command.split()]
    loaded = "'torch._C' in sys.modules, 'triton' in sys.modules"
    code = f"import sys, retro_bench; code = retro_bench.main({arguments!r}); print(code, {loaded})"
    assert python("-c", code).splitlines()[-1] == "0 False False"


def test_a_closed_pipe_is_no_verdict(monkeypatch, capsys):
    def closed(*_):
        raise BrokenPipeError

    monkeypatch.setattr("retro_bench.commands.list._shape", closed)
    assert retro_bench.main(["list"]) == 6
