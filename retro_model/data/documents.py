"""Convert rows of a data set or plain strings to the documents that a store is written from."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np


class Document(NamedTuple):
    """Document of a store: text, or token ids [any integer type].

    place: where the document was read, such as "rows.jsonl, line 3", for errors; "" if only its name is known.
    """

    name: str
    group: str
    content: str | np.ndarray
    place: str = ""


def as_documents(rows: Iterable, *, text_field: str = "text") -> Iterator[Document]:
    """Convert rows to documents. A row is a dict (of `datasets` or JSON lines), a string or (name, group, content).

        articles = datasets.load_dataset("json", data_files="articles.jsonl", split="train")
        as_documents(articles, text_field="body")

    A dict or a string is named by a digest of its content, so the name is the same in every store: neighbours from a
    sequence's own document are excluded by name. A second row with the same content gets another name.

    Args:
        rows: read once.
        text_field: field of a dict that holds its text or its token ids.

    Raises: TypeError, ValueError naming the row and the field.
    """
    if isinstance(rows, (str, bytes, Mapping)):
        raise TypeError(f"documents: expected an iterable of rows (one split of a data set); got {_kind(rows)}")
    seen: dict[str, int] = {}
    for number, row in enumerate(rows):
        document = document_of(row, f"row {number}", text_field)
        if isinstance(row, (str, Mapping)):
            count = seen[document.name] = seen.get(document.name, 0) + 1
            document = document._replace(name=f"{document.name}-{count}") if count > 1 else document
        yield document


def document_of(row: Any, place: str, text_field: str) -> Document:
    """Convert one row, see `as_documents`.

    Raises: TypeError, ValueError naming the place.
    """
    name: str | None = None
    group = ""
    if isinstance(row, tuple) and len(row) in (3, 4):
        name, group, content, known = Document(*row)
        place = known or f"document {name!r}"
    elif isinstance(row, str):
        content = row
    elif isinstance(row, Mapping):
        if text_field not in row:
            has = ", ".join(map(repr, row)) or "none"
            raise ValueError(f"text_field: expected a field of the rows; got {text_field!r}, {place} has {has}")
        content = row[text_field]
        if not isinstance(content, (str, np.ndarray, list)):
            raise TypeError(f"{place}: expected text or token ids in {text_field!r}; got {type(content).__name__}")
    else:
        want = f"a dict with {text_field!r}, a string, or (name, group, content)"
        raise TypeError(f"{place}: expected {want}; got {_kind(row)}")
    if not isinstance(content, str):
        content = _token_ids(content, place)
    elif not content:
        raise ValueError(f"{place}: expected at least one token; got an empty text")
    else:
        try:
            content.encode()
        except UnicodeEncodeError as error:
            got = f"the lone surrogate U+{ord(content[error.start]):04X} as character {error.start + 1}"
            raise ValueError(f"{place}: expected text that UTF-8 can hold; got {got}") from None
    if name is None:
        data = content.encode() if isinstance(content, str) else content.tobytes()
        name = hashlib.sha256(data).hexdigest()[:16]
    return Document(name, group, content, place)


def _token_ids(content: Any, place: str) -> np.ndarray:
    try:
        ids = np.asarray(content)
    except ValueError:
        raise TypeError(f"{place}: expected text or integer token ids; got lists of different lengths") from None
    if ids.size and ids.dtype.kind not in "iu":
        raise TypeError(f"{place}: expected text or integer token ids; got {ids.dtype}")
    if ids.ndim != 1 or not ids.size:
        raise ValueError(f"{place}: expected at least one token, in one dimension; got shape {list(ids.shape)}")
    return ids


def normal_form(text: str) -> str:
    """Return the text by which copies are recognised.

    Copies often differ in line ends, in spaces at the ends of lines and in the form of Unicode characters, because
    editors and archives change these. The normal form has none of these differences.
    """
    return "\n".join(line.rstrip() for line in unicodedata.normalize("NFKC", text).splitlines()).strip("\n\ufeff")


def _kind(value) -> str:
    if isinstance(value, Mapping) and value and all(hasattr(v, "features") for v in value.values()):
        return f"a {type(value).__name__} of the splits {', '.join(map(repr, value))}"
    return type(value).__name__
