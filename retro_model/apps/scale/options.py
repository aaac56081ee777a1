"""Options of `retro-model scale`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

ABOUT = """Plan, build and train past one machine.

retro-model scale OUT             # all of it here: the standard library, a Dask cluster of two, two processes
retro-model scale plan --chunks 1e9 --machines 32 --cores 64
retro-model scale build OUT --files 'text/**/*.txt' --shards 64 --cluster tcp://scheduler:8786
torchrun --standalone --nproc-per-node 8 -m retro_model scale train OUT
"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="retro-model scale", description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = made.add_subparsers(dest="command", required=True)
    for name in ("plan", "build", "all"):
        command = commands.add_parser(name)
        if name == "plan":
            command.add_argument("--chunks", type=float, help="size of the text in chunks of 64 tokens")
            command.add_argument(
                "--documents", type=float, help="size of the text in documents of --chunks-a-document each"
            )
            command.add_argument("--chunks-a-document", type=float, default=20)
            command.add_argument(
                "--synthetic", type=float, help="plan for so many chunks of random tokens instead of text"
            )
        else:
            command.add_argument("out", type=Path)
            command.add_argument(
                "--files", nargs="*", help="patterns of text files, a document each; none: Python's standard library"
            )
            command.add_argument(
                "--synthetic", type=float, help="build from so many chunks of random tokens instead of files"
            )
            command.add_argument("--workers", type=int, default=0, help="processes of a pool on this machine")
            command.add_argument("--device", default="cpu", help="search on this device; cuda: one GPU a worker")
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
    training_options(commands.add_parser("train"))
    return made


def training_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, help="the folder of a build; gets `checkpoint`")
    parser.add_argument("--preset", help="sizes of the paper's Table 2; else a tiny model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--window", type=int, default=256, help="tokens a sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences a step, of all processes")
    parser.add_argument("--k", type=int, default=2, help="neighbours a chunk")
    parser.add_argument("--sequence", type=int, default=1, help="processes that share a sequence")
    parser.add_argument("--tensor", type=int, default=1, help="processes that share the heads")
    parser.add_argument("--exchange", choices=("gather", "ring"), default="gather")
    parser.add_argument("--save-every", type=int, default=0, help="steps; 0: at the end")
    parser.add_argument("--workers", type=int, default=1, help="processes that read ahead, of each process; 0: none")
