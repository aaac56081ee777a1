"""Options of the program's commands, and the sizes of a library.

Nothing here loads torch, so that help and errors in options appear at once.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from pathlib import Path


def _size(default, about: str):
    """Return a field of `Sizes` with the help text of its option."""
    return field(default=default, metadata={"help": about})


@dataclass(frozen=True)
class Sizes:
    """Sizes of a library and of its windows.

    stride: scored tokens per window; the tokens before them are context. dim: width of the embeddings.
    """

    chunk_len: int = _size(32, "tokens per chunk")
    neighbours: int = _size(2, "neighbours per chunk")
    least_similarity: float = _size(0.3, "smallest similarity of a passage that own attention reads")
    window: int = _size(256, "tokens read at once")
    passage_chunks: int = _size(2, "chunks per passage: the retrieved chunk and the next ones")
    database_bytes: int = _size(2_500_000, "largest number of characters in the library")
    held_out: int = _size(20, "documents held out and scored; `retrofit` holds out none of a small folder")
    held_bytes: int = 1500
    stride: int = 128
    dim: int = 512


def sizes_of(given: argparse.Namespace, **other) -> Sizes:
    """Return the sizes that a command was given. other: sizes without an option."""
    named = {size.name: getattr(given, size.name) for size in fields(Sizes) if size.metadata}
    return Sizes(**{name: size for name, size in named.items() if size is not None} | other)


STEPS = 25
#: The contenders of `compare`, and their names in its table.
CONTENDERS = {
    "alone": "decoder alone",
    "alone+prefix": "decoder alone, shared prefix",
    "longer": "alone, windows twice as long",
    "own": "own attention, nothing trained",
    "own-gates": "own attention, bias and scale trained",
    "own-gates+prefix": "own attention, bias and scale trained, shared prefix",
    "own-gates+prefix+both": "own attention, bias and scale trained, shared prefix, copying and second look",
    "in-context": "in-context retrieval",
    "in-context+prefix": "in-context retrieval, shared prefix",
}


def _texts(made: argparse.ArgumentParser) -> None:
    """Add the options of every command that reads texts."""
    said = "field that holds the text in rows of .jsonl, .ndjson, .json and .parquet (default: text)"
    made.add_argument("--text-field", default="text", help=said)
    made.add_argument("--strict", action="store_true", help="stop if a file, line or row cannot be read")


def _library(made: argparse.ArgumentParser, out: str) -> None:
    """Add the options that `retrofit` and `compare` share."""
    add = made.add_argument
    add("decoder", type=Path, nargs="?", help="folder of a causal language model and its tokeniser; default: SmolLM2")
    add("--texts", type=Path, metavar="DIR", help="folder of texts; default: Python's standard library")
    _texts(made)
    add("--out", type=Path, default=Path(out), help=f"folder for the results (default: {out})")
    add("--steps", type=int, default=STEPS, help=f"training steps; 0: no training (default: {STEPS})")
    add("--seed", type=int, default=0)
    add("--encoder", type=Path, help="folder of a sentence encoder that searches for questions (default: words alone)")
    for size in fields(Sizes):
        if size.metadata:
            short = ["-k"] if size.name == "neighbours" else []
            said = f"{size.metadata['help']} (default: {size.default})"
            options = {"dest": size.name, "type": type(size.default), "default": size.default, "help": said}
            add(*short, f"--{size.name.replace('_', '-')}", **options)


def retrofit() -> argparse.ArgumentParser:
    """Return the parser of `retro-model retrofit`."""
    about = "Give a decoder a library: build it, train the added parameters, and score with a control."
    made = argparse.ArgumentParser(prog="retro-model retrofit", description=about)
    _library(made, "retrofit-out")
    add = made.add_argument
    add("--prefix", action="store_true", help="choose 64 tokens of the library that every text and passage continues")
    said = "fit copying from passages too, and keep it if it helps on the library's own text"
    add("--copy", dest="copying", action="store_true", help=said)
    made.set_defaults(held_out=None)  # a small folder holds out nothing unless the option is given
    return made


def compare() -> argparse.ArgumentParser:
    """Return the parser of `retro-model compare`."""
    about = "Score a decoder with each way to use a library, on the same held-out documents."
    made = argparse.ArgumentParser(prog="retro-model compare", description=about)
    _library(made, "compare-out")
    add = made.add_argument
    every = {"nargs": "+", "choices": CONTENDERS, "default": [*CONTENDERS]}
    add("--contenders", **every, metavar="NAME", help=f"score these of {', '.join(CONTENDERS)}")
    add("--documents", type=int, help="number of held-out documents scored, from the first (default: all)")
    said = f"largest number of characters per held-out document (default: {Sizes.held_bytes})"
    add("--held-bytes", type=int, default=Sizes.held_bytes, help=said)
    said = "ask these questions about --texts instead, and count the right replies; see `compare.questions`"
    add("--questions", type=Path, metavar="JSONL", help=said)
    said = "folder of `retro-model retrofit`; its trained bias and scale answer --questions too"
    add("--gates", type=Path, metavar="DIR", help=said)
    return made


def neighbours() -> argparse.ArgumentParser:
    """Return the parser of `retro-model neighbours`."""
    about = "Make tokens, keys and neighbours of documents."
    made = argparse.ArgumentParser(prog="retro-model neighbours", description=about)
    add = made.add_argument
    add("folder", type=Path, help="folder for the results")
    add("--documents", nargs="+", required=True, help="files, folders, and patterns with * and **; see --text-field")
    _texts(made)
    add("--tokenizer", required=True, help="folder of transformers, file of a saved Tokenizer, or train:SIZE")
    add("--encoder", type=Path, help="folder of a transformers encoder, e.g. BERT's (default: hashed TF-IDF)")
    add("--chunk-len", type=int, default=64, help="tokens per chunk (default: 64, as in RETRO)")
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


def lm_eval() -> argparse.ArgumentParser:
    """Return a parser for the help of `retro-model lm-eval`. The harness parses the options itself."""
    return argparse.ArgumentParser(
        prog="retro-model lm-eval",
        usage="retro-model lm-eval --model_args folder=FOLDER --tasks TASK [TASK ...] [options of lm_eval run]",
        description="""Run EleutherAI's evaluation harness on a trained model.

  retro-model lm-eval --model_args folder=retrofit-out --tasks wikitext lambada_openai
  retro-model lm-eval --model_args folder=retrofit-out,passages=True --include_path . --tasks manual_pages
  retro-model lm-eval ls tasks
  retro-model lm-eval run --help       every option of the harness

folder: a model folder of `retro-model retrofit`. neighbours=0 turns retrieval off; random=True reads random
passages instead of the neighbours. The gain of retrieval is the result minus the result with random=True.
--include_path FOLDER: task files of your own; docs/evaluate.md has two.""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
