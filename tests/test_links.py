"""The link checker of the site: faults that it finds, and links that it skips."""

from tools import links


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
