"""The Python blocks of README and of the pages run as shown, each by itself."""

import re
import shlex
from pathlib import Path

import pytest
import torch

import retro_bench.__main__
import retro_model.commands.__main__
from retro_kernels.compile import aot
from tools import tables

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = {
    f"{page.relative_to(ROOT)}:{number}": code
    for page in PAGES
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S), 1)
}
#: (program, arguments) of every command line with options, in blocks and sentences
COMMANDS = sorted(
    {
        (program.replace("-", "_"), arguments.rstrip("\\"))
        for page in PAGES
        for program, arguments in re.findall(
            r"(retro[-_]bench|retro[-_]model|retro_kernels\.compile\.aot) ([a-z-]* [^`|\n]*--[^`|\n]*|--[^`|\n]*)",
            page.read_text(encoding="utf-8"),
        )
    }
)
LINK = re.compile(r"\]\(([^)#]+?)(?:#[^)]*)?\)")


def test_the_blocks_are_found():
    assert {"README.md:1", "docs/ops.md:1", "docs/retro.md:2"} <= set(BLOCKS)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_runs(name, tmp_path, monkeypatch, capsys):
    if "retro_model.data" in BLOCKS[name]:
        pytest.importorskip("tokenizers")
        pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict = {}
    exec(compile(BLOCKS[name], name, "exec"), names)
    if name == "docs/retro.md:1":
        assert names["logits"].shape == (2, 100, 256) and [len(text) for text in names["texts"]] == [35, 72]
    if name == "docs/retro.md:2":
        assert (tmp_path / "run" / "model" / "state.json").exists() and "bits per byte" in capsys.readouterr().out


@pytest.mark.parametrize("name", tables.PAGES)
def test_tables_are_those_of_the_records(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert tables.BLOCK.search(text) and tables.page(text) == text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    """`make docs` makes pages of the API from docstrings; their sources are in docs/api."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    links = [link for link in LINK.findall(prose) if not link.startswith("http")]
    assert not [link for link in links if not (page.parent / link).exists()]


@pytest.mark.parametrize("program, line", COMMANDS, ids=[" ".join(command) for command in COMMANDS])
def test_a_command_has_the_options_that_are_shown(program, line, capsys):
    """The command's own parser reads the line, or its help names the options; nothing is run."""
    command, *arguments = words = shlex.split(line.partition("&&")[0].replace("[", "").replace("]", ""), comments=True)
    if program == "retro_bench":
        retro_bench.__main__.parser(command).parse_args([command, *arguments])
        return
    options = [word for word in words if word.startswith("-")]
    main = aot.main if program.endswith("aot") else retro_model.commands.__main__.main
    with pytest.raises(SystemExit) as left:
        main([*words[: words.index(options[0])], "--help"])
    known = capsys.readouterr().out
    assert left.value.code in (None, 0) and not [option for option in options if option not in known]
