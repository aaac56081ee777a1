"""A library in a folder: tokens of documents without leaks, their database, and neighbours of held-out documents."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from retro_model import evaluation, training
from retro_model.base import checks, progress
from retro_model.data.database import ChunkDatabase
from retro_model.data.dedup import find_leaked, kept_documents
from retro_model.data.embed import HashedTfidf
from retro_model.data.hub import HubTokenizer
from retro_model.data.neighbours import precompute_neighbours
from retro_model.data.store import Document, TokenStore, build_store
from retro_model.evaluation.scoring import check_sizes, document_rows

from ..options import Sizes

show_line = functools.partial(print, flush=True)  # a line appears at once, also in a file
SPARE = 4  # extra neighbours, because a training window leaves out neighbours from its own documents
#: Distinct windows that train, whose neighbours are encoded once, and windows per step.
WINDOWS, BATCH_SIZE = 24, 2


def lengths(sizes: Sizes) -> dict[str, int]:
    """Return the arguments of `retrofit` that depend on the sizes."""
    return {"chunk_len": sizes.chunk_len, "neighbour_len": sizes.passage_chunks * sizes.chunk_len}


def check_positive(sizes: Sizes) -> None:
    """Raise ValueError, naming the size, unless all but the number of held-out documents are at least 1."""
    for name, size in vars(sizes).items():
        if isinstance(size, int) and name != "held_out":
            checks.integer(name, size, low=1)


class PreparedLibrary(NamedTuple):
    """The library of a decoder.

    neighbours: neighbours of the held-out chunks, int64 [chunks,10]. leakage: r(C) of each held-out chunk, by all ten.
    """

    tokenizer: HubTokenizer
    database: ChunkDatabase
    held_out: TokenStore
    neighbours: np.ndarray
    leakage: np.ndarray
    facts: dict

    def similarity(self, sizes: Sizes) -> np.ndarray:
        """Return the similarity of the held-out chunks to their neighbours, float32 [chunks,K]."""
        near = self.neighbours[:, : sizes.neighbours]
        return self.database.similarity(self.held_out, np.arange(len(self.held_out)), near)

    def similar(self, sizes: Sizes) -> np.ndarray:
        """Return the neighbours of the held-out chunks that own attention reads, [chunks,K]; -1: too dissimilar."""
        near = self.neighbours[:, : sizes.neighbours]
        return np.where(self.similarity(sizes) < sizes.least_similarity, -1, near)


class Searched:
    """Array [chunks,K] of the neighbours of a database's own chunks.

    A row is searched when it is indexed, because a short training needs few rows. least: similarity below which a
    neighbour becomes -1.
    """

    ndim = 2

    def __init__(self, database: ChunkDatabase, k: int, least: float = -np.inf):
        self.database, self.shape, self.least = database, (len(database), k), least

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        store, flat = self.database.store, np.asarray(rows).reshape(-1)
        ids = self.database.search_rows(store, flat, self.shape[1], exclude_doc=np.asarray(store.chunk_doc)[flat])
        ids = np.where(self.database.similarity(store, flat, ids) < self.least, -1, ids)
        return ids.reshape(*np.shape(rows), self.shape[1])


def prepare(
    folder: Path, decoder: Path, documents: list[Document], held: list[Document], sizes: Sizes, show=print
) -> PreparedLibrary:
    """Make the library in `folder`. A killed run continues, and a finished library is opened."""
    if held:  # they are scored in windows
        check_sizes(sizes, sizes.window, sizes.stride, 1)
    tokenizer = HubTokenizer.load(decoder)
    options = {"chunk_len": sizes.chunk_len, "bos": tokenizer.bos_id is not None}
    show(f"tokens of {len(documents):,} documents" + (f", and of {len(held)} held out" if held else ""))
    held_out = build_store(folder / "validation", held, tokenizer, **options, allow_empty=True)
    store = build_store(folder / "all", documents, tokenizer, **options)
    leaked = find_leaked(store, [held_out], tokenizer=tokenizer)
    if leaked.removed:
        store = build_store(folder / "database", kept_documents(store, leaked), tokenizer, chunk_len=sizes.chunk_len)
    show(f"embeddings of {len(store):,} chunks ({store.num_tokens:,} tokens); {len(leaked.removed)} leaks dropped")
    embedder = HashedTfidf(sizes.dim).fit(store)
    embedder.save(folder / "embedder.npz")
    database = ChunkDatabase.build(folder / "embeddings", store, embedder)
    if held:
        show(f"neighbours of {len(held_out):,} held-out chunks")
    most = min(evaluation.LEAKAGE_NEIGHBOURS, len(store))
    near = precompute_neighbours(folder / "validation-neighbours", held_out, database, most)
    leakage = evaluation.leakage(held_out, near, database)
    database.passage_chunks = sizes.passage_chunks
    facts = {
        "documents": len(store.documents),
        "tokens": store.num_tokens,
        "leaks_dropped": sorted(removal.name for removal in leaked.removed),
        "held_out_documents": len(held_out.documents),
    }
    return PreparedLibrary(tokenizer, database, held_out, np.asarray(near), leakage, facts)


def decoder_folder(given: Path | None, show) -> Path:
    """Return the folder of the decoder. None: SmolLM2's folder, which is fetched and converted once.

    Raises: FileNotFoundError for a folder without a decoder. ImportError, RuntimeError: see `smollm.folder`.
    """
    if given is None:
        from retro_model.integrations import smollm

        return smollm.folder(report=show)
    if not (given / "config.json").exists():
        raise FileNotFoundError(f"{given}: expected the folder of a decoder with a config.json; the file is missing")
    return given


def read_decoder(folder: Path):
    """Load a decoder of the Hugging Face library. Nothing is fetched, no code of the folder is run."""
    from transformers import AutoModelForCausalLM

    progress.hide_theirs()
    how = {"dtype": torch.float32, "local_files_only": True, "trust_remote_code": False}
    return AutoModelForCausalLM.from_pretrained(folder.resolve(), **how).eval()


CANDIDATES = 4  # windows that are searched for each window that is needed


def spread(store: TokenStore, near: Searched, window: int, count: int, seed: int) -> np.ndarray | None:
    """Return the first rows of at most `count` windows to train on, or None if fewer than half as many are found.

    Each window is in another document. Documents and positions are drawn at random, among windows in which at least one
    chunk has a neighbour that a later chunk reads.
    """
    random, rows = np.random.default_rng(seed), window // store.chunk_len
    most = [(first, end - rows) for first, end in document_rows(store) if end - first >= rows]
    drawn = random.permutation(len(most))[: CANDIDATES * count]
    firsts = np.array([random.integers(*most[at], endpoint=True) for at in drawn], np.int64)
    reads = (near[firsts[:, None] + np.arange(rows - 1)] >= 0).any((1, 2))
    found = np.sort(firsts[reads][:count])
    return found if 2 * len(found) >= count else None


def stream(library: PreparedLibrary, sizes: Sizes, seed: int, start: int = 0):
    """Return an endless iterator over batches of the library's own text with neighbours.

    The same `WINDOWS` windows recur (see `spread`), with the neighbours that own attention reads. If too few windows
    are found, batches cover the whole text, with neighbours of any similarity.
    """
    database = library.database
    near = Searched(database, sizes.neighbours + SPARE, sizes.least_similarity)
    starts = spread(database.store, near, sizes.window, WINDOWS, seed)
    if starts is None:
        near = Searched(database, near.shape[1])
    read = {"neighbours": near, "database": database, "k": sizes.neighbours}
    options = {"window": sizes.window, "batch_size": BATCH_SIZE, "seed": seed, "start": start, "starts": starts}
    return training.batches(database.store, **read, **options)
