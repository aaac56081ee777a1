"""A small Memory Mosaic that learns to repeat new phrases, far beyond the length of its training.

Every document repeats a random phrase, so after its first occurrence the context determines every token. One block is
enough, because a memory's value depends on the next token. The model trains for some seconds on documents of 48 tokens.
Then it continues new phrases for 500 tokens, with all pairs in memory and with memories of 24 pairs:

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
    """Return [count,length] tokens: a random phrase of PHRASE different tokens, repeated."""
    phrases = torch.rand(count, V).argsort(1)[:, :PHRASE]
    return phrases.repeat(1, -(-length // PHRASE))[:, :length]


def train(model: MemoryMosaics, steps: int) -> float:
    """Train on new documents in every step. Return the last loss after the first phrase, in nats a token."""
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
    """Train and sample. Return the share of right tokens with all pairs in memory, and with 24 pairs a memory."""
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
        right = [t[len(p) :] == row[len(p) : len(t)] for t, p, row in zip(texts, prompts, truth, strict=True)]
        shares.append(torch.stack(right).float().mean().item())
        print(f"{pairs or 'all'} pairs in memory: {shares[-1]:.0%} of {new_tokens} tokens right")
    return shares[0], shares[1]


if __name__ == "__main__":
    main()
