"""The demonstration's data: sources of Python's standard library, split by package, tokenised, without near-duplicates,
and their neighbours."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from retro_model import evaluation, training
from retro_model.data.database import ChunkDatabase
from retro_model.data.dedup import find_leaked, kept_documents
from retro_model.data.embed import HashedTfidf
from retro_model.data.neighbours import precompute_neighbours
from retro_model.data.store import Document, TokenStore, build_store
from retro_model.data.text import longest_common_substrings
from retro_model.data.tokens import Tokenizer

from .options import Plan

#: Held-out modules. Each has a sibling to retrieve from (ntpath: posixpath; ssl: socket) and is in Python 3.11 to 3.14.
#: Small ones make the number of documents that an interval needs, ten. Their tests are in `test`, which is trained on.
VALIDATION = (
    *("bisect", "calendar", "csv", "fnmatch", "fractions", "getopt", "heapq", "locale", "ntpath", "optparse", "shutil"),
    *("socket", "ssl", "sysconfig", "textwrap", "uuid", "zipapp"),
)
#: Tables rather than programs: help texts, encoded test data.
TABLES = ("pydoc_data", "test/encoded_modules", "test/cjkencodings")
#: Neighbours searched for beyond those used, because a window leaves out neighbours from its own documents.
SPARE = 4


class Corpus(NamedTuple):
    """The demonstration's data. train_neighbours and validation_neighbours are ids of `database`."""

    tokenizer: Tokenizer
    database: ChunkDatabase
    train: TokenStore
    validation: TokenStore
    train_neighbours: np.ndarray
    validation_neighbours: np.ndarray
    facts: dict


def group_of(name: str) -> str:
    """Return the top-level package or module of a file: group_of("json/decoder.py") == "json"."""
    return name.removesuffix(".py").split("/")[0]


def digest(name: str) -> bytes:
    """Return the digest of a name, by which documents are put into a fixed random order."""
    return hashlib.sha256(name.encode()).digest()


def sources(root: Path) -> Iterator[Document]:
    """Iterate over the UTF-8 sources below `root`, without site-packages and tables, in a fixed random order."""
    paths = [p for p in root.rglob("*.py") if "site-packages" not in p.parts and "dist-packages" not in p.parts]
    names = (p.relative_to(root).as_posix() for p in paths)
    for name in sorted((n for n in names if not n.startswith(TABLES)), key=digest):
        with contextlib.suppress(UnicodeDecodeError):
            text = (root / name).read_text(encoding="utf-8")
            if text.strip():
                yield Document(name, group_of(name), text)


def first_bytes(documents: list[Document], limit: int) -> list[Document]:
    """Return the first documents that together hold at most `limit` characters, passing over any that does not fit."""
    taken, total = [], 0
    for document in documents:
        if total + len(document.content) <= limit:
            taken.append(document)
            total += len(document.content)
    return taken


def prepare(folder: Path, plan: Plan, say: Callable[[str], None], progress: bool = False) -> Corpus:
    """Make tokeniser, stores, database and neighbours in `folder`, or read those that the same plan has made there."""
    root = Path(sysconfig.get_path("stdlib"))
    say(f"  reading the sources below {root} ...")
    every = list(sources(root))
    validation = first_bytes([d for d in every if d.group in VALIDATION], plan.validation_bytes)
    tests_last = sorted((d for d in every if d.group not in VALIDATION), key=lambda d: d.group == "test")
    others = first_bytes(tests_last, plan.database_bytes)
    if not validation or not others:
        raise FileNotFoundError(f"{root}: expected the sources of Python's standard library; got none")
    say(f"  {len(every):,} files; tokeniser ...")
    tokenizer = Tokenizer.train((d.content for d in others[::3]), plan.vocab_size)
    tokenizer.save(folder / "tokenizer.json")
    options = {"chunk_len": plan.config["chunk_len"], "bos": True}
    held_out = build_store(folder / "validation", validation, tokenizer, **options)
    raw = build_store(folder / "all", others, tokenizer, **options)
    say("  near-duplicates of the held-out text ...")
    leaked = find_leaked(raw, [held_out], tokenizer=tokenizer, progress=progress)
    leaked.save(folder / "deduplication.json")
    removed = {removal.name for removal in leaked.removed}
    store = raw
    if removed:
        chunk_len = options["chunk_len"]
        store = build_store(folder / "database", kept_documents(raw, leaked), tokenizer, chunk_len=chunk_len)
    learnt = first_bytes([d for d in others if d.name not in removed], plan.train_bytes)
    train = build_store(folder / "train", learnt, tokenizer, **options)
    say(f"  keys of {len(store):,} chunks, and the neighbours of {len(train):,} ...")
    embedder = HashedTfidf(plan.dim).fit(store)
    embedder.save(folder / "embedder.npz")
    database = ChunkDatabase.build(folder / "embeddings", store, embedder, index=plan.index)
    most = max(*plan.evaluation_neighbours, evaluation.LEAKAGE_NEIGHBOURS)
    wanted = {"train": (train, plan.neighbours + SPARE), "validation": (held_out, most)}
    train_neighbours, validation_neighbours = (
        precompute_neighbours(folder / f"{name}-neighbours", of, database, k, progress=progress)
        for name, (of, k) in wanted.items()
    )
    rows, near = _aligned_windows(train, plan.window), train_neighbours[:, : plan.neighbours]
    left_out = training.visible(train, rows, near, database) != near[rows]
    hidden = float(left_out.any((1, 2)).mean())  # share of the windows
    facts = {
        "validation_groups": sorted({d.group for d in validation}),
        "training_groups": len({d.group for d in others}),
        "validation_documents": [d.name for d in validation],
        "near_duplicates_removed": sorted(removed),
        "vocabulary": tokenizer.vocab_size,
        "tokens": {"database": store.num_tokens, "train": train.num_tokens, "validation": held_out.num_tokens},
        "bytes_per_token": held_out.num_bytes / held_out.num_tokens,
        "search": plan.index or "exact",
        "recall": database.recall,
        "windows_with_neighbours_of_their_own": hidden,
    }
    scored = f"{', '.join(facts['validation_groups'])} ({held_out.num_tokens:,} tokens)"
    found = f"{store.num_tokens:,} tokens of {facts['training_groups']} other packages and modules"
    counted = f"training: {train.num_tokens:,} tokens; database: {found}; {len(removed)} near-duplicates removed"
    say(f"  validation: {scored}; {counted}")
    recall = ", ".join(f"recall@{k} {share:.3f}" for k, share in (database.recall or {}).items())
    say(f"  search: {facts['search']} {recall}")
    own = "have a neighbour from one of their own documents, which is left out"
    say(f"  {hidden:.1%} of the training windows {own}")
    return Corpus(tokenizer, database, train, held_out, train_neighbours, validation_neighbours, facts)


def _aligned_windows(store: TokenStore, window: int) -> np.ndarray:
    """Return the chunk rows of a store's consecutive windows, int64 [windows, window / M]."""
    per_window = window // store.chunk_len
    return np.arange(0, len(store) - per_window + 1, per_window)[:, None] + np.arange(per_window)


def overlapping_windows(corpus: Corpus, window: int, k: int) -> np.ndarray:
    """Return the first rows of the half of the training windows that has most to copy: whose chunks share the longest
    substrings with the k neighbours of the chunk before."""
    store, means = corpus.train, []
    windows = _aligned_windows(store, window)
    for at in range(0, len(windows), 64):
        rows = windows[at : at + 64]
        batch = training.gather(store, rows, corpus.train_neighbours, corpus.database, k=k)
        found = (batch.neighbours, batch.neighbour_mask)
        sources, mask = (t[:, :-1].reshape(-1, k, t.shape[-1]).numpy() for t in found)
        later = rows[:, 1:].reshape(-1)
        shared = longest_common_substrings(store.chunks(later), sources, lengths=store.lengths[later], source_mask=mask)
        means.append(shared.reshape(len(rows), -1).mean(1))
    return np.sort(windows[np.argsort(-np.concatenate(means), kind="stable")[: max(1, len(windows) // 2)], 0])


def stream(corpus: Corpus, plan: Plan, seed: int, retrieves: bool) -> Iterator[training.Batch]:
    """Iterate over the batches of either model: half of the steps from `overlapping_windows`, the rest from all."""
    options = {"window": plan.window, "batch_size": plan.batch_size, "seed": seed}
    if retrieves:
        options |= {"neighbours": corpus.train_neighbours, "database": corpus.database, "k": plan.neighbours}
    easy = training.batches(corpus.train, starts=overlapping_windows(corpus, plan.window, plan.neighbours), **options)
    return itertools.chain(itertools.islice(easy, plan.steps // 2), training.batches(corpus.train, **options))
