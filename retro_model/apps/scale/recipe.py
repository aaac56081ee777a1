"""Recipe of a sharded database: sizes, and the documents of each shard."""

from __future__ import annotations

import dataclasses
import functools
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from retro_model.data.documents import Document

SYNTHETIC_VOCABULARY, SYNTHETIC_CHUNKS = 32_000, 20  # tokens, chunks a document


@dataclass(frozen=True)
class Recipe:
    """chunk_len: M. dim: width of the keys. index: FAISS factory string; None: exact search. text: whether documents
    are text, which is tokenised, or token ids. key_type, nprobe, k: see `ChunkDatabase` and `precompute_neighbours`."""

    chunk_len: int = 64
    vocab_size: int = 8192
    dim: int = 128
    key_type: str = "float16"
    index: str | None = "OPQ16,IVF1024,PQ16"
    nprobe: int = 32
    k: int = 4
    text: bool = True

    @property
    def lists(self) -> int:
        """Inverted lists of the index; 0 without one."""
        parts = [p for p in (self.index or "").split(",") if p.startswith("IVF")]
        return int(parts[0].removeprefix("IVF").split("_")[0]) if parts else 0

    @property
    def code_bytes(self) -> int:
        """Bytes of a vector in the index."""
        codes = [p for p in (self.index or "").split(",") if p.startswith("PQ")]
        if codes:
            pieces, _, bits = codes[0].removeprefix("PQ").partition("x")
            return -(-int(pieces) * int(bits or 8) // 8)
        return 4 * self.dim if self.index else 0

    def for_chunks(self, chunks: int) -> Recipe:
        """With an index that suits so many chunks: about 4 sqrt(N) lists, a power of two of at most 2**20, of whole
        keys up to 2**18 chunks and of codes of 16 bytes beyond; none for a few thousand."""
        if chunks < 1 << 15:
            return dataclasses.replace(self, index=None)
        lists = min(1 << 20, 1 << round(np.log2(4 * chunks**0.5)))
        if chunks <= 1 << 18:
            return dataclasses.replace(self, index=f"IVF{lists},Flat", nprobe=max(16, lists // 32))
        return dataclasses.replace(self, index=f"OPQ16,IVF{lists},PQ16", nprobe=max(16, lists // 128))


class Synthetic:
    """Documents of token ids without text, for measuring: tokens by
    Zipf's law, a fifth of each document repeated from a common pool.
    """

    name, vocab_size = f"synthetic-{SYNTHETIC_VOCABULARY}", SYNTHETIC_VOCABULARY
    byte_lengths = np.full(SYNTHETIC_VOCABULARY, 4, np.int64)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        raise TypeError("documents: expected token ids; got text")


def synthetic_documents(shard: int, chunks: int, chunk_len: int) -> Iterator[Document]:
    """Documents of one shard of `chunks` chunks: a pure function of the shard's number."""
    pool = _zipf(np.random.default_rng(0), 1 << 16)
    random = np.random.default_rng([1, shard])
    for number in range(0, chunks, SYNTHETIC_CHUNKS):
        tokens = _zipf(random, min(SYNTHETIC_CHUNKS, chunks - number) * chunk_len)
        start = int(random.integers(len(pool) - len(tokens) // 5))
        tokens[: len(tokens) // 5] = pool[start : start + len(tokens) // 5]
        yield Document(f"{shard}-{number}", "synthetic", tokens)


def _zipf(random: np.random.Generator, count: int) -> np.ndarray:
    """Token ids from 2 on, of frequency about 1 / rank."""
    return (2 + (SYNTHETIC_VOCABULARY - 2) ** random.random(count)).astype(np.int64).clip(2, SYNTHETIC_VOCABULARY - 1)


def synthetic_sources(chunks: int, shards: int, chunk_len: int) -> list[Callable[[], Iterator[Document]]]:
    counts = [chunks // shards + (s < chunks % shards) for s in range(shards)]
    return [functools.partial(synthetic_documents, s, count, chunk_len) for s, count in enumerate(counts)]


def standard_library() -> list[Path]:
    """The sources of this Python's standard library, by name."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "pydoc_data", "encoded_modules", "cjkencodings"}
    return sorted(p for p in root.rglob("*.py") if not left_out & set(p.parts))


def file_documents(paths: Sequence[Path]) -> Iterator[Document]:
    """A document a file, those without UTF-8 text left out; its group is the folder it lies in."""
    for path in paths:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            yield Document(f"{path.parent.name}/{path.name}", path.parent.name, text)


def file_sources(paths: Sequence[Path], shards: int) -> list[Callable[[], Iterator[Document]]]:
    """Files dealt out to shards by turns."""
    return [functools.partial(file_documents, tuple(paths[s::shards])) for s in range(shards)]
