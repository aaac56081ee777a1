"""Documents of files: plain text, PDF, JSON lines and parquet, as they are or compressed by gzip.

All commands read users' texts with this module. It reads each file once, whatever links lead to the file, and names
each file, line or row that it cannot read. It leaves out copies of earlier documents, because every chunk of a copy
would have itself as its nearest neighbour.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retro_model.base import disk
from retro_model.base.progress import printable

from .documents import Document, document_of, normal_form

#: Suffixes of the files that are read of a folder. A file that is named or matched by a pattern may have any suffix.
SUFFIXES = (".txt", ".md", ".py", ".rst", ".jsonl", ".ndjson", ".parquet", ".pdf")
LINES, PARQUET, PDF, GZIP = (".jsonl", ".ndjson", ".json"), ".parquet", ".pdf", ".gz"
ROWS = (*LINES, PARQUET)
SHOWN = 20  # messages of `LeftOut.report`, and names in a message
CONTROLS = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f]")  # characters that texts do not hold
LEAST_PER_CONTROL = 8  # characters of a text per such character
CONVERT = "leave it out, or convert it: iconv -f ISO-8859-1 -t UTF-8 FILE > NEW_FILE (or -f UTF-16LE, UTF-16BE)"


@dataclass
class LeftOut:
    """Everything that a search for files and a reading of them left out.

    unreadable: one message per file, line or row that could not be read. copies: places of documents with the text of
    an earlier document. empty: files without text. others: numbers of files in a folder by their suffix, which is none
    of `SUFFIXES`. places: of the unreadable ones, the copies and the empty ones.
    """

    unreadable: list[str] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)
    places: set[str] = field(default_factory=set)

    def report(self, say: Callable[[str], None], *, strict: bool = False) -> None:
        """Report everything that was left out. strict: raise ValueError with the report if anything was unreadable."""
        between = "\n  "
        if self.unreadable:
            text = f"not readable, and left out ({len(self.unreadable):,}):\n  {_listed(self.unreadable, between)}"
            if strict:
                raise ValueError(f"texts: expected files that can be read; got some that are {text}")
            say(text)
        for what, names in (("copies of earlier documents, left out", self.copies), ("files without text", self.empty)):
            if names:
                say(f"{what} ({len(names):,}): {_listed(names)}")
        if self.others:
            kinds = [f"{suffix or 'no suffix'} ({count:,})" for suffix, count in self.others.most_common()]
            say(f"files of other kinds, not read ({self.others.total():,}): {_listed(kinds)}")

    def _unreadable(self, place: str, error: Exception | str) -> None:
        self.unreadable.append(str(error))
        self.places.add(place)


def _listed(names: list[str], between: str = ", ") -> str:
    more = [f"and {len(names) - SHOWN:,} more"] if len(names) > SHOWN else []
    return between.join([*map(printable, names[:SHOWN]), *more])


def find_texts(where: Iterable[str | Path], *, left_out: LeftOut | None = None) -> list[Path]:
    """Return the files that are named, match a pattern with * or **, or lie in a folder and have one of `SUFFIXES`.

    A file that several links lead to is returned once, and links that form a loop are followed once.

    Args:
        where: names of files and folders, and patterns.
        left_out: receives everything that cannot be read and the files of other kinds; None: the first link to nothing,
            device or pipe raises an error.

    Returns: paths sorted within each entry of `where`.
    Raises: FileNotFoundError: an entry matches no file. ValueError naming the path that cannot be read.
    """
    reports = LeftOut() if left_out is None else left_out
    found: dict[Path, Path] = {}
    for entry in where:
        folder = Path(entry).is_dir()
        names = sorted(_files_below(Path(entry), reports) if folder else _matches(str(entry)))
        for path in names:
            if folder and kind_of(path) not in SUFFIXES:
                reports.others[path.suffix] += 1
            elif not path.is_file():
                reports._unreadable(
                    str(path), f"{path}: expected a regular file; got a broken link, a device or a pipe"
                )
            else:
                found.setdefault(path.resolve(), path)
        if not names and not folder:
            raise FileNotFoundError(f"documents: expected files; got none for {entry}")
    if left_out is None and reports.unreadable:
        raise ValueError(reports.unreadable[0])
    return list(found.values())


def _files_below(top: Path, reports: LeftOut) -> Iterator[Path]:
    """Yield the files of a folder and of the folders below it, each folder once."""

    def failed(error: OSError) -> None:
        reports._unreadable(
            error.filename, f"{error.filename}: expected a folder that can be read; got {error.strerror}"
        )

    seen = set()
    for folder, below, names in os.walk(top, followlinks=True, onerror=failed):
        below.sort()
        if (real := os.path.realpath(folder)) in seen:
            below.clear()
        else:
            seen.add(real)
            yield from (Path(folder, name) for name in names)


def _matches(pattern: str) -> list[Path]:
    """Return the files that a pattern matches. `**` follows no links, and hidden names must be named."""
    path = Path(pattern)
    if os.path.lexists(path):
        return [path]
    found = Path(path.anchor).glob(str(path.relative_to(path.anchor)))
    hidden = lambda name: any(part.startswith(".") for part in {*name.parts} - {*path.parts})  # noqa: E731
    return [name for name in found if not name.is_dir() and not hidden(name)]


def read_texts(
    paths: Iterable[str | Path],
    *,
    text_field: str = "text",
    root: Path | None = None,
    left_out: LeftOut | None = None,
    places: Collection[str] = (),
) -> Iterator[Document]:
    """Iterate over the documents of files.

        left_out = LeftOut()
        documents = list(read_texts(find_texts(["notes", "rows/*.jsonl.gz"]), left_out=left_out))
        left_out.report(print)

    A line of `.jsonl`, `.ndjson` or `.json` and a row of `.parquet` is a document, named by the digest of its content.
    Any other file is one document, named by its path; pypdf reads `.pdf`. `.gz` is decompressed first. Text is UTF-8,
    or UTF-16 if the file's byte order mark says so; the mark is dropped. Suffixes are compared without regard to case.

    Args:
        paths: files, see `find_texts`.
        text_field: field of a row that holds its text.
        root: folder that names of text files are relative to.
        left_out: receives everything that is left out; None: the first file, line or row that cannot be read raises an
            error.
        places: places to leave out without a message: `LeftOut.places` of an earlier reading, of which a second
            reading yields the same documents.

    Raises: ValueError naming the file and the line or row, and how to convert the file.
    """
    reports, seen = LeftOut() if left_out is None else left_out, set()
    for path in map(Path, paths):
        if str(path) in places:
            continue
        for place, row in _rows(path, text_field):
            if place in places:
                continue
            try:
                if isinstance(row, Exception):
                    raise row
                if kind_of(path) in ROWS:
                    document = _row_document(row, place, text_field)
                elif row.strip():
                    document = Document((path.relative_to(root) if root else path).as_posix(), "", row, place)
                else:
                    reports.empty.append(place)
                    reports.places.add(place)
                    continue
            except (TypeError, ValueError) as error:
                if left_out is None:
                    raise
                reports._unreadable(place, error)
                continue
            digest = _digest(document.content)
            if digest in seen:
                reports.copies.append(place)
                reports.places.add(place)
                continue
            seen.add(digest)
            yield document


def read_rows(path: str | Path) -> Iterator[tuple[str, dict]]:
    """Iterate over the places and rows of a file of JSON lines or parquet, see `read_texts`.

    Raises: ValueError naming the file and the line or row that is not an object.
    """
    path = Path(path)
    if kind_of(path) not in ROWS:
        raise ValueError(f"{path}: expected a file of rows ({', '.join(ROWS)}); got another suffix")
    for place, row in _rows(path):
        if isinstance(row, Exception):
            raise row
        if not isinstance(row, dict):
            raise ValueError(f"{place}: expected an object; got {type(row).__name__}")
        yield place, row


def kind_of(path: Path) -> str:
    """Return the suffix of a file's content in lower case, without `.gz`."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix == GZIP else suffix


def _row_document(row: Any, place: str, text_field: str) -> Document:
    """Return the document of a row. Raises: TypeError, ValueError naming the place."""
    document = document_of(row, place, text_field)
    if isinstance(document.content, str) and not document.content.strip():
        raise ValueError(f"{place}: expected text in {text_field!r}; got white space alone")
    return document


def _digest(content: Any) -> bytes:
    """Return the digest by which a copy is recognised."""
    data = normal_form(content).encode() if isinstance(content, str) else content.tobytes()
    return hashlib.sha256(data).digest()[:16]


def _rows(path: Path, column: str | None = None) -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of each row; the text of a file without rows. A failure is yielded as ValueError.

    column: the only column that is read from a parquet file.
    """
    kind, place = kind_of(path), str(path)
    try:
        with gzip.open(path) if path.suffix.lower() == GZIP else open(path, "rb") as file:
            if kind == PARQUET:
                yield from _parquet_rows(path, file, column)
            elif kind in LINES:
                yield from _lines(path, file)
            elif kind == PDF:
                yield place, _pdf_text(path, file)
            else:
                data = file.read()
                encoding = "utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
                yield place, _text(data, place, encoding).replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, EOFError, zlib.error) as error:
        yield f"{path}, the rest", ValueError(f"{path}: expected a file that can be read; got {error}")
    except ValueError as error:
        yield f"{path}, the rest", error


def _text(data: bytes, place: str, encoding: str = "utf-8-sig") -> str:
    """Return the text of a file or a line. Raises: ValueError naming the place, for bytes that are not a text."""
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        line = f", line {data.count(10, 0, error.start) + 1}" if b"\n" in data else ""
        want, got = encoding.removesuffix("-sig").upper(), f"the byte 0x{data[error.start]:02x}"
        raise ValueError(f"{place}{line}: expected {want}; got {got}; {CONVERT}") from None
    if sign := binary_sign(text):
        raise ValueError(f"{place}: expected text; got {sign}; {CONVERT}")
    return text


def binary_sign(text: str) -> str | None:
    """Return why a decoded file is not a text, or None."""
    if text.startswith("%PDF-"):
        return "a PDF"
    if "\0" in text:
        return "NUL bytes, as in a binary file or in UTF-16 without a byte order mark"
    controls = len(CONTROLS.findall(text))
    return f"{controls} control characters" if controls * LEAST_PER_CONTROL > len(text) else None


def _pdf_text(path: Path, file: Any) -> str:
    """Return the text of a PDF's pages. A scan has none, and is a file without text."""
    try:
        from pypdf import PdfReader
        from pypdf.errors import PyPdfError
    except ImportError as error:
        raise ValueError(f"{path}: expected pypdf, which reads PDF; {error}; pip install pypdf") from None
    try:
        return "\n\n".join(page.extract_text() for page in PdfReader(file).pages)
    except (PyPdfError, OSError, RecursionError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected a PDF that can be read; got {error}") from None


def _lines(path: Path, file: Any) -> Iterator[tuple[str, Any]]:
    """Yield the JSON values of the lines that are not empty, and a ValueError for each line that cannot be read."""
    for number, line in enumerate(file, 1):
        if line.strip():
            place = f"{path}, line {number}"
            try:
                yield place, _json(_text(line.strip(), place), place)
            except ValueError as error:
                yield place, error


def _json(text: str, place: str) -> Any:
    try:
        return disk.read_json(text)
    except ValueError as error:
        raise ValueError(f"{place}: expected JSON; got a value that cannot be read: {error}") from None


def _parquet_rows(path: Path, file: Any, column: str | None) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ValueError(f"{path}: expected pyarrow, which reads parquet; {error}; pip install pyarrow") from None
    try:
        table, number = ParquetFile(file), 0
        for batch in table.iter_batches(columns=[column] if column in table.schema_arrow.names else None):
            for row in batch.to_pylist():
                yield f"{path}, row {number}", row
                number += 1
    except (OSError, ArrowException) as error:
        raise ValueError(f"{path}: expected a parquet file; got {error}") from None
