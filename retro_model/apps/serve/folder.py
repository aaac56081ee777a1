"""A model folder: a trained model, its tokeniser, held-out texts and its database. `model.json` names them."""

from __future__ import annotations

import functools
import shutil
from dataclasses import dataclass
from pathlib import Path

from retro_model import checkpoint
from retro_model.base import checks, disk
from retro_model.data.store import build_store

from .symbols import Symbols

MANIFEST, FORM = "model.json", 1
MOST_PASSAGES = 1000  # largest `neighbours` and `passage_chunks`: an untrusted folder could ask for any memory
SYMBOLS = "symbols.json"  # in place of tokenizer.json, for made-up texts
#: kind -> the parts that its folder must have
PARTS = dict.fromkeys(("retro", "retrofit"), ("model", "tokenizer", "held_out", "store", "keys", "embedder"))
PARTS |= dict.fromkeys(("rpt", "mosaics"), ("model", "tokenizer", "held_out"))
#: names of the parts that `demo` and `retrofit` make alike
LIBRARY = {"held_out": "validation", "keys": "embeddings", "embedder": "embedder.npz"}


def _figures(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a list of objects of numbers, each with document and first_chunk."""
    for passage in value if isinstance(value, list) else [None]:
        if not isinstance(passage, dict) or not {"document", "first_chunk"} <= passage.keys():
            raise ValueError(f"{name}: expected objects with document and first_chunk; got {passage!r}")
        for figure, number in passage.items():
            checks.number(f"{name}: {figure}", number)


_count = functools.partial(checks.integer, low=1, high=MOST_PASSAGES)
#: fact that a reader computes with -> its check
FACTS = {"bos": checks.flag, "least_similarity": checks.number, "passages": _figures}
FACTS |= {"neighbours": _count, "passage_chunks": _count}


@dataclass(frozen=True)
class ModelFolder:
    """Contents of `model.json`.

    parts: part -> its name within the folder. window: tokens read at once. facts: figures to show, `passages` with
    their bits per byte, `bos` (whether texts begin with BOS), `neighbours` (K in training).
    """

    path: Path
    kind: str
    title: str
    parts: dict[str, str]
    window: int
    facts: dict

    def part(self, name: str) -> Path:
        """Return the path of a part."""
        return self.path / self.parts[name]


def describe(folder: Path, kind: str, title: str, parts: dict[str, str], window: int, facts: dict) -> None:
    """Write `model.json` for parts that are in the folder already. Raises: ValueError naming a missing part."""
    made = ModelFolder(folder, kind, title, parts, window, facts)
    if lacking := [name for name in PARTS[kind] if name not in parts or not made.part(name).exists()]:
        raise ValueError(f"{folder}: expected {', '.join(PARTS[kind])} of a {kind} model; {lacking[0]} is missing")
    said = {"form": FORM, "kind": kind, "title": title, "parts": parts, "window": window, "facts": facts}
    disk.write_json(folder / MANIFEST, said)


def keep(
    folder: Path, kind: str, title: str, model, tokenizer, held_out, *, chunk_len: int, window: int, bos: bool
) -> None:
    """Write the model folder of a model without a database (RPT, Memory Mosaics), replacing an earlier one.

    tokenizer: a `Tokenizer` or `Symbols`. held_out: documents, see `build_store`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = SYMBOLS if isinstance(tokenizer, Symbols) else "tokenizer.json"
    tokenizer.save(folder / vocabulary)
    checkpoint.save(folder / "model", model)
    shutil.rmtree(folder / "held-out", ignore_errors=True)
    store = build_store(folder / "held-out", held_out, tokenizer, chunk_len=chunk_len, bos=bos)
    parts = {"model": "model", "tokenizer": vocabulary, "held_out": store.folder.name}
    describe(folder, kind, title, parts, window, {"bos": bos})


def read(folder: str | Path) -> ModelFolder:
    """Read `model.json` of a folder. Raises: FileNotFoundError, ValueError naming the file."""
    path = Path(folder) / MANIFEST
    if not path.exists():
        raise FileNotFoundError(f"{path}: no model folder; `retro-model demo --out {folder}` writes one")
    with disk.open_plain(path, "rb") as file:
        try:
            said = disk.read_json(file.read())
            kinds = {"form": int, "kind": str, "title": str, "parts": dict, "window": int, "facts": dict}
            if not isinstance(said, dict) or [type(said.get(name)) for name in kinds] != list(kinds.values()):
                raise ValueError(f"expected {', '.join(kinds)}")
            if said["form"] != FORM or said["kind"] not in PARTS or said["window"] < 1:
                wanted = f"expected form {FORM}, a kind of {', '.join(PARTS)} and a window"
                raise ValueError(f"{wanted}; got {said['form']}, {said['kind']!r}")
            for name in PARTS[said["kind"]]:
                part = said["parts"].get(name)  # of something directly in the folder
                if not isinstance(part, str) or part in ("", ".", "..") or Path(part).name != part:
                    raise ValueError(f"{name}: expected the name of a file or folder beside it; got {part!r}")
            for name, check in FACTS.items():
                if name in said["facts"]:
                    check(name, said["facts"][name])
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: corrupt ({error})") from None
    made = ModelFolder(Path(folder), said["kind"], said["title"], said["parts"], said["window"], said["facts"])
    for name in PARTS[made.kind]:
        if not made.part(name).exists():
            raise FileNotFoundError(f"{made.part(name)}: {path} names it as {name}, but it is missing")
    return made
