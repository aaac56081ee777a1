"""Documents of files: plain text, PDF, JSON lines, JSON and parquet, as they are or compressed.

All commands read users' texts with this module. It reads each file once, whatever links lead to the file, and names
each file, line or row that it cannot read. It leaves out copies of earlier documents, because every chunk of a copy
would have itself as its nearest neighbour.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import hashlib
import json
import lzma
import os
import re
import shlex
import stat
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
COMPRESSED: dict[str, Callable] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
DECOMPRESSORS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz"}
JSON, PARQUET, PDF = ".json", ".parquet", ".pdf"
ROWS = (".jsonl", ".ndjson", JSON, PARQUET)
SHOWN = 20  # messages of `LeftOut.report`, and names in a message
CONTROLS = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f]")  # characters that texts do not hold
LEAST_PER_CONTROL = 8  # characters of a text per such character
BYTE_ORDER_MARKS = {
    b"\xef\xbb\xbf": "utf-8-sig",
    b"\xff\xfe\0\0": "utf-32",
    b"\0\0\xfe\xff": "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
}


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
        if self.unreadable:
            more = len(self.unreadable) - SHOWN
            lines = [*map(printable, self.unreadable[:SHOWN]), *([f"and {more:,} more"] if more > 0 else [])]
            text = "\n  ".join([f"not readable, and left out ({len(self.unreadable):,}):", *lines])
            if strict:
                raise ValueError(f"texts: expected files that can be read; got some that are {text}")
            say(text)
        if self.copies:
            say(f"copies of earlier documents, left out ({len(self.copies):,}): {_listed(self.copies)}")
        if self.empty:
            say(f"files without text ({len(self.empty):,}): {_listed(self.empty)}")
        if self.others:
            kinds = [f"{suffix or 'no suffix'} ({count:,})" for suffix, count in self.others.most_common()]
            hint = "; convert HTML first, as with pandoc -t plain" * bool(self.others.keys() & {".html", ".htm"})
            say(f"files of other kinds, not read ({self.others.total():,}): {_listed(kinds)}{hint}")

    def _unreadable(self, place: str, error: Exception) -> None:
        self.unreadable.append(str(error))
        self.places.add(place)


def _listed(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join([*map(printable, names[:SHOWN]), *([f"and {more:,} more"] if more > 0 else [])])


def find_texts(
    where: Iterable[str | Path], *, leave: Collection[str] = (), left_out: LeftOut | None = None
) -> list[Path]:
    """Return the files that are named, match a pattern with * or **, or lie in a folder and have one of `SUFFIXES`.

    A file with several names (links to it, or to a folder above it) is returned once, by a name without links if it has
    one. Links that form a loop are followed once.

    Args:
        where: names of files and folders, and patterns.
        leave: names of files and folders to leave out.
        left_out: receives the links to nothing, the folders that cannot be opened and the files of other kinds;
            None: the first of these links or folders raises an error.

    Returns: paths sorted within each entry of `where`.
    Raises: FileNotFoundError: an entry matches no file. ValueError naming the link or the folder.
    """
    reports = LeftOut() if left_out is None else left_out
    found: dict[tuple[int, int], Path] = {}
    for entry in where:
        folder, count = Path(entry).is_dir(), 0
        names = _files_below(Path(entry), True, reports) if folder else _matches(str(entry), reports)
        for path in sorted({*names}):
            if {*path.parts} & {*leave} or path.is_dir():
                continue
            count += 1
            try:
                status = path.stat()
            except OSError as error:
                reports._unreadable(str(path), _failed(path, error))
                continue
            if folder and kind_of(path)[0] not in SUFFIXES:
                reports.others[path.suffix] += 1
            elif not stat.S_ISREG(status.st_mode):
                reports._unreadable(str(path), ValueError(f"{path}: expected a regular file; got a device or a pipe"))
            else:
                key = status.st_dev, status.st_ino
                if key not in found or (_through_link(found[key]) and not _through_link(path)):
                    found[key] = path
        if not count and not folder:
            raise FileNotFoundError(f"documents: expected files; got none for {entry}")
    if left_out is None and reports.unreadable:
        raise ValueError(reports.unreadable[0])
    return list(found.values())


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

    A row of `.jsonl`, `.ndjson`, `.json` (one value, or one value per line) or `.parquet` is a document, named by the
    digest of its content. Any other file is one document, named by its path; pypdf reads `.pdf`. `.gz`, `.bz2` and
    `.xz` are decompressed first. Text is UTF-8, or what the file's byte order mark says; the mark is dropped. Suffixes
    are compared without regard to case.

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
                if kind_of(path)[0] in ROWS:
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
    """Iterate over the places and rows of a file of JSON lines, JSON or parquet, see `read_texts`.

    Raises: ValueError naming the file and the line or row that is not an object.
    """
    path = Path(path)
    if kind_of(path)[0] not in ROWS:
        raise ValueError(f"{path}: expected a file of rows ({', '.join(ROWS)}); got another suffix")
    for place, row in _rows(path):
        if isinstance(row, Exception):
            raise row
        if not isinstance(row, dict):
            raise ValueError(f"{place}: expected an object; got {type(row).__name__}")
        yield place, row


def kind_of(path: Path) -> tuple[str, str]:
    """Return the suffix of a file's content and the suffix of its compression ("" for none), in lower case."""
    suffix = path.suffix.lower()
    return (Path(path.stem).suffix.lower(), suffix) if suffix in COMPRESSED else (suffix, "")


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
    suffix, compression = kind_of(path)
    place = str(path)
    try:
        with COMPRESSED.get(compression, open)(path, "rb") as file:
            if suffix == PARQUET:
                rows = _parquet_rows(path, file, column)
            elif suffix == JSON and not _is_lines(file):
                rows = _json_rows(path, file)
            elif suffix in ROWS:
                rows = _lines(path, file)
            elif suffix == PDF:
                rows = iter([(place, _pdf_text(path, file))])
            else:
                rows = iter([(place, _text(file.read(), path).replace("\r\n", "\n").replace("\r", "\n"))])
            for place, row in rows:
                yield place, row
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        failed = _failed(path, error)
    except ValueError as error:
        failed = error
    else:
        return
    yield f"{place}, and the rest" if place != str(path) else place, failed


def _text(data: bytes, path: Path) -> str:
    """Return the text of a file. Raises: ValueError naming a file that is not a text."""
    text = _decoded(data, path)
    if sign := binary_sign(text):
        raise ValueError(f"{path}: expected text; got {sign}; leave it out, or convert it")
    return text


def binary_sign(text: str) -> str | None:
    """Return why a decoded file is not a text, or None."""
    if text.startswith("%PDF-"):
        return "a PDF"
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
    """Yield the JSON values of the lines that are not empty."""
    marked = _encoding(file.peek(1024)[:1024], str(path), path) != "utf-8-sig"
    lines = _decoded(file.read(), path).split("\n") if marked else file
    for number, line in enumerate(lines, 1):
        if line.strip():
            place = f"{path}, line {number}"
            try:
                yield place, _json((line if isinstance(line, str) else _decoded(line, path, place)).strip(), place)
            except ValueError as error:
                yield place, error


def _is_lines(file: Any) -> bool:
    """Whether the first line with a value is JSON, and an object or a string: the file then has a value per line."""
    first = next((line for line in file if line.strip()), b"")
    file.seek(0)
    try:
        return isinstance(disk.read_json(first.decode("utf-8-sig")), (dict, str))
    except ValueError:
        return False


def _json_rows(path: Path, file: Any) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a file that is one JSON value: a list of rows, or one row."""
    value = _json(_decoded(file.read(), path), str(path))
    for number, row in enumerate(value if isinstance(value, list) else [value]):
        yield f"{path}, row {number}", row


def _json(text: str, place: str) -> Any:
    try:
        return disk.read_json(text)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"{place}: expected JSON; got {error.msg} at {at}") from None
    except ValueError as error:
        raise ValueError(f"{place}: expected JSON; got a value that cannot be read: {error}") from None


def _parquet_rows(path: Path, file: Any, column: str | None) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ValueError(f"{path}: expected pyarrow, which reads parquet; {error}; pip install pyarrow") from None
    try:
        table = ParquetFile(file)
        names, number = table.schema_arrow.names, 0
        batches = table.iter_batches(columns=column and [column]) if column in (None, *names) else ()
        for batch in batches:
            for row in batch.to_pylist():
                yield f"{path}, row {number}", row
                number += 1
    except (OSError, ArrowException) as error:
        raise ValueError(f"{path}: expected a parquet file; got {error}") from None
    if column not in (None, *names):
        raise ValueError(f"text_field: expected a field of the rows; got {column!r}, {path} has {', '.join(names)}")


def _encoding(start: bytes, place: str, path: Path) -> str:
    """Return the encoding that a byte order mark says; UTF-8 without one. Raises: ValueError for bytes of no text."""
    marked = next((name for mark, name in BYTE_ORDER_MARKS.items() if start.startswith(mark)), None)
    if marked or b"\0" not in start:
        return marked or "utf-8-sig"
    for name in ("UTF-32LE", "UTF-32BE"):
        text = start[: len(start) // 4 * 4].decode(name, "replace")
        if text and not {"\0", "\ufffd"} & {*text}:
            got = f"NUL bytes, as in {name} without a byte order mark"
            raise ValueError(f"{place}: expected UTF-8; got {got}; {_convert(path, name)}")
    even, odd = start[::2].count(0), start[1::2].count(0)
    if max(even, odd) < max(len(start) // 4, 2 * min(even, odd)):
        raise ValueError(f"{place}: expected text; got NUL bytes, as in a binary file; leave it out, or convert it")
    got = "NUL bytes, as in UTF-16 without a byte order mark"
    raise ValueError(f"{place}: expected UTF-8; got {got}; {_convert(path, 'UTF-16LE' if odd > even else 'UTF-16BE')}")


def _decoded(data: bytes, path: Path, place: str | None = None) -> str:
    """Return the text of a file or, if a place is given, of a line. Raises: ValueError naming the place."""
    encoding = _encoding(data, place or str(path), path)
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        name = {"utf-8-sig": "UTF-8"}.get(encoding, f"{encoding.upper()}, which its byte order mark says")
        at = f"{path}, line {data.count(10, 0, error.start) + 1}" if place is None else place
        got = f"the byte 0x{data[error.start]:02x}"
        raise ValueError(f"{at}: expected {name}; got {got}; {_convert(path, 'ISO-8859-1')}") from None


def _convert(path: Path, encoding: str) -> str:
    name, convert = shlex.quote(str(path)), f"iconv -f {encoding} -t UTF-8"
    if program := DECOMPRESSORS.get(kind_of(path)[1]):
        return f"convert it, for example: {program} -dc {name} | {convert} > NEW_FILE"
    return f"convert it, for example: {convert} {name} > NEW_FILE"


def _failed(path: Path, error: Exception) -> ValueError:
    """Return the error of a file that cannot be opened, followed or decompressed."""
    return ValueError(f"{path}: expected a file that can be read; got {getattr(error, 'strerror', None) or error}")


def _through_link(path: Path) -> bool:
    return os.path.realpath(path) != os.path.abspath(path)


def _folders(top: Path, hidden: bool, reports: LeftOut) -> Iterator[tuple[Path, list[os.DirEntry]]]:
    """Yield the sorted entries of a folder and of the folders below it, each folder once. Links are followed last."""
    waiting, links, seen = [top], [], set()
    while waiting or links:
        folder = (waiting or links).pop(0)
        try:
            status = folder.stat()
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            reports._unreadable(str(folder), _failed(folder, error))
            continue
        entries = [entry for entry in entries if hidden or not entry.name.startswith(".")]
        for entry in entries:
            if os.path.isdir(entry.path):
                (links if entry.is_symlink() else waiting).append(Path(entry.path))
        yield folder, entries


def _files_below(top: Path, hidden: bool, reports: LeftOut) -> Iterator[Path]:
    for _, entries in _folders(top, hidden, reports):
        yield from (Path(entry.path) for entry in entries if not os.path.isdir(entry.path))


def _matches(pattern: str, reports: LeftOut) -> Iterator[Path]:
    """Yield the files that a pattern matches, as `glob.glob(pattern, recursive=True)`, which links in a loop hang."""
    parts = Path(pattern).parts
    if os.path.lexists(pattern) or "**" not in parts:
        yield from [Path(pattern)] if os.path.lexists(pattern) else map(Path, glob.glob(pattern))
        return
    at = parts.index("**")
    for top in glob.glob(os.path.join(*parts[:at])) if at else ["."]:
        if at + 1 == len(parts):
            yield from _files_below(Path(top), False, reports)
            continue
        for folder, _ in _folders(Path(top), False, reports):
            yield from _matches(os.path.join(glob.escape(str(folder)), *parts[at + 1 :]), reports)
