"""Make the tokens, keys and neighbours of documents, with any frozen encoder. A killed run continues."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Collection, Iterator
from concurrent.futures import Executor
from pathlib import Path

import numpy as np

from retro_model.base import checks, disk, progress
from retro_model.data import building
from retro_model.data.database import ChunkDatabase
from retro_model.data.documents import Document
from retro_model.data.embed import Embedder, EncoderEmbedder, HashedTfidf, retokenized
from retro_model.data.neighbours import precompute_neighbours
from retro_model.data.store import TokenStore, build_store
from retro_model.data.text_files import LeftOut, find_texts, read_texts
from retro_model.data.tokens import Tokenizer

from . import options as parsers

EMBEDDER = "embedder.npz"
RETRIES = 3  # retries of a task on a cluster, because a worker that seemed dead may still hold the shard


def make_store(
    options: Namespace, paths: list[Path], places: Collection[str], tokenizer, executor: Executor | None
) -> TokenStore:
    """Build the store of the files' documents. With `--shards S`, every S-th file belongs to the same shard.

    places: places to leave out, see `read_texts`.
    """
    settings = {"chunk_len": options.chunk_len}
    if len(paths) < options.shards:
        raise ValueError(f"--shards: expected at most one for each of {len(paths)} files; got {options.shards}")
    shares = (paths[shard :: options.shards] for shard in range(options.shards))
    given = {"text_field": options.text_field, "places": places}
    sources = [functools.partial(read_texts, share, **given) for share in shares]
    if options.shards == 1:
        return build_store(options.folder / "store", sources[0](), tokenizer, **settings)
    return building.build_sharded_store(options.folder / "store", sources, tokenizer, executor=executor, **settings)


def make_tokenizer(name: str, folder: Path, documents: Iterator[Document]):
    """Return the tokenizer of a name.

    name: "train:SIZE", which trains on every third document; a file of a saved `Tokenizer`; or a folder of
    transformers.
    """
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


def make_embedder(
    encoder: Path | None, store: TokenStore, tokenizer, device: str, executor: Executor | None
) -> Embedder:
    """Return hashed TF-IDF, or the frozen encoder of a local transformers folder."""
    if encoder is None:
        return HashedTfidf().fit(store, executor=executor)
    from transformers import AutoModel, AutoTokenizer

    progress.hide_theirs()
    theirs = AutoTokenizer.from_pretrained(encoder)
    model = AutoModel.from_pretrained(encoder).to(device)
    return EncoderEmbedder(model, prepare=retokenized(tokenizer.decode, theirs))


@contextlib.contextmanager
def workers(options: Namespace) -> Iterator[Executor | None]:
    """Context manager: the executor of `--workers` or `--cluster`; None: this process."""
    if options.workers:
        with building.pool(options.workers) as pool:
            yield pool
    elif options.cluster:
        warnings.filterwarnings("ignore", message="Sending large graph")  # each task carries the embedder's counts
        try:
            import distributed
        except ImportError as error:
            sys.exit(f"--cluster: {error}; pip install 'retro-kernels[cluster]'")
        with distributed.Client(options.cluster) as client:
            yield client.get_executor(retries=RETRIES)
    else:
        yield None


def run(options: Namespace) -> np.ndarray:
    """Run the command and return the neighbours."""
    begin = time.perf_counter()
    for name in ("chunk_len", "neighbours", "shards", "nprobe"):
        checks.integer(name, getattr(options, name), low=1)
    checks.usable_device(options.device)
    options.folder.mkdir(parents=True, exist_ok=True)
    with workers(options) as executor:
        left_out = LeftOut()
        paths = find_texts(options.documents, left_out=left_out)
        count = sum(1 for _ in read_texts(paths, text_field=options.text_field, left_out=left_out))
        left_out.report(print, strict=options.strict)
        if not count:
            raise ValueError(f"documents: expected texts; got none in {len(paths)} files")
        places = left_out.places  # known before anything is written, so that every shard leaves out the same
        documents = read_texts(paths, text_field=options.text_field, places=places)
        tokenizer = make_tokenizer(options.tokenizer, options.folder, documents)
        store = make_store(options, paths, places, tokenizer, executor)
        sizes = f"{store.num_tokens:,} tokens, {len(store):,} chunks of {store.chunk_len}"
        print(f"{len(store.documents):,} documents, {sizes}")
        embedder = make_embedder(options.encoder, store, tokenizer, options.device, executor)
        if isinstance(embedder, HashedTfidf):
            embedder.save(options.folder / EMBEDDER)
        settings = {name: getattr(options, name) for name in ("index", "nprobe", "device", "key_type")}
        database = ChunkDatabase.build(options.folder / "keys", store, embedder, **settings, executor=executor)
        recall = ", ".join(f"recall@{k} {share:.3f}" for k, share in (database.recall or {}).items())
        print(f"keys: {embedder.name}, {embedder.dim} wide; search: {options.index or 'exact'} {recall}")
        k = options.neighbours
        neighbours = precompute_neighbours(options.folder / "neighbours", store, database, k, executor=executor)
    print(f"{k} neighbours of each chunk")
    print(f"{time.perf_counter() - begin:.0f} s; store, keys and neighbours are in {options.folder}")
    return neighbours


def main(arguments: list[str] | None = None) -> None:
    """Run `retro-model neighbours`."""
    try:
        run(parsers.neighbours().parse_args(arguments))
    except (OSError, ValueError, disk.Busy) as error:
        sys.exit(f"retro-model neighbours: {error}")
