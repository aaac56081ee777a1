"""Measure everything that a user can do with a decoder and texts, on the same held-out documents.

Each contender gets its bits per byte, the difference from the decoder alone with its interval over documents, the same
numbers with the control's neighbours, and its cost. Scores are saved, so a stopped command continues when it is called
again.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from retro_kernels import info
from retro_model import evaluation

from ..neighbours.options import TFIDF
from ..retrofit import texts
from ..retrofit.options import SIZES, Fit, Sizes
from ..retrofit.prefix import TOKENS as CHOICE_TOKENS
from ..retrofit.prepared import check_positive, decoder_folder, prepare, show_line
from . import questions as asked
from . import results as record
from .contenders import MAKERS, OWN, RETRIEVE_NOTHING, TRAINED, Setting, decoder_tokens
from .options import CONTENDERS, parser

GROUP = 8  # documents between two points from which a stopped run continues


def run(setting: Setting, names: list[str], documents: int, random_documents: int) -> None:
    """Score the first held-out documents by each contender. Reuse the scores of the same settings in the folder.

    random_documents: number of documents that are scored with the control's neighbours too.
    """
    (setting.folder / "scores").mkdir(parents=True, exist_ok=True)
    for name in names:
        result = _kept(setting, name) or record.Result.empty(setting.library.held_out, _settings(setting, name))
        wanted = {"true": documents, "random": 0 if name in RETRIEVE_NOTHING else random_documents}
        if any(result.facts["documents"][which] < count for which, count in wanted.items()):
            setting.show(CONTENDERS[name])
            _score(setting, name, result, wanted)
            if name == "alone" and len(names) > 1:
                tokens = {n: decoder_tokens(setting, n, documents, random_documents) for n in names}
                choice = CHOICE_TOKENS * any("+prefix" in n for n in names)
                seconds = result.facts["cpu_seconds"]["true"] * (sum(tokens.values()) + choice) / tokens["alone"]
                setting.show(f"  all {len(names)} contenders: about {max(1, round(seconds / 60))} CPU minutes")
            gc.collect()


def _path(setting: Setting, name: str) -> Path:
    return setting.folder / "scores" / f"{name}-{setting.fit.seed}.npz"


def _settings(setting: Setting, name: str) -> dict:
    """Return the settings that a contender's scores depend on."""
    made = {"plan": dataclasses.asdict(setting.sizes)}
    if name in TRAINED:
        made["fit"] = dataclasses.asdict(setting.fit)
    if name in OWN:
        made["layers"] = setting.layers and list(setting.layers)
    if "+prefix" in name:
        made["prefix"] = list(setting.prefix)
    if name == "knn":
        made["datastore_tokens"] = setting.datastore_tokens
    return made


def _kept(setting: Setting, name: str) -> record.Result | None:
    """Return a contender's scores in the folder, if they have the same settings."""
    path = _path(setting, name)
    result = record.Result.load(path) if path.exists() else None
    return result if result and result.facts["of"] == _settings(setting, name) else None


def _score(setting: Setting, name: str, result: record.Result, wanted: dict[str, int]) -> None:
    """Continue where `result` ends. Save it after each group of documents."""
    library, done = setting.library, result.facts["documents"]
    with record.Cost() as making:
        contender = MAKERS[name](setting)
    result.facts.setdefault("made", {"making_cpu_seconds": making.cpu_seconds} | contender.made)
    random = evaluation.exchanged_neighbours(setting.near, library.held_out, library.database, setting.fit.seed)
    for which, near in (("true", setting.near), ("random", random)):
        given = near if contender.far is None else np.where(contender.far, -1, near)
        for first in range(done[which], wanted[which], GROUP):
            group = range(first, min(first + GROUP, wanted[which]))
            before = dict(contender.seconds)
            if contender.encode is not None:
                distinct = np.setdiff1d(given[np.isin(library.held_out.chunk_doc, group)], -1)
                neighbours = torch.as_tensor(library.database.values(distinct)[0])  # [S,R]
                with record.Cost() as reading:
                    count = contender.encode(neighbours)
                result.add_reading(which, len(neighbours), count, reading)
            with record.Cost() as cost:
                scores = contender.score(given, group)
            result.add(which, scores, cost, {part: s - before[part] for part, s in contender.seconds.items()})
            done[which] = group.stop
            result.save(_path(setting, name))
            spent = result.facts["cpu_seconds"][which]
            setting.show(f"  {which} neighbours: {group.stop} of {wanted[which]} documents, {spent:.0f} CPU seconds")


def write(setting: Setting, title: str, command: str) -> None:
    """Write compare.json, compare.md and compare.png from all scores in the folder. Print a table."""
    from rich.console import Console

    results = {name: _kept(setting, name) for name in CONTENDERS}
    results = {name: result for name, result in results.items() if result is not None}
    if "alone" not in results:
        return
    library = setting.library
    nearest = library.similarity(setting.sizes).max(1)
    rows = record.rows(results, CONTENDERS, library.held_out, library.leakage, nearest)
    made = {
        "command": command,
        "commit": _commit(),
        "corpus": title,
        "seed": setting.fit.seed,
        "plan": dataclasses.asdict(setting.sizes),
        "library": library.facts,
        "contenders": rows,
        "machine": info.lines()[:2],
        "torch_threads": torch.get_num_threads(),
    }
    (setting.folder / "compare.json").write_text(json.dumps(made, indent=1, default=float) + "\n")
    record.draw([made], setting.folder)
    Console().print(record.table(rows, title))
    setting.show(f"compare.json, compare.md (all columns) and compare.png are in {setting.folder}")


def _commit() -> str | None:
    """Return the commit of the code, or None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=12", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(arguments)
    sizes = Sizes(**{name: getattr(options, name) for name in SIZES})
    command = shlex.join(["retro-model", "compare", *arguments])
    try:
        if options.records:
            record.draw([json.loads(path.read_text()) for path in options.records], options.out)
            return
        check_positive(sizes)
        texts.check_results_folder(options.out, options.texts)
        if options.questions:
            if options.texts is None:
                raise ValueError("--texts: expected the folder of the notes with --questions; got none")
            rows = asked.read_questions(options.questions)
            answering = (decoder_folder(options.decoder, show_line), rows, options.texts, options.out, sizes)
            encoder = None if options.encoder == TFIDF else options.encoder
            facts = {"command": command, "commit": _commit(), "machine": info.lines()[:2]}
            print(asked.markdown(asked.run(*answering, encoder, facts, show_line, options.gates)), end="", flush=True)
            return
        how = {"text_field": options.text_field, "strict": options.strict, "show": show_line}
        title, documents = texts.load(options.texts, **how)
        library, held = texts.divide(documents, sizes.held_out, sizes.held_bytes, sizes.database_bytes, show_line)
        print(f"{title}: {len(documents):,} documents", flush=True)
        decoder = decoder_folder(options.decoder, show_line)
        prepared = prepare(options.out, decoder, library, held, sizes, show_line)
        how = Fit(steps=options.steps, max_lr=options.lr, windows=options.windows, seed=options.seed)
        layers, states = options.layers and tuple(options.layers), options.out / "states"
        kept = {"layers": layers, "states": states if options.keep_states else None, "show": show_line}
        setting = Setting(decoder, prepared, sizes, how, options.out, options.datastore_tokens, **kept)
        torch.manual_seed(options.seed)
        most = len(prepared.held_out.documents)
        documents = min(most, options.documents or most)
        run(setting, options.contenders, documents, min(documents, options.random_documents or most))
    except (FileNotFoundError, ImportError, RuntimeError, ValueError) as error:
        sys.exit(f"retro-model compare: {error}")
    write(setting, title, command)
