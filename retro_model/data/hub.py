"""Adapter that makes a Hugging Face tokenizer an `Encoder`, without importing transformers."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from pathlib import Path

import numpy as np

from .tokens import Encoder, byte_alphabet


class HubTokenizer:
    """`Encoder` of any fast tokenizer of `transformers`, or of `tokenizers`.

        store = build_store(folder, rows, AutoTokenizer.from_pretrained("gpt2"), bos=True)

    "</s>" in a document is encoded as four characters, never as a special token. The bytes behind a token are exact for
    byte-level vocabularies (GPT-2, Llama 3, Qwen). SentencePiece adds a space at the beginning of every text. Other
    tokenizers, such as WordPiece, lose spaces and capitals: bits per byte count the remaining bytes, with a warning.

    Args:
        tokenizer: it is not changed.

    Attributes:
        name: class, size and digest of the vocabulary.
        vocab_size: added tokens included.
        byte_lengths: int64 [vocab_size].
        bos_id, eos_id: None if the tokenizer has no such token.
        exact: whether byte_lengths and `decode_bytes` are exact.
    """

    def __init__(self, tokenizer) -> None:
        self.theirs = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        form = backend.to_str()
        self._fast = type(backend).from_str(form)  # a copy, so that the caller's padding and truncation stay
        self._fast.no_padding()
        self._fast.no_truncation()
        self._fast.encode_special_tokens = True
        vocabulary = tokenizer.get_vocab()
        self.vocab_size = max(vocabulary.values()) + 1
        self.bos_id = getattr(tokenizer, "bos_token_id", None)
        self.eos_id = getattr(tokenizer, "eos_token_id", None)
        special = set(getattr(tokenizer, "all_special_ids", ()))
        self.exact = "ByteLevel" in json.dumps(json.loads(form).get("decoder"))
        self._pieces = {n: b"" if n in special else _bytes_of(token, self.exact) for token, n in vocabulary.items()}
        self.byte_lengths = np.array([len(self._pieces.get(n, b"")) for n in range(self.vocab_size)], np.int64)
        if not self.exact:
            why = f"{type(tokenizer).__name__} is not byte-level; bytes of the decoded tokens are counted"
            warnings.warn(f"tokenizer: {why}", stacklevel=3)
        digest = hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode())
        digest.update(form.encode())
        self.name = f"{type(tokenizer).__name__}-{self.vocab_size}-{digest.hexdigest()[:16]}"

    @classmethod
    def load(cls, path: str | Path) -> HubTokenizer:
        """Load a folder that `save_pretrained` wrote, without the network and without running code of the folder."""
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False))

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return the token ids of each text, int64, without special tokens."""
        return [np.array(e.ids, np.int64) for e in self._fast.encode_batch_fast(texts, add_special_tokens=False)]

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of one text, int64."""
        return self.encode_batch([text])[0]

    def decode_bytes(self, ids) -> bytes:
        """Return the bytes of token ids; special tokens have none."""
        numbers = np.asarray(ids).tolist()
        return b"".join(self._pieces.get(i, b"") for i in numbers) if self.exact else self.decode(numbers).encode()

    def decode(self, ids) -> str:
        """Return the text behind token ids."""
        return self.theirs.decode(np.asarray(ids).tolist(), skip_special_tokens=True)


def as_encoder(tokenizer) -> Encoder:
    """Return an `Encoder` unchanged and a Hugging Face tokenizer as `HubTokenizer`; otherwise raise TypeError."""
    if all(hasattr(tokenizer, name) for name in ("name", "vocab_size", "byte_lengths", "encode_batch")):
        return tokenizer
    if hasattr(getattr(tokenizer, "backend_tokenizer", tokenizer), "to_str"):
        return HubTokenizer(tokenizer)
    want = "a Tokenizer, another Encoder (name, vocab_size, byte_lengths, encode_batch), or a fast tokenizer"
    raise TypeError(f"tokenizer: expected {want} of transformers or tokenizers; got {type(tokenizer).__name__}")


def _bytes_of(token: str, byte_level: bool) -> bytes:
    """Return the bytes behind a token of the vocabulary."""
    if byte_level:
        known = byte_alphabet()
        return bytes(known[c] for c in token) if all(c in known for c in token) else token.encode()
    if re.fullmatch("<0x[0-9A-F]{2}>", token):  # SentencePiece's byte fallback
        return bytes.fromhex(token[3:5])
    return token.removeprefix("##").replace("▁", " ").replace("</w>", " ").encode()
