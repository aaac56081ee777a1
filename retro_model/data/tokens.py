"""Byte-level BPE through `tokenizers`, and the exact number of bytes behind every token id.

Ids: 0 is padding (`PAD`), 1 the beginning of a text (`BOS`), then the 256 bytes, then the merges. The first two stand
for no bytes and are never produced from text. Any text can be encoded; the bytes of its tokens are its UTF-8 bytes.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np

from retro_model.base import disk

PAD, BOS = 0, 1
SPECIAL = ("<pad>", "<bos>")


class Encoder(Protocol):
    """Tokenizer protocol of `TokenStore`.

    name: identifies the vocabulary; a store built with another name is refused. byte_lengths: int64 [vocab_size].
    bos_id: optional attribute, the token that begins a text (None: no such token); default `BOS`.
    """

    name: str
    vocab_size: int
    byte_lengths: np.ndarray

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]: ...


class Tokenizer:
    """Byte-level BPE.

        tokenizer = Tokenizer.train(texts, vocab_size=8192)
        ids = tokenizer.encode("def f(x):")  # int64
        assert tokenizer.decode(ids) == "def f(x):" and tokenizer.byte_lengths[ids].sum() == 9

    Args:
        model: `tokenizers.Tokenizer` with the vocabulary that `train` makes.

    Raises: ValueError: the special tokens have other ids, or the vocabulary is not byte-level.
    """

    def __init__(self, model) -> None:
        ids = [model.token_to_id(token) for token in SPECIAL]
        if ids != [PAD, BOS]:
            raise ValueError(f"model: expected {SPECIAL} at ids {PAD}, {BOS}; got {ids}")
        self.model, self.vocab_size = model, model.get_vocab_size()
        model.encode_special_tokens = True  # "<pad>" in a text is five characters
        byte_of = byte_alphabet()
        try:
            tokens = map(model.id_to_token, range(len(SPECIAL), self.vocab_size))
            self.token_bytes = [b"", b"", *(bytes(byte_of[c] for c in token) for token in tokens)]
        except (KeyError, TypeError) as error:
            raise ValueError(f"model: expected a byte-level vocabulary with contiguous ids; {error!r}") from error
        self.byte_lengths = np.array([len(b) for b in self.token_bytes], np.int64)
        self.name = f"bpe-{self.vocab_size}-{hashlib.sha256(model.to_str().encode()).hexdigest()[:16]}"

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Learn the merges. The vocabulary is smaller than `vocab_size` if too few pairs occur twice.

        Raises: ValueError: no texts, or vocab_size below 258 (bytes and special tokens). TypeError: texts is one str.
        """
        if isinstance(texts, str):
            raise TypeError("texts: expected an iterable of str; got one str")
        texts = iter(texts)
        if (first := next(texts, None)) is None:
            raise ValueError("texts: expected at least one; got none")
        tokenizers = _tokenizers()
        least = 256 + len(SPECIAL)
        if vocab_size < least:
            of = f"256 bytes, {len(SPECIAL)} special"
            raise ValueError(f"vocab_size: expected at least {least} ({of}); got {vocab_size}")
        model = tokenizers.Tokenizer(tokenizers.models.BPE())
        model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = tokenizers.decoders.ByteLevel()
        options = {"vocab_size": vocab_size, "min_frequency": 2, "show_progress": False}
        alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        options |= {"special_tokens": list(SPECIAL), "initial_alphabet": alphabet}
        trainer = tokenizers.trainers.BpeTrainer(**options)
        model.train_from_iterator(itertools.chain([first], texts), trainer)
        return cls(model)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Load the JSON file that `save` wrote. Raises: FileNotFoundError, ValueError naming the file."""
        try:
            content = disk.read_plain(Path(path))
        except FileNotFoundError:
            raise FileNotFoundError(f"{path}: no tokenizer here") from None
        tokenizers = _tokenizers()
        try:
            return cls(tokenizers.Tokenizer.from_buffer(content))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library's panics derive from BaseException
            raise ValueError(f"{path}: truncated, corrupt or no tokenizer of ours ({error})") from error

    def save(self, path: str | Path) -> None:
        """Write one JSON file in the format of `tokenizers`, atomically."""
        disk.make_folder(Path(path).parent)
        disk.write_plain(Path(path), self.model.to_str(pretty=True).encode())

    def encode(self, text: str, *, bos: bool = False) -> np.ndarray:
        """Return token ids, int64. bos: prepend BOS."""
        ids = self.encode_batch([text])[0]
        return np.concatenate([[BOS], ids]) if bos else ids

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return the token ids of each text, int64. Texts are encoded in parallel."""
        return [np.array(e.ids, np.int64) for e in self.model.encode_batch_fast(texts, add_special_tokens=False)]

    def decode_bytes(self, ids) -> bytes:
        """Return the exact bytes behind token ids; special tokens have none."""
        return b"".join(self.token_bytes[i] for i in np.asarray(ids).tolist())

    def decode(self, ids) -> str:
        """Return the text behind token ids. Bytes that are not UTF-8 (part of a character) become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """Map the characters of a byte-level vocabulary to bytes. A byte that is not printable is written as U+0100 + n."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def _tokenizers():
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError("tokenization needs tokenizers (pip install 'retro-kernels[retrieval]')") from error
    return tokenizers
