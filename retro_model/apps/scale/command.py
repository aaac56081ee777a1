"""`retro-model scale`: plan, build and train past one machine.

retro-model scale OUT             # all of it here: the standard library, a Dask cluster of two, two processes
retro-model scale plan --chunks 1e9 --machines 32 --cores 64
retro-model scale build OUT --files 'text/**/*.txt' --shards 64 --cluster tcp://scheduler:8786
torchrun --standalone --nproc-per-node 8 -m retro_model scale train OUT
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import Executor
from glob import glob
from pathlib import Path

import torch

from retro_model.data import executors
from retro_model.data.tokens import Tokenizer

from . import plan as planning
from . import train as training
from .build import build
from .recipe import Recipe, Synthetic, file_documents, file_sources, standard_library, synthetic_sources

MANY = 10**9  # chunks: a database of the papers' size, in one more line of every plan
# Of Dask's workers. Its default also has malloc give each array's memory back to the system: keys took 1.7x the time.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), 1)
TRAINED_ON, SAMPLED = 400, 64  # files that the tokeniser learns from, and by which the chunks are estimated


def main(arguments: list[str]) -> None:
    """Runs the sub-command; without one, all of it into a folder."""
    if arguments and arguments[0] not in ("plan", "build", "train", "-h", "--help"):
        arguments = ["all", *arguments]
    options = parser().parse_args(arguments)
    {"plan": show_plan, "build": run_build, "train": training.main, "all": run_all}[options.command](options)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="retro-model scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = made.add_subparsers(dest="command", required=True)
    for name in ("plan", "build", "all"):
        command = commands.add_parser(name)
        if name == "plan":
            command.add_argument("--chunks", type=float, help="of 64 tokens of text")
            command.add_argument("--documents", type=float, help="in place of --chunks, of --chunks-a-document each")
            command.add_argument("--chunks-a-document", type=float, default=20)
            command.add_argument("--synthetic", type=float, help="in place of --chunks: random tokens, not text")
        else:
            command.add_argument("out", type=Path)
            command.add_argument(
                "--files", nargs="*", help="patterns of text files, a document each; none: Python's standard library"
            )
            command.add_argument(
                "--synthetic", type=float, help="in place of files: so many chunks of random tokens, for measuring"
            )
            command.add_argument("--workers", type=int, default=0, help="processes of a pool on this machine")
            command.add_argument("--device", default="cpu", help="where it searches; cuda: a GPU a worker of the pool")
        command.add_argument(
            "--cluster", help="a Dask scheduler's address, or a number: a cluster of so many processes here"
        )
        command.add_argument("--shards", type=int, default=8)
        command.add_argument("--chunk-len", type=int, default=64)
        command.add_argument("--vocab", type=int, default=8192)
        command.add_argument("--dim", type=int, default=128)
        command.add_argument("--key-type", default="float16")
        command.add_argument("--index", help="a FAISS factory string; none: one that suits the number of chunks")
        command.add_argument("--nprobe", type=int)
        command.add_argument("--k", type=int, default=4)
        command.add_argument("--searched", type=float, help="chunks whose neighbours are searched; none: all")
        command.add_argument("--machines", type=int, default=1)
        command.add_argument("--cores", type=int, default=os.cpu_count())
        command.add_argument("--rates", type=Path, help="report.json of an earlier build on such machines")
    training.arguments_of(commands.add_parser("train"))
    return made


def recipe_of(options: argparse.Namespace, chunks: int) -> Recipe:
    text = not getattr(options, "synthetic", None)
    recipe = Recipe(options.chunk_len, options.vocab, options.dim, options.key_type, k=options.k, text=text).for_chunks(
        chunks
    )
    changes = {"index": options.index, "nprobe": options.nprobe}
    return Recipe(**{**vars(recipe), **{name: value for name, value in changes.items() if value is not None}})


def show_plan(options: argparse.Namespace, chunks: int | None = None) -> None:
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


def run_build(options: argparse.Namespace) -> dict:
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


def run_all(options: argparse.Namespace) -> None:
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


def _cluster_workers(options: argparse.Namespace) -> int:
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
def _executor(options: argparse.Namespace) -> Iterator[Executor | None]:
    if options.workers:
        with executors.pool(options.workers, devices=torch.cuda.device_count() * (options.device == "cuda")) as pool:
            yield pool
    elif options.cluster:
        try:
            import dask
            import distributed
        except ImportError as error:
            raise SystemExit("--cluster needs Dask: pip install 'retro-kernels[cluster]'") from error
        warnings.filterwarnings("ignore", message="Sending large graph")  # the embedder's counts go with each task
        with contextlib.ExitStack() as stack:
            address = options.cluster
            if address.isdigit():
                stack.enter_context(dask.config.set({"distributed.nanny.pre-spawn-environ": ONE_THREAD}))
                sizes = {"n_workers": int(address), "threads_per_worker": 1, "processes": True}
                address = stack.enter_context(distributed.LocalCluster(**sizes, dashboard_address=None))
            yield stack.enter_context(distributed.Client(address)).get_executor()
    else:
        yield None
