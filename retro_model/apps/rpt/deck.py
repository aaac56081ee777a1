"""Made-up documents whose content returns beyond the window, and reference language models of them.

A document shows a few cards again and again, in random order. A card is a cue of one chunk (names, then noise) and a
content of one chunk of random tokens. Only an earlier showing of the same card predicts its content.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Deck:
    """Documents of `showings` * 2 chunks of `chunk_len` tokens.

    cards: of a document. showings: how many it shows. chunk_len: m, of a cue and of a content. names: name tokens of a
    cue; the rest of it is noise. contents: tokens that contents and noise are drawn from, ids 0 .. contents-1.
    words, forms: number of words for names, and of forms of each word; every form is a token. With one form a returning
    cue repeats its names. With more a returning cue is reworded: it has the next form of each word.
    altered: share of the content that is drawn anew at each return.
    """

    cards: int = 5
    showings: int = 20
    chunk_len: int = 16
    names: int = 10
    contents: int = 64
    words: int = 64
    forms: int = 1
    altered: float = 0.05

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.contents + self.words * self.forms

    @property
    def chunks(self) -> int:
        """L of a document."""
        return 2 * self.showings

    def documents(self, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw tokens int64 [count, L*m], cue and content in turn; return them and each chunk's card [count, L]."""
        random = np.random.default_rng(seed)
        tokens = np.empty((count, self.showings, 2, self.chunk_len), np.int64)
        shown = random.integers(0, self.cards, (count, self.showings))
        for document, cards in zip(tokens, shown):
            words = np.stack([random.permutation(self.words)[: self.names] for _ in range(self.cards)])
            form = random.integers(0, self.forms, words.shape)
            content = random.integers(0, self.contents, (self.cards, self.chunk_len))
            for cue_and_content, card in zip(document, cards):
                cue_and_content[0, : self.names] = self.contents + words[card] * self.forms + form[card]
                cue_and_content[0, self.names :] = random.integers(0, self.contents, self.chunk_len - self.names)
                fresh = random.random(self.chunk_len) < self.altered
                cue_and_content[1] = np.where(fresh, random.integers(0, self.contents, self.chunk_len), content[card])
                form[card] = (form[card] + 1) % self.forms  # of the next showing
        return tokens.reshape(count, -1), np.repeat(shown, 2, 1)

    def far(self, shown: np.ndarray, excluded_chunks: int) -> np.ndarray:
        """Return bool [count, L]: cues whose card was shown before, but not in the last `excluded_chunks` chunks."""
        before = self.right(shown, 1)
        retrievable = self.right(shown, excluded_chunks)
        return retrievable.any(-1) & ~(before & ~retrievable).any(-1)

    def right(self, shown: np.ndarray, excluded_chunks: int) -> np.ndarray:
        """Return bool [count, L, L]: cue j has the card of cue i and is far enough before it to be retrieved."""
        number = np.arange(shown.shape[1])
        cue = number % 2 == 0
        same = (shown[:, :, None] == shown[:, None]) & cue[:, None] & cue
        return same & (number <= number[:, None] - excluded_chunks)


class Copyist:
    """Reference language model that predicts the token two chunks earlier.

    After (c_j, c_{j+1}, c_i) it predicts c_{j+1}: a candidate's target score is high if its continuation comes again.
    """

    def __init__(self, deck: Deck, doubt: float = 0.1):
        self.distance, self.vocab_size, self.doubt = 2 * deck.chunk_len, deck.vocab_size, doubt

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return logits [B,T,V] of tokens [B,T]."""
        uniform = self.doubt / self.vocab_size
        logits = torch.full((*tokens.shape, self.vocab_size), math.log(uniform))
        # copied tokens, predicted from position `distance` - 1 on
        before = tokens[:, : tokens.shape[1] - self.distance + 1]
        logits[:, self.distance - 1 :].scatter_(-1, before.unsqueeze(-1), math.log(1 - self.doubt + uniform))
        return logits


class Reader(Copyist):
    """Reference language model that knows the forms of a word.

    It predicts c_{j+1} again if c_i has the words of c_j in any forms, and is uniform otherwise. So only a candidate
    that is an earlier showing of the same card has a positive target score.
    """

    def __init__(self, deck: Deck, doubt: float = 0.1):
        super().__init__(deck, doubt)
        self.deck = deck

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return logits [B,T,V] of tokens [B,T], whole chunks."""
        deck = self.deck
        chunks = tokens.unflatten(1, (-1, deck.chunk_len))
        names = chunks[..., : deck.names] - deck.contents
        words = torch.where(names >= 0, names // deck.forms, -1)
        same = torch.zeros(chunks.shape[:2], dtype=torch.bool)  # [B,n]: cue n - 1 has the words of cue n - 3
        same[:, 3:] = ((words[:, :-3] == words[:, 2:-1]) & (words[:, :-3] >= 0)).all(-1)
        target = (torch.arange(tokens.shape[1]) + 1).clamp(max=tokens.shape[1] - 1) // deck.chunk_len
        return torch.where(same[:, target].unsqueeze(-1), super().__call__(tokens), -math.log(deck.vocab_size))
