"""Everything a user could do with a decoder and texts, measured on the same held-out documents.

    retro-model compare DECODER --texts DIR --out compare-out

Alone, with longer windows, neighbours in its context, kNN-LM, RETRO's new layers, its own attention: bits per byte,
the difference with its interval over documents, the same with random neighbours, and what it costs. A contender that is
scored is kept: stopped and called again, the command goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import shlex
import sys
from pathlib import Path

import torch

from retro_kernels import info
from retro_model import evaluation

from . import record, texts
from .contenders import CONTENDERS, Setting
from .fitting import Fit
from .library import Plan, prepare


def run(
    setting: Setting, names: list[str], random_documents: int | None = None, show=print
) -> dict[str, record.Result]:
    """Scores of the contenders; those that the folder has from the same settings are read.

    random_documents: held-out documents that are scored with random neighbours too; None: all.
    """
    library, found = setting.library, {}
    few = None if random_documents is None else range(min(random_documents, len(library.held_out.documents)))
    (setting.folder / "scores").mkdir(parents=True, exist_ok=True)
    for name in names:
        path = setting.folder / "scores" / f"{name}-{setting.fit.seed}.npz"
        settings = _settings(setting, random_documents)
        if path.exists() and record.Result.load(path).facts["of"] == settings:
            found[name] = record.Result.load(path)
            continue
        show(f"{CONTENDERS[name].title}")
        found[name] = _score(setting, name, few, settings)
        found[name].save(path)
        facts, bits = found[name].facts, evaluation.bits_per_byte(found[name].scores)
        show(f"  {bits:.4f} bits per byte, {facts['cpu_seconds']:.0f} CPU seconds")
        gc.collect()
    return found


def _settings(setting: Setting, random_documents: int | None) -> dict:
    made = {"plan": dataclasses.asdict(setting.plan), "fit": dataclasses.asdict(setting.fit)}
    return made | {"datastore_tokens": setting.datastore_tokens, "random_documents": random_documents}


def _score(setting: Setting, name: str, few, settings: dict) -> record.Result:
    library, contender = setting.library, CONTENDERS[name]
    with record.Cost() as made:
        score, facts = contender.make(setting)
    with record.Cost() as cost:
        true = score(library.neighbours, None)
    random = None
    if contender.retrieves:
        random = score(evaluation.random_neighbours(library.neighbours, library.database, setting.fit.seed), few)
    spent = {"cpu_seconds": cost.cpu_seconds, "peak_mb": cost.peak_mb, "preparing_cpu_seconds": made.cpu_seconds}
    return record.Result(true, random, {**spent, "training": facts, "of": settings})


def write(setting: Setting, title: str, command: str, show=print) -> dict:
    """The record of all that the folder holds: compare.json, compare.png, and a table on the terminal."""
    from rich.console import Console

    paths = {name: setting.folder / "scores" / f"{name}-{setting.fit.seed}.npz" for name in CONTENDERS}
    results = {name: record.Result.load(path) for name, path in paths.items() if path.exists()}
    if "alone" not in results:
        return {}
    titles = {name: contender.title for name, contender in CONTENDERS.items()}
    rows = record.rows(results, titles, setting.library.held_out, setting.library.leakage)
    for row in rows.values():
        row.pop("of")
    made = {
        "command": command,
        "corpus": title,
        "seed": setting.fit.seed,
        "plan": dataclasses.asdict(setting.plan),
        "library": setting.library.facts,
        "contenders": rows,
        "machine": info.lines()[:2],
        "torch_threads": torch.get_num_threads(),
    }
    (setting.folder / "compare.json").write_text(json.dumps(made, indent=1, default=float) + "\n")
    record.plot({title: rows}, setting.folder / "compare.png")
    Console(width=200).print(record.table(rows, title))
    show(f"compare.json and compare.png lie in {setting.folder}")
    return made


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="retro-model compare", description=__doc__.split("\n\n")[0])
    parser.add_argument("decoder", type=Path, help="folder of a causal language model and its tokeniser")
    parser.add_argument("--texts", type=Path, metavar="DIR", help="text files; default: manual pages of this machine")
    parser.add_argument("--out", type=Path, default=Path("compare-out"), help="default: compare-out")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME",
                        help=f"of {', '.join(CONTENDERS)}; default: all")  # fmt: skip
    for field in dataclasses.fields(Plan):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    parser.add_argument("--random-documents", type=int, help="scored with random neighbours too; default: all")
    parser.add_argument("--steps", type=int, default=Fit.steps, help="of what trains")
    parser.add_argument("--lr", type=float, default=Fit.max_lr)
    parser.add_argument("--datastore-tokens", type=int, default=Setting.datastore_tokens, help="of kNN-LM")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    plan = Plan(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Plan)})
    try:
        title, documents = texts.read(options.texts, plan.database_bytes)
        library, held = texts.divide(documents, plan.held_out, plan.held_bytes, plan.database_bytes)
        print(f"{title}: {len(documents):,} documents", flush=True)
        prepared = prepare(options.out, options.decoder, library, held, plan, _show)
        setting = Setting(
            options.decoder,
            prepared,
            plan,
            Fit(steps=options.steps, max_lr=options.lr, seed=options.seed),
            options.out,
            options.datastore_tokens,
            _show,
        )
        torch.manual_seed(options.seed)
        run(setting, options.contenders, options.random_documents, _show)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"retro-model compare: {error}")
    write(setting, title, shlex.join(["retro-model", "compare", *(arguments or sys.argv[1:])]), _show)


def _show(line: str) -> None:
    print(line, flush=True)  # also where the output goes to a file


if __name__ == "__main__":
    main()
