"""Options of `retro-model neighbours` and `lm-eval`."""

from __future__ import annotations

import argparse
from pathlib import Path

TFIDF = "tfidf"


def texts(made: argparse.ArgumentParser) -> None:
    """Add the options of every command that reads texts."""
    said = "field that holds the text in rows of .jsonl, .ndjson, .json and .parquet (default: text)"
    made.add_argument("--text-field", default="text", help=said)
    made.add_argument("--strict", action="store_true", help="stop if a file, line or row cannot be read")


def neighbours() -> argparse.ArgumentParser:
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
    add("--chunk-len", type=int, default=64, help="tokens of a chunk (default: 64)")
    add("--bos", action="store_true", help="begin every document with the tokenizer's BOS")
    add("-k", type=int, default=10, help="neighbours of a chunk (default: 10)")
    add("--index", help="FAISS index factory string (default: exact search)")
    add("--nprobe", type=int, default=16, help="lists that an IVF index visits (default: 16)")
    add("--key-type", default="float32", help="type of the stored keys: float32 or float16")
    add("--device", default="cpu", help="run encoder and exact search on this device")
    add("--shards", type=int, default=1, help="number of shards of the store (default: 1)")
    where = made.add_mutually_exclusive_group()
    where.add_argument("--workers", type=int, default=0, help="processes that build the shards (default: none)")
    where.add_argument("--cluster", help="build the shards on the Dask cluster of this scheduler (tcp://HOST:PORT)")
    add("--window", type=int, help="report how many training windows of this many tokens would see their own future")
    add("--shown", type=int, default=2, help="neighbours of a chunk that a window reads, for --window (default: 2)")
    return made


def lm_eval() -> argparse.ArgumentParser:
    """Return a parser that has only the help of `retro-model lm-eval`: the options are the harness's."""
    return argparse.ArgumentParser(
        prog="retro-model lm-eval",
        usage="retro-model lm-eval --model_args folder=FOLDER --tasks TASK [TASK ...] [options of lm_eval run]",
        description="""Run EleutherAI's evaluation harness on a trained model.

  retro-model lm-eval --model_args folder=retrofit-out --tasks lambada=lambada.jsonl wikitext103=articles.jsonl
  retro-model lm-eval --model_args folder=retrofit-out,passages=True --tasks question_answering=questions.jsonl
  retro-model lm-eval ls tasks
  retro-model lm-eval run --help       every option of the harness

folder: a model folder of `retro-model retrofit`. neighbours=0 turns retrieval off; random=True reads random
passages in place of the neighbours. The gain of retrieval is the result minus the result with random=True.
NAME=FILE: a task of the paper on a local file. --include_path FOLDER: task files of your own.""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
