"""Documents to tokens, keys and neighbours, by any frozen encoder.

    retro-model neighbours run --documents corpus.jsonl --tokenizer gpt2-folder --encoder bert-folder -k 10
    retro-model neighbours run --documents "src/**/*.py" --tokenizer train:8192 --window 2048

Everything it makes lies in the folder; killed and called again it goes on.
"""

from __future__ import annotations

import glob
import json
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from retro_model import evaluation
from retro_model.data.database import ChunkDatabase
from retro_model.data.documents import Document, as_documents
from retro_model.data.embed import Embedder, EncoderEmbedder, HashedTfidf, retokenized
from retro_model.data.neighbours import precompute_neighbours
from retro_model.data.store import TokenStore, build_store
from retro_model.data.tokens import Tokenizer
from retro_model.integrations.megatron import read_megatron

from .options import TFIDF
from .options import neighbours as parser


def read_documents(patterns: list[str], text_field: str, without: list[str]) -> Iterator[Document]:
    """JSON lines, Megatron's files (their prefix), and any other file as one document; in the order of their names.
    without: names of files and folders that are left out."""
    for pattern in patterns:
        if Path(f"{pattern}.idx").exists():
            yield from read_megatron(pattern)
            continue
        paths = sorted(
            path
            for path in glob.glob(pattern, recursive=True)
            if Path(path).is_file() and not {*Path(path).parts} & {*without}
        )
        if not paths:
            raise FileNotFoundError(
                f"documents: expected files, or the prefix of an .idx and a .bin; got none for {pattern}"
            )
        for path in map(Path, paths):
            if path.suffix in (".jsonl", ".json"):
                with path.open(encoding="utf-8") as lines:
                    yield from as_documents((json.loads(line) for line in lines if line.strip()), text_field=text_field)
            else:
                try:
                    text = path.read_text(encoding="utf-8")
                except UnicodeDecodeError:
                    continue
                if text.strip():
                    yield Document(path.as_posix(), "", text)


def make_tokenizer(name: str, folder: Path, documents: Iterator[Document]):
    """ "train:SIZE" on every third document, a file that `Tokenizer.save` wrote, or a folder of transformers."""
    if name.startswith("train:"):
        path = folder / "tokenizer.json"
        if not path.exists():
            texts = [d.content for i, d in enumerate(documents) if i % 3 == 0 and isinstance(d.content, str)]
            Tokenizer.train(texts, int(name.removeprefix("train:"))).save(path)
        return Tokenizer.load(path)
    if Path(name).is_file():
        return Tokenizer.load(name)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)


def make_embedder(name: str, store: TokenStore, tokenizer, device: str) -> Embedder:
    """Hashed TF-IDF, or a frozen encoder of transformers with its own tokenizer, from a folder on this machine."""
    if name == TFIDF:
        return HashedTfidf().fit(store)
    from transformers import AutoModel, AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(name)
    return EncoderEmbedder(AutoModel.from_pretrained(name).to(device), prepare=retokenized(tokenizer.decode, theirs))


def run(options: Namespace, show=print) -> np.ndarray:
    """Run the command and return the neighbours."""
    begin = time.perf_counter()
    options.folder.mkdir(parents=True, exist_ok=True)
    what = (options.documents, options.text_field, options.without)
    tokenizer = make_tokenizer(options.tokenizer, options.folder, read_documents(*what))
    store = build_store(
        options.folder / "store", read_documents(*what), tokenizer, chunk_len=options.chunk_len, bos=options.bos
    )
    show(f"{len(store.documents):,} documents, {store.num_tokens:,} tokens, {len(store):,} chunks of {store.chunk_len}")
    embedder = make_embedder(options.encoder, store, tokenizer, options.device)
    database = ChunkDatabase.build(options.folder / "keys", store, embedder, index=options.index, device=options.device)
    recall = ", ".join(f"recall@{k} {share:.3f}" for k, share in (database.recall or {}).items())
    show(f"keys: {embedder.name}, {embedder.dim} wide; search: {options.index or 'exact'} {recall}")
    neighbours = precompute_neighbours(options.folder / "neighbours", store, database, options.k)
    show(f"{options.k} neighbours a chunk, the store's keys as queries")
    if options.window is not None:
        for filtered, who in ((False, "of what the search found"), (True, "of what a training window is shown")):
            leaks = evaluation.window_leaks(
                store, neighbours[:, : options.shown], database, window=options.window, filtered=filtered
            )
            show(
                f"{who}: {leaks.own:.1%} of the windows of {options.window} tokens hold a neighbour from one of their "
                "own documents, "
                f"{leaks.ahead:.1%} one from what they still have to predict"
            )
    show(f"{time.perf_counter() - begin:.0f} s; store, keys and neighbours lie in {options.folder}")
    return neighbours


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    run(parser().parse_args(arguments))
