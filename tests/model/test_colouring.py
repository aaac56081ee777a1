"""Colours against prefixes by brute force; pages that escape what they show."""

import html.parser
import io

import numpy as np
import pytest

from retro_model.evaluation import colouring


def brute(tokens, others):
    def longest(i):
        return max(
            (
                n
                for o in others
                for j in range(len(o))
                for n in range(1, min(len(tokens) - i, len(o) - j) + 1)
                if list(tokens[i : i + n]) == list(o[j : j + n])
            ),
            default=0,
        )

    return [longest(i) for i in range(len(tokens))]


@pytest.mark.parametrize("seed", range(8))
def test_prefixes_are_the_brute_force(seed):
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 3, random.integers(0, 12))
    others = [random.integers(0, 3, random.integers(0, 20)) for _ in range(random.integers(0, 4))]
    assert colouring.prefixes(tokens, others).tolist() == brute(tokens, others)


def test_prefixes_of_the_docstring():
    assert colouring.prefixes(np.array([7, 8, 9, 1]), [np.array([5, 8, 9, 2])]).tolist() == [0, 2, 1, 0]


def test_rows_pair_a_chunk_with_what_was_retrieved_for_the_one_before():
    tokens = np.arange(10)
    neighbours = np.arange(2 * 3 * 8).reshape(2, 3, 8)
    mask = np.ones((2, 3, 8), bool)
    mask[0, 1] = False
    mask[1, 2, 5:] = False
    rows = colouring.rows(tokens, 4, neighbours, mask)
    assert [r.tokens.tolist() for r in rows] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert rows[0].neighbours == ()
    assert [n.tolist() for n in rows[1].neighbours] == [list(range(8)), list(range(16, 24))]
    assert [len(n) for n in rows[2].neighbours] == [8, 8, 5]


WORDS = ["<script>alert(1)</script>", "&amp;", '"quoted"', "[bold]", "def f():\n", "    x", "é", "z", "q"]


def decode(ids):
    return "".join(WORDS[i] for i in ids)


def sample():
    first = colouring.Row(np.array([0, 1]))
    second = colouring.Row(np.array([2, 3, 4, 5, 6, 7]), (np.array([8, 2, 3, 4, 5, 6, 7, 0]), np.array([7, 8])))
    return [first, second]


class Page(html.parser.HTMLParser):
    """Text by the class of the span it stands in."""

    def __init__(self):
        super().__init__()
        self.spans, self.tags, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href")]
        if tag == "span":
            self.spans.append((dict(attrs)["class"], ""))

    def handle_data(self, data):
        if self.spans and self.tags[-1] == "span":
            self.spans[-1] = (self.spans[-1][0], self.spans[-1][1] + data)


def test_html_is_self_contained_escaped_and_coloured():
    text = colouring.to_html(sample(), decode, title="a <b> title", off=["off <i>", "more"])
    page = Page()
    page.feed(text)
    assert not page.links and not {"script", "b", "i", "link", "img"} & set(page.tags)
    assert page.tags.count("tr") == 3 and "&lt;script&gt;" in text and "off &lt;i&gt;" in text
    spans = [s for s in page.spans if not s[0].startswith("k")]
    assert spans[0] == ("l0", WORDS[0] + WORDS[1])
    # LCP of the second chunk is 6, 5, 4, 3, 2, 1: one run of "5 or more", then 4, 3, 2, 1.
    assert spans[1:6] == [
        ("l5", WORDS[2] + WORDS[3]),
        ("l4", WORDS[4]),
        ("l3", WORDS[5]),
        ("l2", WORDS[6]),
        ("l1", WORDS[7]),
    ]
    assert spans[6] == ("l0", WORDS[8]) and spans[7][0] == "l5"


def test_terminal_shows_the_text_and_its_colours():
    from rich.console import Console

    console = Console(file=io.StringIO(), width=160, force_terminal=True, color_system="truecolor", record=True)
    console.print(colouring.to_terminal(sample(), decode, title="[red]title", neighbours=2))
    shown = console.export_text(styles=True)
    assert "[bold]" in shown and "[red]title" in shown and "<script>" in shown
    red, green, blue = (int(colouring.COLOURS[5][i : i + 2], 16) for i in (1, 3, 5))
    assert f"48;2;{red};{green};{blue}" in shown
