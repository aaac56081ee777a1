"""RegBench: a Memory Mosaic and a rotary transformer learn an automaton's language from its words in the context.

Every sequence has a random automaton of its own, and the automata that are scored are new. So a model cannot know the
language from its weights; it has to learn it from the words that it has read. Both models have the same number of
parameters and train on the same batches in the same order. Counting n-grams in the context, without any training, is
the control: it beats both models at n = 3.

    python examples/regbench.py                                      # about three minutes on two cores
    python examples/regbench.py --steps 600 --seeds 3                # the run of docs/memory_mosaics.md

Source: Zhang et al., arXiv 2405.06394, section 5, figure 11; data: Akyurek et al., arXiv 2401.12973.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from baseline import Transformer, TransformerConfig
from torch import nn

from retro_model import training
from retro_model.memory_mosaics import MemoryMosaics, MosaicsConfig

PAD, SEPARATOR, FIRST_SYMBOL, SYMBOLS = 0, 1, 2, 18
VOCAB = FIRST_SYMBOL + SYMBOLS
STATES, ALPHABET, EDGES, WORDS = (4, 12), (4, 18), (1, 3), (10, 19)  # uniform, both ends included
D_MODEL, HEADS, LAYERS, BATCH = 64, 4, 2, 16


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
    """Draw an automaton and 10 to 19 of its words of 1 to `longest_word` symbols.

    A word starts in state 0 and takes each edge of a state with equal probability.
    """
    uniform = lambda ends: int(random.integers(ends[0], ends[1] + 1))  # noqa: E731
    states = uniform(STATES)
    alphabet = random.permutation(SYMBOLS)[: uniform(ALPHABET)]
    edges = []  # per state: symbols and targets, both distinct
    for state in range(states):
        count, others = uniform(EDGES), np.delete(np.arange(states), state)
        edges.append((random.permutation(alphabet)[:count], random.permutation(others)[:count]))
    steps = []  # token, state after it, number of the word
    for number in range(uniform(WORDS)):
        state = 0
        if number:
            steps.append((SEPARATOR, state, number))
        for _ in range(uniform((1, longest_word))):
            symbols, targets = edges[state]
            edge = random.integers(len(symbols))
            state = targets[edge]
            steps.append((FIRST_SYMBOL + symbols[edge], state, number))
    tokens, reached, word = map(np.array, zip(*steps))
    allowed = np.array([np.isin(np.arange(SYMBOLS), symbols) for symbols, _ in edges])  # [states,18]
    return Sequence(tokens, allowed[reached], word)


def sequences(count: int, seed: int, longest_word: int = 19) -> list[Sequence]:
    """Draw `count` automata. Return one sequence of each."""
    random = np.random.default_rng(seed)
    return [sequence(random, longest_word) for _ in range(count)]


def padded(rows: list[Sequence]) -> training.Batch:
    """Return a batch in which only symbols are predicted."""
    tokens = np.full((len(rows), max(len(row.tokens) for row in rows)), PAD)
    for target, row in zip(tokens, rows):
        target[: len(row.tokens)] = row.tokens
    tokens = torch.from_numpy(tokens)
    return training.Batch(tokens, tokens >= FIRST_SYMBOL)


def score(rows: list[Sequence], predictions: list[np.ndarray]) -> tuple[float, float]:
    """Return accuracy and total variation over the symbols of all words but the first.

    Accuracy is the share of positions at which the automaton allows the likeliest symbol. Total variation is half the
    sum of |predicted - true probability|, averaged over positions. predictions: probabilities [N,18] after each token.
    """
    right, distance = [], []
    for row, predicted in zip(rows, predictions):
        scored = np.flatnonzero((row.tokens[1:] >= FIRST_SYMBOL) & (row.word[1:] > 0))  # token t predicts token t+1
        allowed, p = row.allowed[scored], predicted[scored]
        right.append(allowed[np.arange(len(scored)), p.argmax(1)])
        distance.append(0.5 * np.abs(p - allowed / allowed.sum(1, keepdims=True)).sum(1))
    return float(np.concatenate(right).mean()), float(np.concatenate(distance).mean())


def ngram(row: Sequence, order: int) -> np.ndarray:
    """Return probabilities [N,18] by counts in the row so far, given the last order-1 tokens or, if new, fewer."""
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


@torch.no_grad()
def predictions(model: nn.Module, rows: list[Sequence]) -> list[np.ndarray]:
    """Return probabilities [N,18] of the next symbol after each token of each row."""
    model.eval()
    parts = [rows[first : first + 25] for first in range(0, len(rows), 25)]
    found = [p for part in parts for p in model(padded(part).tokens)[..., FIRST_SYMBOL:].softmax(-1).numpy()]
    return [p[: len(row.tokens)] for p, row in zip(found, rows)]


def stream(rows: list[Sequence], seed: int):
    """Iterate over batches forever. Every epoch visits all rows in a new random order."""
    random = np.random.default_rng(seed)
    while True:
        order = random.permutation(len(rows))
        for first in range(0, len(order) - BATCH + 1, BATCH):
            yield padded([rows[i] for i in order[first : first + BATCH]])


def make(name: str, seed: int) -> nn.Module:
    """Return a model of about 100,000 parameters with weights drawn from `seed`."""
    torch.manual_seed(seed)
    if name == "Memory Mosaics":
        return MemoryMosaics(MosaicsConfig(VOCAB, D_MODEL, HEADS, LAYERS, persistent_slots=7 * D_MODEL // 2))
    # A transformer learns this task faster from a mosaic's initial weights than from GPT-2's.
    return Transformer(TransformerConfig(VOCAB, D_MODEL, HEADS, LAYERS, initial_std=None))


def main(arguments: list[str] | None = None) -> dict[str, tuple[float, float]]:
    """Train, score and draw. Return accuracy and total variation of the last seed by model and order of n-grams."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    for name, default in (("steps", 200), ("sequences", 1000), ("scored", 100), ("points", 5), ("seeds", 1)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--rate", type=float, default=5e-3, help="learning rate (default: 0.005)")
    parser.add_argument("--picture", default="", help="write the curves to this file")
    options = parser.parse_args(arguments)
    rows, test = sequences(options.sequences, 3), sequences(options.scored, 1)
    results = {f"{n}-grams": score(test, [ngram(row, n) for row in test]) for n in (1, 2, 3)}
    stops, curves = np.linspace(0, options.steps, options.points + 1).astype(int).tolist(), {}
    for name in ("Memory Mosaics", "rotary transformer"):
        for seed in range(options.seeds):
            model, batches = make(name, seed), stream(rows, seed)
            settings = training.Settings(
                options.steps, options.rate, warmup_steps=options.steps // 20, weight_decay=0.1
            )
            optimizer, curve = training.make_optimizer(model, settings), []
            for first, stop in itertools.pairwise(stops):
                model.train()
                training.train(model, optimizer, batches, settings, start=first, stop=stop)
                curve.append(score(test, predictions(model, test)))
            curves[f"{name}, seed {seed}"], results[name] = curve, curve[-1]
            shown = ", ".join(f"{accuracy:.3f} at {stop}" for stop, (accuracy, _) in zip(stops[1:], curve))
            print(f"{name}, seed {seed}: allowed predictions {shown} steps; total variation {curve[-1][1]:.3f}")
    for n in (1, 2, 3):
        accuracy, variation = results[f"{n}-grams"]
        print(f"control, {n}-grams in the context: allowed predictions {accuracy:.3f}; total variation {variation:.3f}")
    if options.picture:
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(6, 3.6))
        for name, curve in curves.items():
            axes.plot(stops[1:], [accuracy for accuracy, _ in curve], label=name)
        axes.set(xlabel="training steps", ylabel="allowed predictions", ylim=(0, 1))
        axes.legend()
        figure.savefig(options.picture, dpi=110, bbox_inches="tight")
    return results


if __name__ == "__main__":
    main()
