"""The link checker of the site: faults that it finds, and links that it skips."""

import importlib
import inspect
import re
from pathlib import Path

from tools import links

PAGES = Path(__file__).parents[1] / "docs" / "api"


def test_dead_files_and_anchors_are_found(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "index.html").write_text(
        '<h1 id="top">x</h1><a href="a/">1</a><a href="a/#there">2</a><a href="#top">3</a><a href="https://x.org">4</a>'
        '<a href="a/#gone">5</a><a href="b/">6</a><img src="no.png"><a href="#nowhere">7</a>'
    )
    (tmp_path / "a" / "index.html").write_text('<a id="there" href="..">up</a><a href="../c.html">8</a>')
    assert links.broken(tmp_path) == [
        "a/index.html: ../c.html",
        *("index.html: " + link for link in ("a/#gone", "b/", "no.png", "#nowhere")),
    ]


def test_pages_of_the_api_list_every_public_name():
    """A page that orders the names of a package by importance lists all of them."""
    listed = re.compile(r"^::: (\S+)\n +options:\n(?: +heading_level: \d\n)? +members: \[([^\]]*)\]", re.M)
    found = [match for page in sorted(PAGES.glob("*.md")) for match in listed.findall(page.read_text(encoding="utf-8"))]
    assert len(found) > 9
    for module, names in found:
        package = importlib.import_module(module)
        modules = {name for name in package.__all__ if inspect.ismodule(getattr(package, name))} | {"__version__"}
        assert set(re.findall(r"\w+", names)) - modules == {*package.__all__} - modules, module
