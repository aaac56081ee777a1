"""Stores for the data tests: token ids are given, so no tokenizer is trained."""

import numpy as np

from retro_model.data.store import build_store


class Given:
    """An Encoder of ids: every token is one byte."""

    def __init__(self, vocab_size=200):
        self.name, self.vocab_size, self.byte_lengths = f"given-{vocab_size}", vocab_size, np.ones(vocab_size, np.int64)

    def encode_batch(self, texts):
        raise AssertionError("only token ids are expected")


def store_of(folder, documents, *, chunk_len=8, vocab_size=200):
    """Build a store of documents, lists of token ids, named by their numbers."""
    named = [(str(i), "g", np.asarray(d)) for i, d in enumerate(documents)]
    return build_store(folder, named, Given(vocab_size), chunk_len=chunk_len)


def build_small(folder):
    """Build the same small store each time: 6 documents."""
    return store_of(folder, random_documents(6))


def random_documents(count, seed=0):
    """Return token ids with much repetition: documents repeat parts of each other."""
    rng = np.random.default_rng(seed)
    pool = rng.integers(2, 200, 400)
    documents = []
    for _ in range(count):
        starts = rng.integers(0, 350, rng.integers(1, 4))
        documents.append(np.concatenate([pool[s : s + rng.integers(3, 30)] for s in starts]))
    return documents
