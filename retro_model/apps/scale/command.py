"""`retro-model scale`: plan, build and train past one machine.

retro-model scale OUT             # all of it here: the standard library, a Dask cluster of two, two processes
retro-model scale plan --chunks 1e9 --machines 32 --cores 64
retro-model scale build OUT --files 'text/**/*.txt' --shards 64 --cluster tcp://scheduler:8786
torchrun --standalone --nproc-per-node 8 -m retro_model scale train OUT
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import Executor
from glob import glob
from pathlib import Path

import torch

from retro_model.base import disk
from retro_model.data import executors
from retro_model.data.tokens import Tokenizer

from . import plan as planning
from . import train as training
from .build import build
from .options import parser
from .recipe import Recipe, Synthetic, file_documents, file_sources, standard_library, synthetic_sources

MANY = 10**9  # chunks: a database of the papers' size, in one more line of every plan
TRAINED_ON, SAMPLED = 400, 64  # files that the tokeniser learns from, and by which the chunks are estimated


def main(arguments: list[str]) -> None:
    """Runs the sub-command; without one, all of it into a folder."""
    if arguments and arguments[0] not in ("plan", "build", "train", "-h", "--help"):
        arguments = ["all", *arguments]
    options = parser().parse_args(arguments)
    try:
        {"plan": show_plan, "build": run_build, "train": training.main, "all": run_all}[options.command](options)
    except (FileNotFoundError, ValueError, disk.Busy) as error:
        raise SystemExit(f"retro-model scale: {error}") from error


def recipe_of(options: Namespace, chunks: int) -> Recipe:
    text = not getattr(options, "synthetic", None)
    recipe = Recipe(options.chunk_len, options.vocab, options.dim, options.key_type, k=options.k, text=text).for_chunks(
        chunks
    )
    changes = {"index": options.index, "nprobe": options.nprobe}
    return Recipe(**{**vars(recipe), **{name: value for name, value in changes.items() if value is not None}})


def show_plan(options: Namespace, chunks: int | None = None) -> None:
    """Prints what a build of so many chunks costs."""
    if chunks is None:
        given = [options.chunks, options.synthetic, options.documents and options.documents * options.chunks_a_document]
        if sum(number is not None for number in given) != 1:
            raise SystemExit("plan: give --chunks, --documents or --synthetic")
        chunks = int(next(number for number in given if number is not None))
    recipe = recipe_of(options, chunks)
    rates = planning.measured_rates(options.rates) if options.rates else None
    searched = None if options.searched is None else int(options.searched)
    print(
        f"{chunks:,} chunks of {recipe.chunk_len} tokens in {options.shards} shards, keys {recipe.key_type} "
        f"[{recipe.dim}], "
        f"index {recipe.index or 'none: exact search'}, nprobe {recipe.nprobe}"
    )
    settings = {"rates": rates, "cluster": _cluster_workers(options)}
    where = {"machines": options.machines, "cores": options.cores}
    stages = planning.plan(recipe, chunks, options.shards, searched=searched, **settings)
    print(planning.table(stages, **where), flush=True)
    if chunks < MANY:
        many = planning.plan(recipe_of(options, MANY), MANY, options.shards * -(-MANY // chunks), **settings)
        print(planning.summary(MANY, many, **where), flush=True)


def run_build(options: Namespace) -> dict:
    """Prints the plan, then builds."""
    if options.synthetic:
        chunks, tokenizer = int(options.synthetic), Synthetic()
        sources = synthetic_sources(chunks, options.shards, options.chunk_len)
        options.vocab = tokenizer.vocab_size
    else:
        paths = (
            [Path(p) for pattern in options.files for p in sorted(glob(pattern, recursive=True))]
            if options.files
            else standard_library()
        )
        if len(paths) < options.shards:
            raise SystemExit(
                f"build: {len(paths)} files for {options.shards} shards; name more files, or fewer --shards"
            )
        tokenizer = _tokenizer(options.out / "tokenizer.json", paths, options.vocab)
        sources = file_sources(paths, options.shards)
        chunks = estimated_chunks(paths, tokenizer, options.chunk_len)
    show_plan(options, chunks)
    searched = None if options.searched is None else int(options.searched)
    with _executor(options) as executor:
        report = build(
            options.out,
            recipe_of(options, chunks),
            sources,
            tokenizer,
            executor=executor,
            searched=searched,
            cluster=_cluster_workers(options),
            device=options.device,
        )
    print(
        f"{report['documents']:,} documents, {report['chunks']:,} chunks, {report['disk'] / 1e6:.1f} MB on disk; "
        f"recall {report['recall']}"
    )
    return report


def run_all(options: Namespace) -> None:
    """Builds on a Dask cluster of two processes here, then trains two processes."""
    if not options.cluster and not options.workers:
        options.cluster = "2"
    run_build(options)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    done = subprocess.run(
        [*command, "-m", "retro_model", "scale", "train", str(options.out), "--sequence", "2"], env=environment
    )
    if done.returncode:
        raise SystemExit(done.returncode)


def _cluster_workers(options: Namespace) -> int:
    """Processes of a Dask cluster; 0: there is none. Of one that runs already: the cores that the plan is for."""
    if not options.cluster:
        return 0
    return int(options.cluster) if options.cluster.isdigit() else options.machines * options.cores


def estimated_chunks(paths: list[Path], tokenizer: Tokenizer, chunk_len: int) -> int:
    """Estimate for all files from a sample of them."""
    sample = paths[:: max(1, len(paths) // SAMPLED)]
    lengths = [len(ids) for ids in tokenizer.encode_batch([d.content for d in file_documents(sample)])]
    found, read = (sum(-(-n // chunk_len) for n in lengths), sum(p.stat().st_size for p in sample))
    return max(1, sum(p.stat().st_size for p in paths) * found // max(1, read))


def _tokenizer(path: Path, paths: list[Path], vocab_size: int) -> Tokenizer:
    """Trained once, on files from the whole list."""
    if not path.exists():
        sample = paths[:: max(1, len(paths) // TRAINED_ON)]
        Tokenizer.train((d.content for d in file_documents(sample)), vocab_size).save(path)
    return Tokenizer.load(path)


@contextlib.contextmanager
def _executor(options: Namespace) -> Iterator[Executor | None]:
    if options.workers:
        with executors.pool(options.workers, devices=torch.cuda.device_count() * (options.device == "cuda")) as pool:
            yield pool
    elif options.cluster:
        warnings.filterwarnings("ignore", message="Sending large graph")  # the embedder's counts go with each task
        try:
            import distributed

            here = options.cluster.isdigit()
            opened = executors.cluster(int(options.cluster)) if here else distributed.Client(options.cluster)
            with opened as cluster:
                yield cluster if here else cluster.get_executor()
        except ImportError as error:
            raise SystemExit(f"--cluster: {error}; pip install 'retro-kernels[cluster]'") from error
    else:
        yield None
