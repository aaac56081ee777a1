"""Convert rows of a data set or plain strings to the documents that a store is written from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np


class Document(NamedTuple):
    """Document of a store: text, or token ids [any integer type]."""

    name: str
    group: str
    content: str | np.ndarray


def as_documents(
    rows: Iterable, *, text_field: str = "text", name_field: str | None = None, group_field: str | None = None
) -> Iterator[Document]:
    """Convert rows to documents. A row is a dict (of `datasets` or JSON lines), a string or (name, group, content).

        articles = datasets.load_dataset("json", data_files="articles.jsonl", split="train")
        as_documents(articles, text_field="body", name_field="url")

    A row without a name is named by a digest of its content, so the name is the same in every store: neighbours from a
    sequence's own document are excluded by name. A second row with the same content gets another name.

    Args:
        rows: read once.
        text_field: field of a dict that holds its text or its token ids.
        name_field, group_field: fields that hold its name and its group; None: a digest as name, no group.

    Raises: TypeError, ValueError naming the row and the field.
    """
    if isinstance(rows, (str, bytes, Mapping)):
        raise TypeError(f"documents: expected an iterable of rows (one split of a data set); got {_kind(rows)}")
    seen: dict[str, int] = {}
    for number, row in enumerate(rows):
        if isinstance(row, str):
            yield _named(row, None, "", seen)
        elif isinstance(row, Mapping):
            content = _field(row, text_field, number, "text_field")
            if not isinstance(content, (str, np.ndarray, list)):
                got = type(content).__name__
                raise TypeError(f"row {number}: expected text or token ids in {text_field!r}; got {got}")
            content = np.asarray(content) if isinstance(content, list) else content
            name = None if name_field is None else str(_field(row, name_field, number, "name_field"))
            group = "" if group_field is None else str(_field(row, group_field, number, "group_field"))
            yield _named(content, name, group, seen)
        elif isinstance(row, tuple) and len(row) == 3:
            yield Document(*row)
        else:
            want = f"a dict with {text_field!r}, a string, or (name, group, content)"
            raise TypeError(f"row {number}: expected {want}; got {_kind(row)}")


def _named(content: str | np.ndarray, name: str | None, group: str, seen: dict[str, int]) -> Document:
    if name is None:
        data = content.encode(errors="surrogatepass") if isinstance(content, str) else content.tobytes()
        name = hashlib.sha256(data).hexdigest()[:16]
        seen[name] = seen.get(name, 0) + 1
        name += f"-{seen[name]}" if seen[name] > 1 else ""
    return Document(name, group, content)


def _field(row: Mapping, field: str, number: int, argument: str) -> Any:
    if field not in row:
        has = ", ".join(map(repr, row)) or "none"
        raise ValueError(f"{argument}: expected a field of the rows; got {field!r}, row {number} has {has}")
    return row[field]


def _kind(value) -> str:
    if isinstance(value, Mapping) and value and all(hasattr(v, "features") for v in value.values()):
        return f"a {type(value).__name__} of the splits {', '.join(map(repr, value))}"
    return type(value).__name__
