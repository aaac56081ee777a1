"""Reading of a text: its tokens, their costs with and without retrieval, and the passages that hold them."""

from __future__ import annotations

import codecs
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


def token_texts(decode_bytes, ids) -> list[str]:
    """Return the text that each token completes: a character of two tokens belongs to the second."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = [decoder.decode(decode_bytes([i])) for i in np.asarray(ids).tolist()]
    if texts:
        texts[-1] += decoder.decode(b"", final=True)
    return texts


def bits(logits: Tensor, tokens: Tensor) -> np.ndarray:
    """Return the bits [N] that each of tokens [N] costs under logits [N,V] of the next token; the first costs 0."""
    nats = torch.nn.functional.cross_entropy(logits[:-1].double(), tokens[1:], reduction="none")
    return np.concatenate([[0.0], nats.cpu().numpy() / math.log(2)])


def longest_runs(own: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return, for every pair of tokens, the length of the longest common run through it; 0 if they differ.

        longest_runs([[7, 8, 9]], [[8, 9, 5]]) == [[[0, 0, 0], [2, 0, 0], [0, 2, 0]]]

    own: [n,A]. other: [n,B], -1 for none. Returns: int64 [n,A,B].
    """
    own, other = np.asarray(own), np.asarray(other)
    same = np.pad(own[:, :, None] == other[:, None, :], ((0, 0), (1, 1), (1, 1)))
    runs = same.astype(np.int64)
    rows = range(1, own.shape[1] + 1)
    for i in rows:  # the length up to here
        runs[:, i, 1:] += same[:, i, 1:] * runs[:, i - 1, :-1]
    for i in reversed(rows):  # the length at the run's end
        goes_on = same[:, i, :-1] & same[:, i + 1, 1:]
        runs[:, i, :-1] = np.where(goes_on, runs[:, i + 1, 1:], runs[:, i, :-1])
    return runs[:, 1:-1, 1:-1]


def sources(
    tokens: np.ndarray, neighbours: np.ndarray, mask: np.ndarray, blank: np.ndarray, chunk_len: int
) -> list[list[int] | None]:
    """Return the source of each token in a neighbour of the chunk before, or None.

    A source is [neighbour, token there, first and end of the common run]. Of several the one in the longest common run
    counts. Blank tokens have no source; a run may begin in the chunk before.

    tokens, blank: [N]. neighbours, mask: [L,K,R], of the complete chunks of chunk_len tokens.
    Source: after tables 6 and 7 of arXiv 2112.04426, which colour by the longest common prefix.
    """
    m, origins = chunk_len, [None] * len(tokens)
    count, k, length = neighbours.shape
    count = min(count, (len(tokens) - 1) // m)  # only chunks with tokens after them have neighbours
    if count < 1 or not k:
        return origins
    padded = np.pad(tokens, (0, 2 * m), constant_values=-2)
    own = np.stack([padded[c * m : (c + 2) * m] for c in range(count)])  # each chunk and the next
    other = np.where(mask, neighbours, -1)[:count]
    runs = np.stack([longest_runs(own, other[:, j]) for j in range(k)], 1)  # [chunks,K,own,other]
    for i in np.flatnonzero(~blank[: (count + 1) * m]).tolist():
        of_chunk, here = runs[i // m - 1], i % m + m
        if i < m or not (best := of_chunk[:, here].max()):
            continue
        j, there = np.unravel_index(of_chunk[:, here].argmax(), (k, length))
        back = 0
        while there - back > 0 and back < here and of_chunk[j, here - back - 1, there - back - 1] == best:
            back += 1
        origins[i] = [int(j), int(there), int(there - back), int(there - back + best)]
    return origins


@dataclass
class TextReading:
    """Reading of a text; `to_dict` makes the page's JSON.

    tokens, byte_lengths: [N]. texts: of each token. on, off: bits [N] with and without retrieval. chunk_len: M.
    cards: neighbours of each complete chunk, nearest first; the next chunk reads them. sources: see `sources`.
    extra: further fields of the page's JSON. random: bits [N] with random passages, the control; None: not measured.
    """

    tokens: np.ndarray
    texts: list[str]
    on: np.ndarray
    off: np.ndarray
    byte_lengths: np.ndarray
    chunk_len: int
    cards: list[list[dict]]
    sources: list
    extra: dict
    random: np.ndarray | None = None

    @property
    def gain(self) -> np.ndarray:
        """Bits [N] that retrieval gains on each token, over random passages or, without that control, over none."""
        return (self.off if self.random is None else self.random) - self.on

    @property
    def blank(self) -> np.ndarray:
        """Mask [N] of the tokens that are white space, which are not coloured."""
        return np.array([not text.strip() for text in self.texts], bool)

    def per_byte(self, cost: np.ndarray) -> float:
        """Return bits per byte of all tokens but the first."""
        return float(cost[1:].sum() / max(1, self.byte_lengths[1:].sum()))

    def bits_per_byte(self) -> dict[str, float]:
        """Return bits per byte with retrieval, without and, if measured, with random passages."""
        costs = {"on": self.on, "off": self.off, "random": self.random}
        return {name: self.per_byte(cost) for name, cost in costs.items() if cost is not None}

    def documents(self) -> list[dict]:
        """Return the retrieved documents with their numbers of chunks and the bits gained on them, most first."""
        entries: dict[int, dict] = {}
        for cards in self.cards:
            for number, name in {(card["document"], card["name"]) for card in cards}:
                entry = entries.setdefault(number, {"document": number, "name": name, "chunks": 0, "saved": 0.0})
                entry["chunks"] += 1
        for i, source in enumerate(self.sources):
            if source is not None:
                card = self.cards[i // self.chunk_len - 1][source[0]]
                entries[card["document"]]["saved"] += float(self.gain[i])
        return sorted(entries.values(), key=lambda entry: -entry["saved"])

    def to_dict(self) -> dict:
        """Return the JSON of the page."""
        return {
            "texts": self.texts,
            **{name: [round(float(v), 3) for v in getattr(self, name)] for name in ("on", "off", "gain")},
            "controlled": self.random is not None,
            "blank": self.blank.tolist(),
            "chunk_len": self.chunk_len,
            "cards": self.cards,
            "sources": self.sources,
            "documents": self.documents(),
            "bits_per_byte": self.bits_per_byte(),
            **self.extra,
        }
