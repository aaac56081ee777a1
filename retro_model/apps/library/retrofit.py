"""A decoder of the Hugging Face library in a local folder gets retrieval: database, training of what is added, scores,
a model folder.

    retro-model retrofit DECODER --out retrofit-out                 # texts: the sources of Python's standard library
    retro-model retrofit DECODER --texts DIR --out retrofit-out     # its text files; every tenth is held out

Nothing is fetched and no code of the folder's is run. The decoder's weights stay as they are; the result is for
`retro-model ask` and `serve`.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from retro_model import evaluation, training
from retro_model.apps.serve import folder as folders
from retro_model.data.database import ChunkDatabase
from retro_model.data.embed import HashedTfidf
from retro_model.data.neighbours import precompute_neighbours
from retro_model.data.store import Document, build_store

from .demo.corpus import SPARE, VALIDATION, first_bytes, sources

SUFFIXES = (".txt", ".md", ".py", ".rst")


@dataclass(frozen=True)
class Plan:
    """Sizes of a run. database_bytes, validation_bytes: text to retrieve from and train on, to score; at most."""

    chunk_len: int = 16
    neighbours: int = 2
    window: int = 256
    stride: int = 128
    database_bytes: int = 3_000_000
    validation_bytes: int = 60_000
    dim: int = 256
    encoder_width: int = 128
    batch_size: int = 2
    steps: int = 200
    max_lr: float = 2e-3


def documents(texts: Path | None, plan: Plan) -> tuple[list[Document], list[Document]]:
    """What is retrieved from and trained on, and what is held out."""
    if texts is None:
        every = list(sources(Path(sysconfig.get_path("stdlib"))))
        held = [d for d in every if d.group in VALIDATION]
        rest = sorted((d for d in every if d.group not in VALIDATION), key=lambda d: d.group == "test")
    else:
        paths = sorted(p for p in texts.rglob("*") if p.suffix in SUFFIXES and p.is_file())
        every = [
            Document(p.relative_to(texts).as_posix(), p.relative_to(texts).as_posix(), p.read_text("utf-8", "replace"))
            for p in paths
        ]
        every = sorted((d for d in every if d.content.strip()), key=lambda d: hashlib.sha256(d.name.encode()).digest())
        held, rest = every[::10], [d for i, d in enumerate(every) if i % 10]
    held, rest = first_bytes(held, plan.validation_bytes), first_bytes(rest, plan.database_bytes)
    if not held or not rest:
        raise ValueError(
            f"texts: expected at least two files of {', '.join(SUFFIXES)}, within the sizes; got {len(every)} in "
            f"{texts}"
        )
    return rest, held


def cca_layers(layers: int) -> tuple[int, ...]:
    """Every third layer from the middle on."""
    return tuple(range(layers // 2 + 1, layers + 1, 3))


def run(
    decoder_folder: Path, folder: Path, plan: Plan, *, texts: Path | None = None, seed: int = 0, quiet: bool = False
) -> list[str]:
    """Everything, into `folder`; gives the verdicts."""
    from transformers import AutoModelForCausalLM

    from retro_model.apps.serve.retrofit_reader import HubText
    from retro_model.integrations.huggingface import RetrofitForCausalLM

    console = Console(quiet=quiet)
    local = {"local_files_only": True, "trust_remote_code": False}
    if not (Path(decoder_folder) / "config.json").exists():
        raise FileNotFoundError(
            f"{decoder_folder}: expected the folder of a decoder, with its config.json; none is there"
        )
    tokenizer = HubText.load(decoder_folder)
    decoder = AutoModelForCausalLM.from_pretrained(decoder_folder, **local)
    rest, held = documents(texts, plan)
    options = {"chunk_len": plan.chunk_len, "bos": tokenizer.bos_id is not None}
    store = build_store(folder / "all", rest, tokenizer, **options)
    held_out = build_store(folder / "validation", held, tokenizer, **options)
    embedder = HashedTfidf(plan.dim).fit(store)
    embedder.save(folder / "embedder.npz")
    database = ChunkDatabase.build(folder / "embeddings", store, embedder)
    near = {
        name: precompute_neighbours(folder / f"{name}-neighbours", s, database, plan.neighbours + SPARE)
        for name, s in (("train", store), ("validation", held_out))
    }
    console.print(f"{len(rest)} documents, {store.num_tokens:,} tokens, to read; {len(held)} held out")
    torch.manual_seed(seed)
    width = plan.encoder_width
    sizes = {
        "encoder_layers": 1,
        "encoder_d_model": width,
        "encoder_d_ff": 2 * width,
        "encoder_heads": 2,
        "encoder_head_dim": width // 2,
    }
    whole = RetrofitForCausalLM.from_decoder(
        decoder, cca_layers=cca_layers(decoder.config.num_hidden_layers), chunk_len=plan.chunk_len, **sizes
    )
    settings = training.Settings(plan.steps, plan.max_lr, warmup_steps=plan.steps // 10)
    stream = training.batches(
        store,
        window=plan.window,
        batch_size=plan.batch_size,
        seed=seed,
        neighbours=near["train"],
        database=database,
        k=plan.neighbours,
    )
    with training.progress("what was added", plan.steps, quiet) as report:
        training.train(whole.model, training.make_optimizer(whole.model, settings), stream, settings, report=report)
    window = {"window": plan.window, "stride": plan.stride}
    on = evaluation.score(whole.model, held_out, near["validation"][:, : plan.neighbours], database, **window)
    off = evaluation.score(whole.model, held_out, **window)
    verdicts = evaluation.verdicts(evaluation.bootstrap(on, off, held_out))
    whole.save_pretrained(folder / "model", whole=True)
    tokenizer.theirs.save_pretrained(folder / "tokenizer")
    facts = {
        "neighbours": plan.neighbours,
        "bos": options["bos"],
        "verdict": " ".join(verdicts),
        "passages": folders.passages(held_out, plan.window, on, off),
    }
    parts = {
        "model": "model",
        "tokenizer": "tokenizer",
        "held_out": "validation",
        "store": "all",
        "keys": "embeddings",
        "embedder": "embedder.npz",
    }
    folders.describe(folder, "retrofit", f"{Path(decoder_folder).name} with retrieval", parts, plan.window, facts)
    console.print(*verdicts)
    console.print(f"See what it looks up, and change that: retro-model serve {folder}", soft_wrap=True)
    return verdicts


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="retro-model retrofit", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "decoder", type=Path, help="folder of a causal language model and its tokeniser, as save_pretrained writes them"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("retrofit-out"),
        help="folder for everything that is made (default: retrofit-out)",
    )
    parser.add_argument(
        "--texts", type=Path, metavar="DIR", help="text files; default: the sources of Python's standard library"
    )
    parser.add_argument("--steps", type=int, default=Plan.steps)
    parser.add_argument("--chunk-len", type=int, default=Plan.chunk_len)
    parser.add_argument("--window", type=int, default=Plan.window, help="tokens read at once")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    plan = Plan(steps=options.steps, chunk_len=options.chunk_len, window=options.window, stride=options.window // 2)
    try:
        run(options.decoder, options.out, plan, texts=options.texts, seed=options.seed)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"retro-model retrofit: {error}")
