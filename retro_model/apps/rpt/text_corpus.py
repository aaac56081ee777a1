"""Long documents that a machine has: a package's files joined, as CodeParrot's repositories are; parallel books of the
King James Bible joined piece by piece, so that what is told twice stands in one document, beyond the window."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from retro_model.apps.demo.corpus import sources
from retro_model.apps.mosaics.corpora import books
from retro_model.data.tokens import Tokenizer
from retro_model.rpt.supervision import bm25_index

#: Packages that are scored and that training does not see: large enough to return to what they said.
HELD_OUT = ("asyncio", "concurrent", "ctypes", "email", "http", "json", "logging", "multiprocessing", "unittest", "xml")
#: Books that tell the same, by whose pieces in turn a document is made: those scored, those trained on.
HELD_OUT_BOOKS = (("Mat", "Mark", "Luke"), ("2Ki", "2Chr"))
JOINED_BOOKS = (("2Sm", "1Chr"), ("Exo", "Lev"), ("Num", "Deu"), ("Eph", "Col"), ("Rom", "Gal"), ("Ezra", "Neh"))
WHOLE = 1.15  # pieces are so much longer than a document, for tokens to a letter differ

Texts = dict[str, list[str]]  # of each group, what is to be cut into documents


class Corpus(NamedTuple):
    """tokens int64 [n,length] to train on and to score, the group (a package, books) of each that is scored, BM25's
    neighbours of both [n,L,K]."""

    tokenizer: Tokenizer
    train: Tensor
    scored: Tensor
    groups: list[str]
    train_index: Tensor
    scored_index: Tensor


def stdlib(length: int) -> tuple[Texts, Texts]:
    """Packages of this Python's standard library, each one text: to train on, to score."""
    packages: dict[str, list[str]] = {}
    for document in sorted(sources(Path(sysconfig.get_path("stdlib"))), key=lambda d: d.name):
        packages.setdefault(document.group, []).append(document.content)
    packages.pop("test", None)
    joined = {name: ["\n".join(files)] for name, files in packages.items()}
    return {n: t for n, t in joined.items() if n not in HELD_OUT}, {n: joined[n] for n in HELD_OUT if n in joined}


def kjv(length: int) -> tuple[Texts, Texts]:
    """Books of the King James Bible; a group of parallel books gives a text a document."""
    every = books()
    held = {" + ".join(names): list(pieces([every[n] for n in names], length)) for names in HELD_OUT_BOOKS}
    train = {" + ".join(names): list(pieces([every[n] for n in names], length)) for names in JOINED_BOOKS}
    used = {name for names in (*HELD_OUT_BOOKS, *JOINED_BOOKS) for name in names}
    return train | {name: [text] for name, text in every.items() if name not in used}, held


def pieces(texts: list[str], length: int, letters: float = 3.2) -> Iterator[str]:
    """Texts of about `length` tokens: the i-th of n pieces of each of `texts`, joined.

    >>> list(pieces(["abcdef", "123456"], length=2, letters=2 / WHOLE))
    ['ab12', 'cd34', 'ef56']
    """
    count = max(1, int(sum(map(len, texts)) / (length * letters * WHOLE)))
    for i in range(count):
        yield "".join(text[i * len(text) // count : (i + 1) * len(text) // count] for text in texts)


CORPORA: dict[str, Callable[[int], tuple[Texts, Texts]]] = {"stdlib": stdlib, "kjv": kjv}


def prepare(plan) -> Corpus:
    """The documents of `plan.corpus`."""
    train, held = CORPORA[plan.corpus](plan.length)
    tokenizer = Tokenizer.train((text for texts in train.values() for text in texts), plan.vocab_size)
    rows = np.concatenate([_cut(text, tokenizer, plan.length) for _, texts in sorted(train.items()) for text in texts])
    rows = rows[np.random.default_rng(0).permutation(len(rows))[: plan.train]]
    scored, groups, each = [], [], -(-plan.scored // len(held))
    for name, texts in held.items():
        documents = np.concatenate([_cut(text, tokenizer, plan.length) for text in texts])[:each]
        scored.append(documents)
        groups += [name] * len(documents)
    scored = np.concatenate(scored)
    index = [_neighbours(documents, plan, target) for documents, target in ((rows, True), (scored, False))]
    return Corpus(tokenizer, torch.from_numpy(rows), torch.from_numpy(scored), groups, *index)


def _neighbours(documents: np.ndarray, plan, with_target: bool) -> Tensor:
    sizes = {"excluded_chunks": 2 * plan.segment // plan.chunk_len, "with_target": with_target}
    return torch.from_numpy(np.stack([bm25_index(d.reshape(-1, plan.chunk_len), 2, **sizes)[0] for d in documents]))


def _cut(text: str, tokenizer: Tokenizer, length: int) -> np.ndarray:
    tokens = tokenizer.encode(text)
    return tokens[: len(tokens) // length * length].reshape(-1, length)
