"""TokenStore: documents as rows of M tokens on disk, memory-mapped; its writer continues after a kill.

A document fills ceil(tokens / M) rows; its last row is padded with `PAD`. Files in the folder: tokens.bin [chunks,M],
lengths.bin, chunk_doc.bin, chunk_bytes.bin [chunks], documents.jsonl (one line a document), store.json.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from retro_model.base import checks, disk

from . import files
from .documents import Document, as_documents
from .hub import as_encoder
from .tokens import BOS, PAD, Encoder

MANIFEST = "store.json"
COLUMNS = {"lengths": np.int32, "chunk_doc": np.int64, "chunk_bytes": np.int64}
NAMES = ("tokens.bin", *(f"{name}.bin" for name in COLUMNS), "documents.jsonl")
COUNTS = ("documents", "chunks", "tokens", "bytes")
ENCODED_AT_ONCE = 64  # documents


FORM = files.Form("token store", NAMES, COUNTS)


class Entry(NamedTuple):
    """Entry of a document in a store. Its rows are first_chunk .. first_chunk + num_chunks - 1."""

    name: str
    group: str
    first_chunk: int
    num_chunks: int
    num_tokens: int
    num_bytes: int


class TokenStore:
    """Reader of a store: arrays over all chunks, memory-mapped and read-only.

    Attributes:
        tokens: [num_chunks,M], uint16 or uint32.
        lengths: [num_chunks], real tokens of each chunk.
        chunk_doc: [num_chunks], number of each chunk's document.
        chunk_bytes: [num_chunks], UTF-8 bytes behind each chunk's tokens.
        documents: list of Entry.
        chunk_len, vocab_size, num_chunks, num_tokens, num_bytes, tokenizer_name: sizes and names.
        bos_id: the tokenizer's BOS; None: it has none.
        identity: hash of all content.

    Args:
        folder: output folder of `build_store`.
        verify: compare checksums, which reads everything; sizes are always compared.

    Raises: FileNotFoundError, ValueError naming the file that is missing, truncated, corrupt or unfinished.
    """

    def __init__(self, folder: str | Path, *, verify: bool = True) -> None:
        self.folder = Path(folder)
        manifest = files.read_manifest(self.folder / MANIFEST, FORM, complete=True)
        files.check_files(self.folder / MANIFEST, manifest, verify=verify)
        settings, facts = manifest["settings"], manifest["facts"]
        self.chunk_len, self.vocab_size = settings.get("chunk_len"), settings.get("vocab_size")
        if not all(type(size) is int and size >= 1 for size in (self.chunk_len, self.vocab_size)):
            raise ValueError(f"{self.folder / MANIFEST}: the manifest is corrupt (its settings are {settings})")
        self.tokenizer_name, self.bos_id = settings.get("tokenizer"), settings.get("bos_id", BOS)
        self.num_chunks, self.num_tokens, self.num_bytes = facts["chunks"], facts["tokens"], facts["bytes"]
        content = json.dumps([settings, manifest["files"]], sort_keys=True)
        self.identity = hashlib.sha256(content.encode()).hexdigest()[:16]
        shape = (self.num_chunks, self.chunk_len)
        self.tokens = files.mapped(self.folder / "tokens.bin", _token_type(self.vocab_size), shape)
        self.lengths, self.chunk_doc, self.chunk_bytes = (
            files.mapped(self.folder / f"{name}.bin", dtype, shape[:1]) for name, dtype in COLUMNS.items()
        )
        records = _read_records(self.folder / "documents.jsonl")
        first_chunks = accumulate((rows for _, _, rows, *_ in records), initial=0)
        self.documents = [
            Entry(name, group, first, rows, tokens, count)
            for (name, group, rows, tokens, count, _), first in zip(records, first_chunks)
        ]
        whole = [sum(column) for column in zip(*(entry[3:] for entry in self.documents))] or [0, 0, 0]
        for name, got in zip(COUNTS, (len(self.documents), *whole)):
            if got != facts[name]:
                want = f"{facts[name]} {name} as in {MANIFEST}"
                raise ValueError(f"{self.folder / 'documents.jsonl'}: expected {want}; got {got}")

    def __len__(self) -> int:
        return self.num_chunks

    def __reduce__(self):
        return functools.partial(type(self), self.folder, verify=False), ()  # another process maps the same files

    def chunks(self, ids) -> np.ndarray:
        """Return rows of tokens, int64 [..., M]."""
        return self.tokens[np.asarray(ids)].astype(np.int64)

    def document_tokens(self, document: int) -> np.ndarray:
        """Return all tokens of a document without its padding, int64."""
        entry = self.documents[document]
        rows = self.tokens[entry.first_chunk : entry.first_chunk + entry.num_chunks]
        return rows.reshape(-1)[: entry.num_tokens].astype(np.int64)

    def stream(self) -> Iterator[Document]:
        """Yield every document as token ids, as input of another store."""
        for number, entry in enumerate(self.documents):
            yield Document(entry.name, entry.group, self.document_tokens(number))


def build_store(
    folder: str | Path,
    documents: Iterable,
    tokenizer,
    *,
    chunk_len: int = 64,
    bos: bool = False,
    text_field: str = "text",
    commit_every: int = 256,
    allow_empty: bool = False,
) -> TokenStore:
    """Write documents to a store. Run again with the same input after a kill, it continues.

    The result is bitwise identical to the result of an uninterrupted run. A second run reads the documents already
    written again and compares their digests; it does not encode them.

    Args:
        folder: output folder.
        documents: (name, group, text or token ids), dicts (rows of `datasets`) or strings, see `as_documents`.
        tokenizer: a `Tokenizer`, another `Encoder`, or any tokenizer of transformers or tokenizers (`HubTokenizer`).
        chunk_len: M, tokens per row.
        bos: prepend the tokenizer's BOS to every document.
        text_field: see `as_documents`.
        commit_every: documents between two commits; a killed run continues from the last commit.
        allow_empty: build a store without documents, as a shard may be.

    Raises: TypeError, ValueError: there are no documents; naming the document that has no tokens, ids outside the
    vocabulary or text that is not UTF-8; the setting or the document in which the folder differs; the corrupt file.
    """
    checks.integer("chunk_len", chunk_len, low=1)
    checks.integer("commit_every", commit_every, low=1)
    tokenizer = as_encoder(tokenizer)
    bos_id = getattr(tokenizer, "bos_id", BOS)
    if bos and bos_id is None:
        raise ValueError(f"bos: expected False for {tokenizer.name}, which has no BOS token; got True")
    settings = {"chunk_len": int(chunk_len), "tokenizer": tokenizer.name, "vocab_size": int(tokenizer.vocab_size)}
    settings |= {"token_type": _token_type(tokenizer.vocab_size), "bos": bos}
    if bos_id != BOS:
        settings["bos_id"] = bos_id
    folder, incoming = Path(folder), as_documents(documents, text_field=text_field)
    if (first := next(incoming, None)) is None and not allow_empty:
        raise ValueError("documents: expected at least one; got none")
    incoming = chain([first] if first else [], incoming)
    with files.Build(folder / MANIFEST, FORM, settings) as build:
        writer = _Writer(build, tokenizer, bos_id if bos else None)
        _skip_written(folder, incoming, build)
        if build.complete:
            if (extra := next(incoming, None)) is not None:
                why = f"the store is complete without document {extra.name!r}"
                raise ValueError(f"{folder}: {why}; delete it or build elsewhere")
        else:
            while group := list(islice(incoming, ENCODED_AT_ONCE)):
                writer.write(group, commit_every)
            build.finish(**writer.facts)
    return TokenStore(folder, verify=False)


class _Writer:
    """Writer that appends documents to the files of a build and counts them."""

    def __init__(self, build: files.Build, tokenizer: Encoder, bos_id: int | None) -> None:
        self.build, self.tokenizer, self.bos_id = build, tokenizer, bos_id
        self.chunk_len, self.token_type = build.settings["chunk_len"], build.settings["token_type"]
        self.byte_lengths = np.asarray(tokenizer.byte_lengths)
        self.facts = build.facts or dict.fromkeys(COUNTS, 0)

    def write(self, documents: list[Document], commit_every: int) -> None:
        digests = [_digest(document) for document in documents]
        texts = [d.content for d in documents if isinstance(d.content, str)]
        encoded = iter(self.tokenizer.encode_batch(texts) if texts else [])
        for document, digest in zip(documents, digests):
            ids = np.asarray(next(encoded) if isinstance(document.content, str) else document.content)
            self._one(document, digest, self._checked(document, ids))
            if self.facts["documents"] % commit_every == 0:
                self.build.commit(**self.facts)

    def _checked(self, document: Document, ids: np.ndarray) -> np.ndarray:
        if not ids.size:
            raise ValueError(f"{_label(document)}: expected at least one token; got none")
        low, high, limit = ids.min(), ids.max(), self.tokenizer.vocab_size
        if low < 0 or high >= limit:
            raise ValueError(f"{_label(document)}: expected token ids below {limit}; got {low} .. {high}")
        ids = ids.astype(np.int64)
        return ids if self.bos_id is None else np.concatenate([[self.bos_id], ids])

    def _one(self, document: Document, digest: str, ids: np.ndarray) -> None:
        rows = -(-len(ids) // self.chunk_len)
        padded = np.full(rows * self.chunk_len, PAD, self.token_type)
        padded[: len(ids)] = ids
        lengths = np.full(rows, self.chunk_len, np.int32)
        lengths[-1] = len(ids) - (rows - 1) * self.chunk_len
        chunk_bytes = np.add.reduceat(self.byte_lengths[ids], np.arange(rows) * self.chunk_len).astype(np.int64)
        owner = np.full(rows, self.facts["documents"], np.int64)
        for name, values in zip(NAMES, (padded, lengths, owner, chunk_bytes)):
            self.build.append(name, values)
        record = [document.name, document.group, rows, len(ids), int(chunk_bytes.sum()), digest]
        self.build.append("documents.jsonl", (json.dumps(record) + "\n").encode())
        self.facts = {name: self.facts[name] + more for name, more in zip(COUNTS, (1, rows, len(ids), record[4]))}


def _skip_written(folder: Path, incoming: Iterator[Document], build: files.Build) -> None:
    """Skip the documents that a build already holds. Raise ValueError unless they are the same."""
    facts = build.facts
    if not facts:
        return
    for number, record in enumerate(_read_records(folder / "documents.jsonl")[: facts["documents"]]):
        document = next(incoming, None)
        if document is None:
            held = f"the store holds {facts['documents']} documents"
            raise ValueError(f"{folder}: {held}; now the input ends after {number}")
        if [document.name, document.group, _digest(document)] != [record[0], record[1], record[5]]:
            was, now = f"{record[0]!r}", f"{document.name!r} or of other content"
            raise ValueError(f"{folder}: document {number} was {was}; now {now}")


def _label(document: Document) -> str:
    """Return the words by which errors name a document."""
    return document.place or f"document {document.name!r}"


def _digest(document: Document) -> str:
    content = document.content
    if isinstance(content, str):
        return hashlib.sha256(b"text" + content.encode()).hexdigest()[:32]
    return hashlib.sha256(b"ids" + content.astype(np.int64).tobytes()).hexdigest()[:32]


def _read_records(path: Path) -> list[list]:
    """Read the lines of documents.jsonl: name, group, rows, tokens, bytes, digest."""
    with disk.open_plain(path) as lines:
        try:
            records = [disk.read_json(line) for line in lines]
            for record in records:
                typed = [type(value) for value in record] == [str, str, int, int, int, str]
                if not typed or min(record[2:4]) < 1 or record[4] < 0:
                    raise ValueError(f"{record} is no document")
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: corrupt ({error})") from None
    return records


def _token_type(vocab_size: int) -> str:
    return "uint16" if vocab_size <= 2**16 else "uint32"
