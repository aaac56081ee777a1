"""`--help` fits 80 columns, lists the valid values and imports nothing slow."""

import argparse

import pytest

from retro_bench.__main__ import COMMANDS, WIDTH, described, parser
from retro_bench.registry import CASES, OPERATORS
from retro_bench.report import html, markdown, terminal
from tests.bench.helpers import timed
from tests.fresh import python


def sub(name) -> argparse.ArgumentParser:
    (commands,) = (a for a in parser(name)._actions if isinstance(a, argparse._SubParsersAction))
    return commands.choices[name]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_help_text_fits_and_says_one_thing(name):
    text = sub(name).format_help()
    assert max(map(len, text.splitlines())) <= WIDTH
    assert len(described(name).splitlines()[0]) <= 70 and not described(name).splitlines()[0].endswith(".")


@pytest.mark.parametrize("name", COMMANDS)
def test_one_flag_means_one_thing(name):
    """--op always names operators, and --launch selects by parts of a launch's id."""
    for action in sub(name)._actions:
        if "--op" in action.option_strings:
            assert all(op in action.help for op in OPERATORS), name
        if "--case" in action.option_strings and "launches" not in action.help:
            assert all(case in action.help for _, case in CASES), name


def test_no_help_imports_torch_or_triton():
    code = (
        "import sys\nfrom retro_bench.__main__ import COMMANDS, main\n"
        "[main([name, '--help']) for name in COMMANDS]\n"
        "print([m for m in ('torch._C', 'triton') if m in sys.modules])"
    )
    assert python("-c", code).splitlines()[-1] == "[]"


def test_the_page_begins_with_the_verdict(tmp_path, monkeypatch):
    page = html.page([timed()])
    assert page.index("Right?") < page.index("Fast?") < page.index("Missing?") < page.index("<section")
    assert "yes: 1 of 1 checks" in page and "float32 mean" in page and "1.50x" in page


def test_the_page_of_an_incomplete_run_begins_with_what_is_missing():
    made = timed()
    requested = [made["id"], made["id"].replace("/fwd", "/fwdbwd"), "topk_chunks/cpu/b/bfloat16/fwd"]
    page = html.page([made], requested)
    said = ("Left out, because the run ended early", "topk_chunks: b bfloat16", "Right?")
    places = [page.index(text) for text in said]
    assert places == sorted(places) and "leaky_average: a float32 (cpu)" in page
    for text in (terminal.full([made], requested), markdown.table([made], requested)):
        assert text.index("This run is not complete") < text.index("topk_chunks: b bfloat16") < text.index("toeplitz")
    assert "Left out" not in html.page([made], [made["id"]])
    assert "--resume" not in terminal.verdict([made], requested, None)  # only `run` has it


def test_a_half_type_counts_only_where_the_device_multiplies_in_it():
    half = timed() | {"dtype": "bfloat16", "id": timed()["id"].replace("float32", "bfloat16")}
    native = half | {"environment": half["environment"] | {"isa": ["avx2", "avx512_bf16"]}}
    whole = timed()
    for records, shown in (([whole, half], False), ([whole, native], True)):
        assert ("bfloat16 mean" in html.page(records)) == shown
        assert ("torch emulates it" in terminal.verdict(records, [], None)) != shown


def test_every_time_is_labelled_minimum_or_median():
    made = timed()
    device = made | {"time": made["time"] | {"method": {"clock": "device events"}}}
    for draw in (terminal.times, markdown.table, html.page):
        assert "minimum" in draw([made]) and "median" in draw([device])
