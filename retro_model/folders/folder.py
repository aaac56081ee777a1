"""A model folder: a trained model, its tokeniser, held-out texts and its database. `model.json` names them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from retro_model.base import checks, disk

MANIFEST, FORM = "model.json", 1
MOST_PASSAGES = 1000  # largest `neighbours` and `passage_chunks`: an untrusted folder could ask for any memory
KINDS = ("retro", "retrofit")
PARTS = ("model", "tokenizer", "held_out", "store", "keys", "embedder")  # of every folder
#: names of the parts that have the same name in every folder
LIBRARY = {"held_out": "validation", "keys": "embeddings", "embedder": "embedder.npz"}


_count = functools.partial(checks.integer, low=1, high=MOST_PASSAGES)
#: fact that a reader computes with -> its check
FACTS = {"bos": checks.flag, "least_similarity": checks.number, "neighbours": _count, "passage_chunks": _count}


@dataclass(frozen=True)
class ModelFolder:
    """Contents of `model.json`.

    parts: part -> its name within the folder. window: tokens read at once. facts: sentences to show, `bos` (whether
    texts begin with BOS), `neighbours` (K in training).
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
    if lacking := [name for name in PARTS if name not in parts or not made.part(name).exists()]:
        raise ValueError(f"{folder}: expected {', '.join(PARTS)} of a {kind} model; {lacking[0]} is missing")
    said = {"form": FORM, "kind": kind, "title": title, "parts": parts, "window": window, "facts": facts}
    disk.write_json(folder / MANIFEST, said)


def load(folder: str | Path) -> ModelFolder:
    """Read `model.json` of a folder. Raises: FileNotFoundError, ValueError naming the file."""
    path = Path(folder) / MANIFEST
    if not path.exists():
        raise FileNotFoundError(f"{path}: expected a model folder, such as `retro-model retrofit` writes; got none")
    with disk.open_plain(path, "rb") as file:
        try:
            said = disk.read_json(file.read())
            kinds = {"form": int, "kind": str, "title": str, "parts": dict, "window": int, "facts": dict}
            if not isinstance(said, dict) or [type(said.get(name)) for name in kinds] != list(kinds.values()):
                raise ValueError(f"expected {', '.join(kinds)}")
            if said["form"] != FORM or said["kind"] not in KINDS or said["window"] < 1:
                wanted = f"expected form {FORM}, a kind of {', '.join(KINDS)} and a window"
                raise ValueError(f"{wanted}; got {said['form']}, {said['kind']!r}")
            for name in PARTS:
                part = said["parts"].get(name)  # of something directly in the folder
                if not isinstance(part, str) or part in ("", ".", "..") or Path(part).name != part:
                    raise ValueError(f"{name}: expected the name of a file or folder beside it; got {part!r}")
            for name, check in FACTS.items():
                if name in said["facts"]:
                    check(name, said["facts"][name])
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: corrupt ({error})") from None
    made = ModelFolder(Path(folder), said["kind"], said["title"], said["parts"], said["window"], said["facts"])
    for name in PARTS:
        if not made.part(name).exists():
            raise FileNotFoundError(f"{made.part(name)}: {path} names it as {name}, but it is missing")
    return made
