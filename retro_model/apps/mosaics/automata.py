"""RegBench: words of a random automaton, its true next-symbol distribution, and the predictions of in-context n-grams.

Source: Akyurek et al., "In-context language learning", arXiv 2401.12973. The generator is that of their code without
minimising the automata: every state accepts, so this does not change the distributions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
import torch

PAD, SEPARATOR, FIRST_SYMBOL, SYMBOLS = 0, 1, 2, 18
VOCAB = FIRST_SYMBOL + SYMBOLS
STATES, ALPHABET, EDGES, WORDS = (4, 12), (4, 18), (1, 3), (10, 19)  # uniform, both ends included


@dataclass(frozen=True)
class Sequence:
    """Words of one automaton, joined by SEPARATOR.

    tokens: int64 [N]. allowed: bool [N,18], the symbols that may follow each token, all equally likely. word: int64
    [N], the number of the word to which the *next* token belongs.
    """

    tokens: np.ndarray
    allowed: np.ndarray
    word: np.ndarray


def sequence(random: np.random.Generator, longest_word: int) -> Sequence:
    """Draw an automaton, and 10 to 19 of its words, of 1 to `longest_word` symbols.

    A word starts in state 0 and takes each edge of a state with equal probability.
    """
    states = _uniform(random, STATES)
    alphabet = random.permutation(SYMBOLS)[: _uniform(random, ALPHABET)]
    edges = []  # of each state: symbols and targets, both distinct
    for state in range(states):
        count = _uniform(random, EDGES)
        others = np.delete(np.arange(states), state)
        edges.append((random.permutation(alphabet)[:count], random.permutation(others)[:count]))
    steps = []  # token, state after it, number of the word
    for number in range(_uniform(random, WORDS)):
        state = 0
        if number:
            steps.append((SEPARATOR, state, number))
        for _ in range(_uniform(random, (1, longest_word))):
            symbols, targets = edges[state]
            edge = random.integers(len(symbols))
            state = targets[edge]
            steps.append((FIRST_SYMBOL + symbols[edge], state, number))
    tokens, reached, word = map(np.array, zip(*steps))
    allowed = np.array([np.isin(np.arange(SYMBOLS), symbols) for symbols, _ in edges])  # [states,18]
    return Sequence(tokens, allowed[reached], word)


def _uniform(random: np.random.Generator, ends: tuple[int, int]) -> int:
    return int(random.integers(ends[0], ends[1] + 1))


def sequences(count: int, seed: int, longest_word: int) -> list[Sequence]:
    """Draw `count` automata; return one sequence of each."""
    random = np.random.default_rng(seed)
    return [sequence(random, longest_word) for _ in range(count)]


def padded(rows: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens int64 [B,N] and bool [B,N], true for symbols, the tokens that are predicted."""
    tokens = np.full((len(rows), max(len(row.tokens) for row in rows)), PAD)
    for target, row in zip(tokens, rows):
        target[: len(row.tokens)] = row.tokens
    tokens = torch.from_numpy(tokens)
    return tokens, tokens >= FIRST_SYMBOL


def score(rows: list[Sequence], predictions: list[np.ndarray]) -> dict[str, float]:
    """Return accuracy and total variation over the symbols of all words but the first.

    accuracy: share of positions where the automaton allows the likeliest symbol.
    tv: mean over positions of half the sum of |predicted - true probability|.
    predictions: probabilities [N,18] after each token of each row.
    """
    right, distance = [], []
    for row, predicted in zip(rows, predictions):
        scored = np.flatnonzero((row.tokens[1:] >= FIRST_SYMBOL) & (row.word[1:] > 0))  # token t predicts token t+1
        allowed, p = row.allowed[scored], predicted[scored]
        right.append(allowed[np.arange(len(scored)), p.argmax(1)])
        distance.append(0.5 * np.abs(p - allowed / allowed.sum(1, keepdims=True)).sum(1))
    return {"accuracy": float(np.concatenate(right).mean()), "tv": float(np.concatenate(distance).mean())}


def ngram(row: Sequence, order: int) -> np.ndarray:
    """Return probabilities [N,18] from counts in the row so far, given the last order-1 tokens or, if new, fewer."""
    counts: list[dict] = [defaultdict(Counter) for _ in range(order)]
    tokens, estimates = row.tokens.tolist(), np.full((len(row.tokens), SYMBOLS), 1 / SYMBOLS)
    for t, token in enumerate(tokens):
        if token >= FIRST_SYMBOL:
            for n in range(min(order, t + 1)):
                counts[n][tuple(tokens[t - n : t])][token - FIRST_SYMBOL] += 1
        for n in reversed(range(min(order, t + 2))):
            if seen := counts[n].get(tuple(tokens[t + 1 - n : t + 1])):
                estimates[t] = 0
                estimates[t, list(seen)] = list(seen.values())
                estimates[t] /= estimates[t].sum()
                break
    return estimates
