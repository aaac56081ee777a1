"""Sample from a small RETRO with and without retrieval, with one search a chunk.

Documents are two random chunks, so the second one can only be retrieved. The model trains for some seconds to read its
neighbours. Then it continues first chunks of new documents, which are in the database:

    python examples/generate.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import retro_kernels as rk
from retro_model import Retro, RetroConfig, generate

M, V = 8, 40  # tokens per chunk, vocabulary

CONFIG = RetroConfig.small(V, d_model=64, d_ff=128, num_heads=4, num_layers=2, chunk_len=M)


def documents(count: int) -> Tensor:
    """Return [count, 2 M] tokens: a chunk and its continuation."""
    return torch.randint(V, (count, 2 * M))


def keys(chunks: Tensor) -> Tensor:
    """Return embeddings [n,V] of chunks [n,M]: counts of each token, instead of a frozen encoder's output."""
    return F.normalize(F.one_hot(chunks, V).sum(1).float(), dim=-1)


class Database:
    """Exact search for documents by the embedding of their first chunk."""

    def __init__(self, entries: Tensor) -> None:
        self.entries, self.keys = entries, keys(entries[:, :M]).unsqueeze(0)

    def __call__(self, chunks: Tensor) -> tuple[Tensor, None]:
        """Return neighbours [n,1,2 M] of chunks [n,M]. `generate` calls it whenever a chunk completes."""
        _, best = rk.topk_chunks(keys(chunks).unsqueeze(0), self.keys, 1)
        return self.entries[best[0]], None


def train(model: Retro, steps: int) -> float:
    """Train on new documents in every step. Return the last loss of second chunks, in nats a token."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss = torch.zeros(())
    for _ in range(steps):
        text = documents(32)
        retrieve = Database(torch.cat([text, documents(32)]))
        neighbours, _ = retrieve(text[:, :M])
        # no token follows the second chunk, so its neighbours are arbitrary
        neighbours = torch.stack([neighbours, torch.zeros_like(neighbours)], 1)
        logits = model(text, neighbours)
        loss = F.cross_entropy(logits[:, M - 1 : -1].flatten(0, 1), text[:, M:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main(steps: int = 100) -> tuple[float, float]:
    """Train and sample. Return the share of right tokens with retrieval and without."""
    torch.manual_seed(0)
    model = Retro(CONFIG)
    print(f"loss after {steps} steps: {train(model, steps):.3f} nats a token")
    known = documents(100)
    prompts, truth = known[:5, :M], known[:5, M:]
    on = torch.stack(generate(model, prompts, M, retrieve=Database(known)))[:, M:]
    off = torch.stack(generate(model, prompts, M))[:, M:]
    for prompt, right, with_it, without in zip(prompts, truth, on, off, strict=True):
        rows = {"prompt": prompt, "| truth": right, "| retrieval on": with_it, "| off": without}
        print(*(word for name, row in rows.items() for word in (name, *row.tolist())))
    shares = (on == truth).float().mean().item(), (off == truth).float().mean().item()
    print(f"right: {shares[0]:.0%} with retrieval, {shares[1]:.0%} without")
    return shares


if __name__ == "__main__":
    main()
