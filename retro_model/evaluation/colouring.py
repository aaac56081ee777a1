"""Samples coloured by what they share with their neighbours, as in Tables 6 and 7 of arXiv 2112.04426: HTML and
terminal.

Each sampled token of chunk C_u has the colour of the longest common prefix (LCP) of the rest of the chunk, from that
token on, with any place in RET(C_{u-1}); each neighbour token of RET(C_{u-1}) that of the rest of its neighbour with
any place in C_u.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from retro_model.base.progress import printable

#: Backgrounds of LCP 0, 1, 2, 3, 4 and 5 or more; dark text is readable on each.
COLOURS = ("#ffffff", "#fff3c4", "#ffdf8a", "#ffc46b", "#ffa15c", "#ff7f6e")
LABELS = ("0", "1", "2", "3", "4", "≥5")

_STYLE = """body{font:14px/1.5 system-ui,sans-serif;margin:2rem;color:#111;background:#fff}
table{border-collapse:collapse;width:100%;table-layout:fixed}
td,th{border:1px solid #ccc;padding:.5rem;vertical-align:top;text-align:left}
code{font:12px/1.45 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere;color:#111}
.k{padding:0 .6rem;border:1px solid #ccc}
""" + "".join(f".l{i}{{background:{c}}}\n" for i, c in enumerate(COLOURS))


@dataclass(frozen=True)
class Row:
    """One chunk of a sample, and the neighbours that conditioned it: RET of the chunk before (none for the prompt's
    first).

    tokens: int64 [<= M]. neighbours: each int64 [<= R], padding removed.
    """

    tokens: np.ndarray
    neighbours: tuple[np.ndarray, ...] = ()


def prefixes(tokens: np.ndarray, others: Sequence[np.ndarray]) -> np.ndarray:
    """For every position i, the length of the longest prefix of tokens[i:] that occurs anywhere in one of `others`.

        prefixes([7, 8, 9, 1], [[5, 8, 9, 2]]) == [0, 2, 1, 0]

    Returns: int64 [len(tokens)].
    """
    from retro_model.data.text import common_prefix_lengths

    width = max((len(o) for o in others), default=0)
    if not width or not len(tokens):
        return np.zeros(len(tokens), np.int64)
    sources = np.array([[*o, *[0] * (width - len(o))] for o in others])
    mask = np.arange(width) < np.array([len(o) for o in others])[:, None]
    return common_prefix_lengths(np.asarray(tokens)[None], sources[None], source_mask=mask[None])[0].astype(np.int64)


def rows(tokens: np.ndarray, chunk_len: int, neighbours: np.ndarray, mask: np.ndarray) -> list[Row]:
    """Cuts one sample into chunks and gives each the neighbours of the chunk before it.

    tokens: int64 [N]. neighbours: int64 [>= (N-1)//M, K, R], RET of each complete chunk. mask: bool, the same shape or
    [.., K].
    """
    tokens = np.asarray(tokens)
    shown = []
    for u in range(-(-len(tokens) // chunk_len)):
        chunk = tokens[u * chunk_len : (u + 1) * chunk_len]
        before = ()
        if u:
            seen = np.broadcast_to(mask[u - 1] if mask.ndim == 3 else mask[u - 1][..., None], neighbours[u - 1].shape)
            before = tuple(n[s] for n, s in zip(neighbours[u - 1], seen) if s.any())
        shown.append(Row(chunk, before))
    return shown


def _spans(tokens: np.ndarray, lengths: np.ndarray, decode: Callable[[Sequence[int]], str]) -> list[tuple[str, int]]:
    """Text and colour of each run of equally coloured tokens; a run is decoded at once, so that
    split characters meet.
    """
    levels = np.minimum(lengths, len(COLOURS) - 1)
    cuts = np.flatnonzero(np.diff(levels)) + 1 if len(levels) else []
    return [
        (decode(part.tolist()), int(level[0]))
        for part, level in zip(np.split(tokens, cuts), np.split(levels, cuts))
        if len(part)
    ]


def _cells(row: Row, decode) -> list[list[tuple[str, int]]]:
    cells = [_spans(row.tokens, prefixes(row.tokens, row.neighbours), decode)]
    return cells + [_spans(n, prefixes(n, [row.tokens]), decode) for n in row.neighbours]


def to_html(
    sample: Sequence[Row],
    decode: Callable[[Sequence[int]], str],
    *,
    title: str,
    prompt_chunks: int = 1,
    off: Sequence[str] = (),
) -> str:
    """A self-contained page: a row a chunk; the sample, then each neighbour, all coloured; `off`: the sample without
    retrieval, by chunk.
    """
    width = max((len(r.neighbours) for r in sample), default=0)
    heads = (["Sample, retrieval off"] if off else []) + ["Sample, by LCP with RET of the chunk before"]
    heads += [f"Neighbour {j + 1} and its continuation, by LCP with the chunk" for j in range(width)]
    body = []
    for u, row in enumerate(sample):
        cells = _cells(row, decode)
        cells += [[]] * (1 + width - len(cells))
        drawn = [
            "".join(f'<span class="l{level}">{html.escape(text)}</span>' for text, level in cell) for cell in cells
        ]
        drawn = ([html.escape(off[u]) if u < len(off) else ""] if off else []) + drawn
        name = "prompt" if u < prompt_chunks else str(u + 1)
        body.append(
            f'<tr><th scope="row">{name}</th>' + "".join(f"<td><code>{cell}</code></td>" for cell in drawn) + "</tr>"
        )
    key = " ".join(f'<span class="k l{i}">{label}</span>' for i, label in enumerate(LABELS))
    head = "".join(f'<th scope="col">{html.escape(h)}</th>' for h in heads)
    return (
        '<!doctype html>\n<html lang="en"><head><meta '
        f'charset="utf-8"><title>{html.escape(title)}</title>\n<style>{_STYLE}</style></head>\n'
        f"<body><h1>{html.escape(title)}</h1>\n<p>Longest common prefix, in tokens: {key}</p>\n"
        f'<table><thead><tr><th scope="col" style="width:4rem">chunk</th>{head}</tr></thead>\n<tbody>\n'
        + "\n".join(body)
        + "\n</tbody></table></body></html>\n"
    )


def to_terminal(sample: Sequence[Row], decode: Callable[[Sequence[int]], str], *, title: str, neighbours: int = 1):
    """The same as a rich table, with the first `neighbours` neighbours."""
    from rich.table import Table
    from rich.text import Text

    key = Text("LCP ")
    for label, colour in zip(LABELS, COLOURS):
        key.append(f" {label} ", style=f"black on {colour}")
    out = Table(
        "chunk",
        "sample",
        *[f"neighbour {j + 1}" for j in range(neighbours)],
        title=Text(printable(title)),
        caption=key,
        show_lines=True,
    )
    for u, row in enumerate(sample):
        cells = []
        for cell in _cells(row, decode)[: 1 + neighbours]:
            text = Text()
            for part, level in cell:
                text.append(printable(part), style=f"black on {COLOURS[level]}" if level else "")
            cells.append(text)
        out.add_row(str(u + 1), *cells)
    return out
