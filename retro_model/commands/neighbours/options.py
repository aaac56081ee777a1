"""Options of `retro-model neighbours`."""

from __future__ import annotations

import argparse
from pathlib import Path

TFIDF = "tfidf"


def texts(made: argparse.ArgumentParser) -> None:
    """Add the options of every command that reads texts."""
    said = "field that holds the text in rows of .jsonl, .ndjson, .json and .parquet (default: text)"
    made.add_argument("--text-field", default="text", help=said)
    made.add_argument("--strict", action="store_true", help="stop if a file, line or row cannot be read")


def parser() -> argparse.ArgumentParser:
    """Return the parser of `retro-model neighbours`."""
    about = "Make tokens, keys and neighbours of documents."
    made = argparse.ArgumentParser(prog="retro-model neighbours", description=about)
    add = made.add_argument
    add("folder", type=Path, help="folder for the results")
    add("--documents", nargs="+", required=True, help="files, folders, and patterns with * and **; see --text-field")
    add("--without", nargs="*", default=[], help="names of files and folders to leave out")
    texts(made)
    add("--tokenizer", required=True, help="folder of transformers, file of a saved Tokenizer, or train:SIZE")
    add("--encoder", default=TFIDF, help="folder of a transformers encoder, e.g. BERT's, or tfidf (default)")
    add("--chunk-len", type=int, default=64, help="tokens per chunk (default: 64, as in RETRO)")
    add("--bos", action="store_true", help="begin every document with the tokenizer's BOS")
    said = "neighbours per chunk (default: 10, of which a training reads some)"
    add("-k", "--neighbours", type=int, default=10, help=said)
    add("--index", help="FAISS index factory string (default: exact search)")
    add("--nprobe", type=int, default=16, help="lists that an IVF index visits (default: 16)")
    add("--key-type", default="float32", help="type of the stored keys: float32 or float16")
    add("--device", default="cpu", help="run encoder and exact search on this device")
    add("--shards", type=int, default=1, help="number of shards of the store (default: 1)")
    where = made.add_mutually_exclusive_group()
    where.add_argument("--workers", type=int, default=0, help="processes that build the shards (default: none)")
    where.add_argument("--cluster", help="build the shards on the Dask cluster of this scheduler (tcp://HOST:PORT)")
    return made
