"""RETRO end to end on the sources of Python's standard library: text, database, training, scores with their control.

A RETRO and its baseline, the same decoder without retrieval, train for the same steps on the same batches in the same
order. Both are scored on modules that are in neither training data, tokeniser nor database. The control gives RETRO
random neighbours: what it gains over them is what retrieval contributes. Models this small do not find copying within
minutes, so both begin with a copying circuit (`start_copying`).

    python examples/retro_python.py OUT                    # about ten minutes on two cores
    python examples/retro_python.py OUT --steps 600 --picture gains.png

OUT keeps the tokeniser, the database and its neighbours.

Source: Borgeaud et al., arXiv 2112.04426.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from retro_model import Retro, RetroConfig, evaluation, training
from retro_model.data.database import ChunkDatabase
from retro_model.data.dedup import find_leaked, kept_documents
from retro_model.data.embed import HashedTfidf
from retro_model.data.neighbours import precompute_neighbours
from retro_model.data.store import Document, TokenStore, build_store
from retro_model.data.text import longest_common_substrings
from retro_model.data.tokens import Tokenizer
from retro_model.layers.copying import start_copying

#: Held-out modules. Each has a sibling to retrieve from, as ntpath has posixpath.
HELD_OUT = (
    *("bisect", "calendar", "csv", "fnmatch", "fractions", "getopt", "heapq", "locale", "ntpath", "optparse", "shutil"),
    *("socket", "ssl", "sysconfig", "textwrap", "uuid", "zipapp"),
)
TABLES = ("pydoc_data", "test/encoded_modules", "test/cjkencodings")  # help texts and encoded data, not programs
SPARE = 4  # number of extra neighbours to search for, because a window leaves out neighbours from its own document
CHUNK, K = 16, 2


class Corpus(NamedTuple):
    """Stores to train on and to score, and the ids of their neighbours in `database`."""

    tokenizer: Tokenizer
    database: ChunkDatabase
    train: TokenStore
    held_out: TokenStore
    train_neighbours: np.ndarray
    held_out_neighbours: np.ndarray


def sources() -> Iterator[Document]:
    """Iterate over the UTF-8 sources of the standard library in a fixed random order."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py") if "-packages" not in str(p))
    random.Random(0).shuffle(names)
    for name in names:
        text = (root / name).read_text(encoding="utf-8", errors="ignore")
        if text.strip() and not name.startswith(TABLES):
            yield Document(name, name.removesuffix(".py").split("/")[0], text)


def at_most(documents: list[Document], characters: int) -> list[Document]:
    """Return the first documents that hold at most this many characters together. A longer one is passed over."""
    taken = []
    for document in documents:
        if len(document.content) <= characters:
            taken.append(document)
            characters -= len(document.content)
    return taken


def prepare(folder: Path, characters: int, vocabulary: int, width: int) -> Corpus:
    """Make tokeniser, stores, database and neighbours in `folder`."""
    every = list(sources())
    scored = at_most([d for d in every if d.group in HELD_OUT], characters // 20)
    others = at_most([d for d in every if d.group not in HELD_OUT and d.group != "test"], characters)
    tokenizer = Tokenizer.train((d.content for d in others[::3]), vocabulary)
    held_out = build_store(folder / "held-out", scored, tokenizer, chunk_len=CHUNK, bos=True)
    everything = build_store(folder / "all", others, tokenizer, chunk_len=CHUNK, bos=True)
    leaked = find_leaked(everything, [held_out])
    removed = {removal.name for removal in leaked.removed}
    store = build_store(folder / "database", kept_documents(everything, leaked), tokenizer, chunk_len=CHUNK)
    learnt = at_most([d for d in others if d.name not in removed], characters // 4)
    train = build_store(folder / "train", learnt, tokenizer, chunk_len=CHUNK, bos=True)
    database = ChunkDatabase.build(folder / "embeddings", store, HashedTfidf(width).fit(store))
    near = [
        precompute_neighbours(folder / f"{name}-neighbours", of, database, k)
        for name, of, k in (("train", train, K + SPARE), ("held-out", held_out, evaluation.LEAKAGE_NEIGHBOURS))
    ]
    print(
        f"{train.num_tokens:,} tokens to train on; a database of {len(store):,} chunks; {held_out.num_tokens:,} tokens"
    )
    print(f"of {len(scored)} modules to score; {len(removed)} near-duplicates of these modules were removed")
    return Corpus(tokenizer, database, train, held_out, *near)


def rich_windows(corpus: Corpus, window: int) -> np.ndarray:
    """Return the first chunks of the half of the training windows that shares the longest strings with neighbours."""
    store, per_window, means = corpus.train, window // CHUNK, []
    firsts = np.arange(0, len(store) - per_window + 1, per_window)
    for first in firsts:
        rows = (first + np.arange(per_window))[None]
        batch = training.gather(store, rows, corpus.train_neighbours, corpus.database, k=K)
        near, mask = (t[:, :-1].reshape(-1, K, t.shape[-1]).numpy() for t in (batch.neighbours, batch.neighbour_mask))
        later = rows[:, 1:].reshape(-1)
        lengths = store.lengths[later]
        shared = longest_common_substrings(store.chunks(later), near, lengths=lengths, source_mask=mask)
        means.append(shared.mean())
    return np.sort(firsts[np.argsort(-np.array(means), kind="stable")[: max(1, len(firsts) // 2)]])


def fit(config: RetroConfig, corpus: Corpus, starts: np.ndarray, steps: int, window: int, seed: int) -> Retro:
    """Train a model. Half of the steps see the windows that have most to copy."""
    torch.manual_seed(seed)
    model = Retro(config)
    start_copying(model, seed)
    options = {"window": window, "batch_size": 4, "seed": seed}
    if config.retrieves:
        options |= {"neighbours": corpus.train_neighbours, "database": corpus.database, "k": K}
    easy = training.batches(corpus.train, starts=starts, **options)
    batches = itertools.chain(itertools.islice(easy, steps // 2), training.batches(corpus.train, **options))
    settings = training.Settings(steps, max_lr=1e-2, warmup_steps=steps // 10)
    begin, name = time.perf_counter(), "RETRO" if config.retrieves else "baseline"
    history = training.train(model, training.make_optimizer(model, settings), batches, settings)
    parameters, seconds = sum(p.numel() for p in model.parameters()), time.perf_counter() - begin
    print(f"{name}, {parameters:,} parameters: loss {history[-1]['loss']:.2f} after {steps} steps in {seconds:.0f} s")
    return model


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Prepare, train, score and draw. Return the bits per byte of each contender."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out", type=Path, help="folder for everything that is made")
    sizes = {"steps": 150, "characters": 4_000_000, "vocabulary": 2048, "window": 512, "width": 512, "seed": 0}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--picture", default="", help="write the gains by leakage to this file")
    options = parser.parse_args(arguments)
    corpus = prepare(options.out, options.characters, options.vocabulary, options.width)
    shape = {"d_model": 64, "d_ff": 256, "num_heads": 2, "num_layers": 3, "chunk_len": CHUNK, "encoder_d_ff": 128}
    config = RetroConfig.small(corpus.tokenizer.vocab_size, share_embeddings=True, max_len=1024, **shape)
    starts, seed = rich_windows(corpus, options.window), options.seed
    retro, baseline = (fit(c, corpus, starts, options.steps, options.window, seed) for c in (config, config.baseline()))
    near = corpus.held_out_neighbours
    at_random = evaluation.random_neighbours(near[:, :K], corpus.database, seed)
    given = {"on": (retro, near[:, :K], corpus.database), "random": (retro, at_random, corpus.database)}
    windows = {"window": options.window, "stride": options.window // 2}
    scores = {
        name: evaluation.score(model, corpus.held_out, *neighbours, **windows)
        for name, (model, *neighbours) in (given | {"off": (retro,), "baseline": (baseline,)}).items()
    }
    results = {name: evaluation.bits_per_byte(score) for name, score in scores.items()}
    print("bits per byte:", ", ".join(f"{name} {bits:.4f}" for name, bits in results.items()))
    print(evaluation.gain_of_retrieval(scores["on"], scores["random"], corpus.held_out))
    difference, low, high = evaluation.bootstrap(scores["on"], scores["baseline"], corpus.held_out)
    print(f"on minus baseline: {difference:+.3f} (95% over modules: {low:+.3f} to {high:+.3f})")
    if options.picture:
        leakage = evaluation.leakage(corpus.held_out, near, corpus.database)
        others = {name: scores[name] for name in ("random", "off", "baseline")}
        evaluation.plot_gains(scores["on"], others, corpus.held_out, leakage, options.picture)
    return results


if __name__ == "__main__":
    main()
