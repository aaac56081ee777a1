"""Options of `retro-reader serve` and `ask`."""

from __future__ import annotations

import argparse

LEAST_MATCH = 0.1  # as `retro_model.folders.reader`, which takes a second to import
HOST, FIRST_PORT = "127.0.0.1", 8765
SERVES = "Serve a page on this machine that shows the passages a trained model looks up, and their gain."
ABOUT = (
    "Show in the terminal the passages that a trained model looks up, and their gain. Without a prompt the model reads "
    "a held-out text; it continues a prompt with retrieval and without."
)
FOLDER = "a model folder, such as retro-model retrofit writes"
DEVICE = "cpu (default) or cuda"


def serve() -> argparse.ArgumentParser:
    """Return the parser of `retro-reader serve`."""
    made = argparse.ArgumentParser(prog="retro-reader serve", description=SERVES)
    made.add_argument("folder", help=FOLDER)
    made.add_argument("--port", type=int, help=f"on {HOST} (default: the first free one from {FIRST_PORT} on)")
    made.add_argument("--device", default="cpu", help=DEVICE)
    made.add_argument("--no-browser", action="store_true", help="print the address and open no browser")
    return made


def ask() -> argparse.ArgumentParser:
    """Return the parser of `retro-reader ask`."""
    made = argparse.ArgumentParser(prog="retro-reader ask", description=ABOUT)
    add, several = made.add_argument, {"action": "append", "default": []}
    add("folder", help=FOLDER)
    add("prompt", nargs="?", help="continue this text (default: read a held-out text; -: standard input)")
    add("--passage", type=int, help="number of the held-out text (default: the one that resembles the library most)")
    add("-k", "--neighbours", type=int, help="neighbours per chunk, or passages per question (default: the folder's)")
    add("--question", action="store_true", help="ask the prompt as a question; the answer is greedy")
    said = f"match with a question below which a passage is not read, from 0 to 1 (default: {LEAST_MATCH})"
    add("--least-match", type=float, default=LEAST_MATCH, help=said)
    add("--off", action="store_true", help="turn retrieval off")
    add("--tokens", type=int, default=64, help="tokens to write (default: 64)")
    add("--temperature", type=float, default=0.7, help="temperature of sampling; 0: greedy (default: 0.7)")
    add("--seed", type=int, default=0, help="of sampling (default: 0)")
    add("--forget", **several, metavar="NAME", help="leave a document out of the library; may be repeated")
    add("--add", **several, metavar="FILE", help="add a file of text or rows to the library; may be repeated")
    add("--device", default="cpu", help=DEVICE)
    return made
