"""Megatron-LM's tokenised data, PREFIX.bin and PREFIX.idx, as documents that a store is written from.

The index: b"MMIDIDX\\0\\0", version (uint64, 1), type of the tokens (uint8), sequences and documents + 1 (uint64 each),
lengths of the sequences (int32), their places in the .bin in bytes (int64), and the first sequence of each document
(int64). All little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from retro_model.base import disk

from ..data.documents import Document

MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
HEADER = struct.Struct("<9sQBQQ")
TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16}


def read_megatron(prefix: str | Path, *, group: str | None = None, end: int | None = None) -> Iterator[Document]:
    """The documents of PREFIX.bin and PREFIX.idx in order, as token ids, named by their numbers.

        store = build_store(folder, read_megatron("wiki_text_document", end=tokenizer.eos_token_id), tokenizer)

    Args:
        prefix: of the two paths.
        group: of all documents; None: the prefix's last part.
        end: a token that closes each document (`--append-eod`) and is left out; None: nothing is.

    Raises:
        FileNotFoundError, ValueError: naming the file, before the first document.
    """
    index, tokens = (Path(f"{prefix}.{suffix}") for suffix in ("idx", "bin"))
    lengths, places, firsts, dtype = _read_index(index)
    with disk.open_plain(tokens, "rb") as handle:
        size = handle.seek(0, 2)
    last = size - lengths.astype(np.int64) * dtype.itemsize  # where each may begin; a sum could pass 2**63
    if (places < 0).any() or (places > last).any():
        raise ValueError(f"{tokens}: expected the sequences of {index.name}, which end beyond it; it has {size} bytes")
    return _documents(
        np.memmap(tokens, np.uint8, "r") if size else np.zeros(0, np.uint8),
        lengths,
        places,
        firsts,
        dtype,
        end,
        group or index.stem,
    )


def _documents(data, lengths, places, firsts, dtype, end, group) -> Iterator[Document]:
    for number, (first, last) in enumerate(zip(firsts[:-1].tolist(), firsts[1:].tolist())):
        parts = [
            data[p : p + n * dtype.itemsize].view(dtype)
            for p, n in zip(places[first:last].tolist(), lengths[first:last].tolist())
        ]
        ids = np.concatenate(parts) if parts else np.zeros(0, dtype)
        if end is not None and len(ids) and ids[-1] == end:
            ids = ids[:-1]
        yield Document(str(number), group, ids)


def _read_index(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.dtype]:
    """Lengths and places of the sequences, first sequence of each document (and the end), type of a token."""
    raw = disk.read_plain(path)
    if len(raw) < HEADER.size or raw[:9] != MAGIC:
        raise ValueError(f"{path}: expected Megatron's index, which begins with {MAGIC!r}; got {raw[:9]!r}")
    _, version, code, sequences, bounds = HEADER.unpack_from(raw)
    if version != VERSION:
        raise ValueError(f"{path}: expected version {VERSION}; got {version}")
    if code not in TYPES or np.dtype(TYPES[code]).kind not in "iu":
        raise ValueError(f"{path}: expected integer tokens (a type from 1 to 5, or 8); got type {code}")
    need = HEADER.size + 12 * sequences + 8 * bounds
    if len(raw) < need:
        raise ValueError(
            f"{path}: expected {need} bytes for {sequences} sequences and {bounds} bounds of documents; got {len(raw)}"
        )
    lengths = np.frombuffer(raw, "<i4", sequences, HEADER.size)
    places = np.frombuffer(raw, "<i8", sequences, HEADER.size + 4 * sequences)
    firsts = np.frombuffer(raw, "<i8", bounds, HEADER.size + 12 * sequences)
    if (lengths < 0).any() or not bounds or firsts[0] != 0 or firsts[-1] != sequences or (np.diff(firsts) < 0).any():
        raise ValueError(f"{path}: corrupt (its documents are not its {sequences} sequences in order)")
    return lengths, places, firsts, np.dtype(TYPES[code]).newbyteorder("<")
