"""Options of `retro-model serve` and `ask`."""

from __future__ import annotations

import argparse

HOST = "127.0.0.1"
FIRST_PORT = 8765
SERVES = "Serve a page on this machine that shows the passages a trained model looks up, and their gain."
ABOUT = (
    "Show in the terminal the passages that a trained model looks up, and their gain. Without a prompt the model reads "
    "a held-out text; it continues a prompt with retrieval and without."
)
FOLDER = "a model folder, written by retro-model demo, retrofit, rpt cards or mosaics text"
DEVICE = "cpu (default) or cuda"


def serve() -> argparse.ArgumentParser:
    """Return the parser of `retro-model serve`."""
    made = argparse.ArgumentParser(prog="retro-model serve", description=SERVES)
    made.add_argument("folder", help=FOLDER)
    made.add_argument("--port", type=int, help=f"on {HOST} (default: the first free one from {FIRST_PORT} on)")
    made.add_argument("--device", default="cpu", help=DEVICE)
    made.add_argument("--no-browser", action="store_true", help="print the address and open no browser")
    return made


def ask() -> argparse.ArgumentParser:
    """Return the parser of `retro-model ask`."""
    made = argparse.ArgumentParser(prog="retro-model ask", description=ABOUT)
    made.add_argument("folder", help=FOLDER)
    made.add_argument("prompt", nargs="?", help="continue this text (default: read a held-out text; -: standard input)")
    made.add_argument(
        "--passage", type=int, help="number of the held-out text (default: the one that retrieval helps most)"
    )
    made.add_argument("-k", type=int, help="neighbours of a chunk")
    made.add_argument("--question", action="store_true", help="ask the prompt as a question")
    made.add_argument("--off", action="store_true", help="turn retrieval off")
    made.add_argument("--tokens", type=int, default=64, help="tokens to write (default: 64)")
    made.add_argument(
        "--temperature", type=float, default=0.7, help="temperature of sampling; 0: greedy (default: 0.7)"
    )
    made.add_argument("--seed", type=int, default=0, help="of sampling (default: 0)")
    made.add_argument(
        "--forget",
        action="append",
        default=[],
        metavar="NAME",
        help="leave a document out of the library; may be repeated",
    )
    made.add_argument(
        "--add", action="append", default=[], metavar="FILE", help="add a file to the library; may be repeated"
    )
    made.add_argument("--device", default="cpu", help=DEVICE)
    return made
