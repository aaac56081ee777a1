"""A small Memory Mosaic that learns to learn by heart, and goes on far beyond the length that it was trained on.

Every document repeats a random phrase of its own: the first time it is noise, from then on the context tells every
token. One block is enough, as a memory's value already peeks at the next token. Trained for some seconds on documents
of 48 tokens, then asked to continue phrases that it never saw for 500, with all it has seen in memory and with memories
of 24 pairs:

    python examples/memory_mosaics.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from retro_model import MemoryMosaics, MosaicsConfig, generate
from retro_model.memory_mosaics.inspection import inspect

V, PHRASE = 24, 12  # vocabulary, tokens of a phrase

CONFIG = MosaicsConfig(V, d_model=64, num_heads=4, num_layers=1, persistent_slots=64)


def documents(count: int, length: int) -> Tensor:
    """[count,length] tokens: a random phrase of PHRASE different tokens, again and again."""
    phrases = torch.rand(count, V).argsort(1)[:, :PHRASE]
    return phrases.repeat(1, -(-length // PHRASE))[:, :length]


def train(model: MemoryMosaics, steps: int) -> float:
    """Fresh documents in every step. Returns the last loss, nats a token after the first phrase."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = torch.zeros(())
    for _ in range(steps):
        tokens = documents(16, 4 * PHRASE)
        losses = F.cross_entropy(model(tokens)[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
        loss = losses[:, PHRASE:].mean()
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
    return loss.item()


def main(steps: int = 150, new_tokens: int = 500) -> tuple[float, float]:
    """The share of tokens that are right with everything in memory, and with 24 pairs a memory."""
    torch.manual_seed(0)
    model = MemoryMosaics(CONFIG)
    print(f"loss after {steps} steps: {train(model, steps):.3f} nats a token")
    for number, block in enumerate(inspect(model, documents(8, 4 * PHRASE)), 1):
        print(f"block {number}: skill of each memory", *(f"{s:.2f}" for s in block.skill.tolist()))
    truth = documents(4, 2 * PHRASE + new_tokens)
    prompts = [row[: PHRASE + extra] for row, extra in zip(truth, (2, 5, 7, 12), strict=True)]  # of different lengths
    shares = []
    for pairs in (None, 2 * PHRASE):
        model.limit_memory(pairs)
        texts = generate(model, prompts, new_tokens)
        right = [
            (t[len(p) :] == row[len(p) : len(t)]).float().mean().item()
            for t, p, row in zip(texts, prompts, truth, strict=True)
        ]
        shares.append(sum(right) / len(right))
        print(
            f"{'all pairs' if pairs is None else f'{pairs} pairs'} in memory: {shares[-1]:.0%} of {new_tokens} tokens "
            "right"
        )
    return shares[0], shares[1]


if __name__ == "__main__":
    main()
