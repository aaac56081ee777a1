"""The documents of a library, and which of them are held out."""

from __future__ import annotations

import gzip
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from retro_model.apps.demo.corpus import digest, first_bytes, sources
from retro_model.data.store import Document

from .roff import text_of

SUFFIXES = (".txt", ".md", ".py", ".rst")
MANUAL = Path("/usr/share/man")
LEAST = 1000  # characters: shorter texts hold little beside their title
MANY = 100  # manual pages that make a library


def read(texts: Path | None, most: int) -> tuple[str, list[Document]]:
    """Return a title and the documents of a folder. None: the machine's manual pages, or where it has few, the sources
    of Python's standard library.

    most: characters of the library. Manual pages are read up to twice as many.
    Raises: FileNotFoundError for a folder that is not there.
    """
    if texts is None:
        pages = list(manual_pages(MANUAL, 2 * most))
        if len(pages) >= MANY:
            return "manual pages", pages
        return "Python's standard library", list(sources(Path(sysconfig.get_path("stdlib"))))
    if not texts.is_dir():
        raise FileNotFoundError(f"{texts}: expected a folder of text files; there is none")
    paths = sorted(p for p in texts.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    names = [p.relative_to(texts).as_posix() for p in paths]
    every = [Document(name, name, path.read_text("utf-8", "replace")) for name, path in zip(names, paths)]
    return texts.name, [document for document in every if document.content.strip()]


def manual_pages(root: Path, most: int | None = None) -> Iterator[Document]:
    """Yield the pages below a folder of man*/NAME.SECTION.gz as text, in a fixed random order, until they have `most`
    characters."""
    total = 0
    for path in sorted(root.glob("man*/*"), key=lambda p: digest(p.name)):
        if most is not None and total > most:
            return
        if path.is_symlink() or not path.is_file():  # a second name of a page
            continue
        data = path.read_bytes()
        page = text_of((gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8", "replace"))
        if len(page) >= LEAST:
            name = path.name.removesuffix(".gz")
            total += len(page)
            yield Document(name, name, page)


def divide(
    documents: list[Document], held_out: int, held_bytes: int, database_bytes: int
) -> tuple[list[Document], list[Document]]:
    """Divide documents into the library's and the held-out ones, drawn by the digests of their names.

    held_out: documents, at most a fifth of all. held_bytes: characters of each that are kept, see `excerpt`.
    database_bytes: of the library, at most; a document that does not fit is left out.
    Raises: ValueError for too few documents.
    """
    drawn = sorted(documents, key=lambda d: digest(d.name))
    long = [d for d in drawn if len(d.content) >= min(held_bytes, LEAST)] or drawn
    held = long[: min(held_out, len(drawn) // 5)]
    names = {d.name for d in held}
    library = first_bytes([d for d in drawn if d.name not in names], database_bytes)
    if not held or not library:
        wanted = f"at least five files of {', '.join(SUFFIXES)}, within the sizes"
        raise ValueError(f"texts: expected {wanted}; got {len(documents)}")
    return library, [Document(d.name, d.group, excerpt(d, held_bytes)) for d in held]


def excerpt(document: Document, most: int) -> str:
    """Return at most `most` characters, from the beginning of a line that the digest of the document's name draws.

    Beginnings of documents resemble each other more than the rest does: scores of these alone would flatter retrieval.
    """
    spare = max(0, len(document.content) - most)
    drawn = int.from_bytes(digest(document.name)[-8:]) % (spare + 1)
    first = document.content.rfind("\n", 0, drawn) + 1
    return document.content[first : first + most]
