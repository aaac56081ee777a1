"""Measure everything that a user can do with a decoder and texts, on the same held-out documents.

Each contender gets its bits per byte, the difference from the decoder alone with its interval over documents, the same
numbers with the control's neighbours, and its CPU time. Scores are saved, so a stopped command continues with the next
contender when it is called again.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import shlex
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import torch

from retro_kernels import info
from retro_model import evaluation

from .. import options as parsers
from ..options import CONTENDERS
from ..retrofit import texts
from ..retrofit.prepared import check_positive, decoder_folder, prepare, show_line
from . import questions
from . import results as record
from .contenders import MAKERS, Setting


def result_of(setting: Setting, name: str) -> record.Result:
    """Return a contender's scores. They are read from the folder if it has scores of the same settings."""
    path = setting.folder / "scores" / f"{name}-{setting.seed}.npz"
    settings = dataclasses.asdict(setting.sizes) | {"documents": setting.documents, "steps": setting.steps}
    if path.exists() and (kept := record.Result.load(path)).facts["of"] == settings:
        return kept
    setting.show(CONTENDERS[name])
    library, contender = setting.library, MAKERS[name](setting)
    given = {"true": contender.near}
    if contender.near is not None:
        neighbours = (contender.near, library.held_out, library.database, setting.seed)
        given["random"] = evaluation.exchanged_neighbours(*neighbours)
    scores, seconds = {}, {}
    for which, near in given.items():
        began = time.process_time()
        scores[which] = contender.score(near)
        seconds[which] = round(time.process_time() - began, 2)
        setting.show(f"  {which} neighbours: {setting.documents} documents, {seconds[which]:.0f} CPU seconds")
    facts = {"of": settings, "made": contender.made, "cpu_seconds": seconds}
    result = record.Result(scores["true"], scores.get("random"), facts)
    path.parent.mkdir(parents=True, exist_ok=True)
    result.save(path)
    del contender
    gc.collect()
    return result


def write(setting: Setting, results: dict[str, record.Result], title: str, facts: dict) -> None:
    """Write compare.json and compare.md. Print the table."""
    library = setting.library
    made = facts | {
        "corpus": title,
        "seed": setting.seed,
        "sizes": dataclasses.asdict(setting.sizes),
        "library": library.facts,
        "contenders": record.rows(results, CONTENDERS, library.held_out, library.leakage),
        "torch_threads": torch.get_num_threads(),
    }
    (setting.folder / "compare.json").write_text(json.dumps(made, indent=1) + "\n")
    (setting.folder / "compare.md").write_text(record.markdown(made))
    setting.show(record.markdown(made))
    setting.show(f"compare.json and compare.md are in {setting.folder}")


def facts_of(arguments: list[str]) -> dict:
    """Return the command, the machine and the commit of the code, or None outside a checkout."""
    describe = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=12", "--dirty"]
    try:
        commit = subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = None
    command = shlex.join(["retro-model", "compare", *arguments])
    return {"command": command, "commit": commit, "machine": info.lines()[:2]}


def run(options: Namespace, sizes: parsers.Sizes, facts: dict) -> None:
    """Score the contenders. Raises: FileNotFoundError, ImportError, RuntimeError, ValueError naming the fault."""
    reading = {"text_field": options.text_field, "strict": options.strict, "show": show_line}
    title, documents = texts.load(options.texts, **reading)
    rest, held = texts.divide(documents, sizes.held_out, sizes.held_bytes, sizes.database_bytes, show_line)
    show_line(f"{title}: {len(documents):,} documents")
    decoder = decoder_folder(options.decoder, show_line)
    library = prepare(options.out, decoder, rest, held, sizes, show_line)
    count = min(len(held), options.documents or len(held))
    setting = Setting(decoder, library, sizes, options.out, count, options.steps, options.seed)
    names = [name for name in CONTENDERS if name == "alone" or name in options.contenders]
    write(setting, {name: result_of(setting, name) for name in names}, title, facts)


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parsers.compare().parse_args(arguments)
    facts = facts_of(arguments)
    try:
        # In-context retrieval computes a window again for every chunk, so all contenders have a stride of one chunk:
        # each of them but `longer` then sees the same text of its own.
        sizes = parsers.sizes_of(options, held_bytes=options.held_bytes, stride=options.chunk_len)
        check_positive(sizes)
        texts.check_results_folder(options.out, options.texts)
        if options.questions is None:
            return run(options, sizes, facts)
        if options.texts is None:
            raise ValueError("--texts: expected the folder of the notes with --questions; got none")
        rows = questions.read_questions(options.questions)
        decoder = decoder_folder(options.decoder, show_line)
        found = questions.run(decoder, rows, options.texts, options.out, sizes, options.encoder, facts, options.gates)
        show_line(questions.markdown(found))
    except (FileNotFoundError, ImportError, RuntimeError, ValueError) as error:
        sys.exit(f"retro-model compare: {error}")
