"""The documents of a library, and the choice of held-out documents."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from retro_model.data.store import Document
from retro_model.data.text_files import SUFFIXES, LeftOut, find_texts, read_texts
from retro_model.evaluation.outcome import LEAST_DOCUMENTS

LEAST = 1000  # characters; shorter texts hold little more than their title
TABLES = ("pydoc_data", "test/encoded_modules", "test/cjkencodings")  # help texts and encoded data, not programs
RESULTS = ("validation", "all", "notes")  # one of them is in a folder of results from the beginning


def check_results_folder(folder: Path, texts: Path | None) -> None:
    """Refuse a folder for results whose files would become documents, or that holds files of something else.

    Raises: FileNotFoundError for missing texts. ValueError.
    """
    if texts is not None and not texts.is_dir():
        raise FileNotFoundError(f"{texts}: expected a folder of text files; there is none")
    if texts is not None and folder.resolve().is_relative_to(texts.resolve()):
        raise ValueError(f"--out {folder}: expected a folder outside of --texts {texts}, or its files become documents")
    if folder.is_dir() and any(folder.iterdir()) and not any((folder / name).exists() for name in RESULTS):
        raise ValueError(
            f"--out {folder}: expected a new or empty folder, or earlier results; got a folder of other files"
        )
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder}: expected a folder; got a file")


def load(
    texts: Path | None, *, text_field: str = "text", strict: bool = False, show: Callable[[str], None] = print
) -> tuple[str, list[Document]]:
    """Return a title and the documents of a folder.

    texts: the folder. None: the sources of Python's standard library. text_field: see `read_texts`. strict: stop if
    something cannot be read. show: called with messages about everything that is left out.

    Raises: FileNotFoundError for a missing folder. ValueError: see `LeftOut.report`.
    """
    if texts is None:
        return "Python's standard library", list(sources(Path(sysconfig.get_path("stdlib"))))
    left_out = LeftOut()
    paths = find_texts([texts], left_out=left_out)
    every = list(read_texts(paths, text_field=text_field, root=texts, left_out=left_out))
    left_out.report(show, strict=strict)
    return texts.name, [document._replace(group=document.name) for document in every]


def digest(name: str) -> bytes:
    """Return the digest of a name. Sorting by digests puts documents into a fixed random order."""
    return hashlib.sha256(name.encode()).digest()


def sources(root: Path) -> Iterator[Document]:
    """Iterate over the sources below `root`, without site-packages and tables, in a fixed random order.

    The library's tests hold files in many encodings on purpose. Files that are not UTF-8 are left out.
    """
    paths = [p for p in root.rglob("*.py") if not {"site-packages", "dist-packages"} & {*p.parts}]
    paths = [p for p in paths if not p.relative_to(root).as_posix().startswith(TABLES)]
    paths.sort(key=lambda path: digest(path.relative_to(root).as_posix()))
    for document in read_texts(paths, root=root, left_out=LeftOut()):
        yield document._replace(group=document.name.removesuffix(".py").split("/")[0])


def first_bytes(documents: list[Document], limit: int) -> list[Document]:
    """Return the first documents that together hold at most `limit` characters, passing over any that does not fit."""
    taken, total = [], 0
    for document in documents:
        if total + len(document.content) <= limit:
            taken.append(document)
            total += len(document.content)
    return taken


def is_small(documents: list[Document]) -> bool:
    """Whether documents are too few to measure a gain: a fifth of them would give no interval."""
    return len(documents) // 5 < LEAST_DOCUMENTS


def divide(
    documents: list[Document],
    held_out: int,
    held_bytes: int,
    database_bytes: int,
    show: Callable[[str], None] = print,
) -> tuple[list[Document], list[Document]]:
    """Divide documents into the library's documents and held-out documents, by the digests of their names.

    held_out: number of held-out documents; at most a fifth of all documents are held out. held_bytes: characters that
    are kept of each, see `excerpt`. database_bytes: largest number of characters in the library; a document that does
    not fit is left out. show: called with the number of documents that are left out.

    Raises: ValueError for too few documents.
    """
    drawn = sorted(documents, key=lambda d: digest(d.name))
    long = [d for d in drawn if len(d.content) >= min(held_bytes, LEAST)] or drawn
    held = long[: min(held_out, len(drawn) // 5)]
    names = {d.name for d in held}
    library = first_bytes([d for d in drawn if d.name not in names], database_bytes)
    if bool(held) is not bool(held_out) or not library:
        least = "at least five files" if held_out else "at least one file"
        wanted = f"{least} of {', '.join(SUFFIXES)}, of at most {database_bytes:,} characters (--database-bytes)"
        raise ValueError(f"texts: expected {wanted}; got {len(documents)}")
    if left := len(drawn) - len(held) - len(library):
        limit = f"beyond its {database_bytes:,} characters (--database-bytes)"
        show(f"{left:,} documents are left out of the library, {limit}")
    return library, [Document(d.name, d.group, excerpt(d, held_bytes)) for d in held]


def excerpt(document: Document, most: int) -> str:
    """Return at most `most` characters from the beginning of a line, which the digest of the document's name chooses.

    Beginnings of documents resemble each other more than the rest does, so scores of beginnings alone would
    overestimate the gain of retrieval.
    """
    spare = max(0, len(document.content) - most)
    drawn = int.from_bytes(digest(document.name)[-8:]) % (spare + 1)
    first = document.content.rfind("\n", 0, drawn) + 1
    return document.content[first : first + most]
