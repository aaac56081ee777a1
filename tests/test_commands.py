"""`retro-model`: quick help, one program name, errors before slow imports."""

import importlib.util
import re
from pathlib import Path

import pytest

from retro_bench.__main__ import main as harness
from retro_kernels import __version__
from retro_model.commands import __main__ as program
from tests.fresh import python

LIGHT = [*program.COMMANDS]
HEAVY = "torch", "numpy", "transformers", "rich", "starlette", "retro_kernels", "dask", "distributed", "matplotlib"
CODE = f"""
import contextlib, io, sys
from retro_model.commands.__main__ import main
said = io.StringIO()
with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
    main(sys.argv[1:])
print(sorted({{name.split(".")[0] for name in sys.modules}} & set({HEAVY!r})))
print(said.getvalue())
"""


@pytest.mark.parametrize("arguments", [("--help",), *((name, "--help") for name in LIGHT)], ids=" ".join)
def test_help_loads_nothing_heavy_and_says_what_the_command_does(arguments):
    loaded, _, said = python("-c", CODE, *arguments).partition("\n")
    assert loaded == "[]"
    assert said.startswith("usage: retro-model") and "python -m" not in said
    about = said.split("\n\n")[1]
    assert len(about) > 30 and "show this help" not in about
    if arguments == ("--help",):
        for name, line in program.COMMANDS.items():
            assert f"  {name} " in said and line in said


@pytest.mark.parametrize(
    "name, said",
    [("cmpare", "got cmpare (did you mean compare?)\n"), ("xyz", "got xyz\n"), (None, "usage: retro-model")],
)
def test_a_command_that_is_not_there_is_a_usage_error_and_names_the_nearest(name, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        program.main([name] if name else [])
    assert stopped.value.code == 2 and said in "".join(capsys.readouterr())


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch, capsys):
    def stopped(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "main", stopped)
    with pytest.raises(SystemExit) as end:
        program.command()
    assert end.value.code == 130 and "continues from what was saved" in capsys.readouterr().err


@pytest.mark.parametrize("name", LIGHT)
def test_a_commands_parser_is_the_one_that_it_runs_with(name):
    parser = program.parser(name)
    assert parser.prog == f"retro-model {name}" and parser.description


def test_the_version_is_one_everywhere(capsys):
    """In the programs, the changelog's first release, the citation, and the header of each page."""
    root = Path(__file__).resolve().parent.parent
    program.main(["--version"])
    assert harness(["--version"]) == 0
    assert capsys.readouterr().out == f"retro-model {__version__}\nretro-bench {__version__}\n"
    released = r"^## (\d\S+) - (\d{4}-\d\d-\d\d)$"  # below the heading of the unreleased changes
    newest, dated = re.search(released, (root / "CHANGELOG.md").read_text(), re.M).groups()
    assert newest == __version__
    citation = (root / "CITATION.cff").read_text()
    assert f"version: {__version__}\n" in citation and f'date-released: "{dated}"' in citation
    assert f"site_name: retro-kernels {__version__} " in (root / "mkdocs.yml").read_text()


def test_what_the_changelog_calls_removed_is_gone():
    text = (Path(__file__).resolve().parent.parent / "CHANGELOG.md").read_text()
    removed = "".join(part.partition("\n### ")[0] for part in text.split("### Removed")[1:3])
    rows = re.findall(r"^\| (`retro_model\..*?) \|", removed, re.M)
    names = [name for row in rows for name in re.findall(r"`(.*?)`", row)]
    full = ["retro_model" + name if name.startswith(".") else name for name in names]
    full = [
        name for name in full if name.startswith("retro_model.")
    ]  # "the packages `retro` and `rpt`" are not modules
    assert len(full) >= 10 and not [name for name in full if importlib.util.find_spec(name)]
