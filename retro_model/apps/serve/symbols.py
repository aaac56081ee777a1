"""Vocabulary of a fixed list of words, for made-up documents."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from retro_model.base import disk


class Symbols:
    """Tokeniser of a fixed list of words: a word is a token, and a space follows each.

        symbols = Symbols(["ba", "be"])
        symbols.decode([1, 0]) == "be ba " and symbols.encode("be ba").tolist() == [1, 0]

    Raises: ValueError for words that are empty, hold white space or occur twice.
    """

    def __init__(self, words: Sequence[str]) -> None:
        if len(set(words)) != len(words) or any(not isinstance(w, str) or w.split() != [w] for w in words):
            raise ValueError("words: expected different words without white space")
        self.words, self.vocab_size = list(words), len(words)
        self.number = {word: i for i, word in enumerate(self.words)}
        self.byte_lengths = np.array([len(word.encode()) + 1 for word in self.words], np.int64)
        self.name = f"symbols-{len(words)}-{hashlib.sha256(json.dumps(self.words).encode()).hexdigest()[:16]}"

    def encode(self, text: str) -> np.ndarray:
        """Return token ids, int64. Raises: ValueError naming a word that is not in the list."""
        if unknown := [word for word in text.split() if word not in self.number]:
            raise ValueError(
                f"text: expected words of the model's {self.vocab_size}, such as {self.words[0]}; got {unknown[0]!r}"
            )
        return np.array([self.number[word] for word in text.split()], np.int64)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return the token ids of each text."""
        return [self.encode(text) for text in texts]

    def decode_bytes(self, ids) -> bytes:
        """Return the words as UTF-8, a space after each."""
        return self.decode(ids).encode()

    def decode(self, ids) -> str:
        """Return the words as text, a space after each."""
        return "".join(f"{self.words[i]} " for i in np.asarray(ids).tolist())

    def save(self, path: str | Path) -> None:
        """Write the list as a JSON file."""
        disk.write_json(Path(path), self.words)

    @classmethod
    def load(cls, path: str | Path) -> Symbols:
        """Read a file of `save`. Raises: ValueError naming the file."""
        content = disk.read_plain(Path(path))
        try:
            return cls(disk.read_json(content))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: corrupt or no list of words ({error})") from None
