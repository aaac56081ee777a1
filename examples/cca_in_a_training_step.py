"""Chunked cross-attention in a training step of your own, without any other part of this repository.

The task needs retrieval: tokens are random, and the neighbour of a chunk is the chunk that follows it. A model that
reads its neighbours predicts every token; without them it can only guess. Runs on a CPU in seconds:

    python examples/cca_in_a_training_step.py
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retro_kernels as rk

B, N, M, K, H, D, V = 8, 64, 8, 1, 2, 16, 32  # batch, tokens, chunk length, neighbours, heads, head width, vocabulary


class Reader(nn.Module):
    """Embeddings, one chunked cross-attention, a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, H * D)
        self.query, self.key, self.value, self.output = (nn.Linear(H * D, H * D) for _ in range(4))
        # a learned key for each displacement -(R-1) .. M-1 of a token from a neighbour's token; here R = M
        self.rel_key = nn.Parameter(torch.zeros(H, 2 * M - 1, D))
        self.readout = nn.Linear(H * D, V)

    def forward(self, tokens: Tensor, neighbours: Tensor) -> Tensor:
        """Return logits [B,N,V] of tokens [B,N] and neighbours [B,L,K,R]."""
        x, context = self.embedding(tokens), self.embedding(neighbours)
        heads = (H, D)
        out = rk.chunked_cross_attention(
            self.query(x).unflatten(-1, heads),  # [B,N,H,D]
            self.key(context).unflatten(-1, heads),  # [B,L,K,R,H,D]
            self.value(context).unflatten(-1, heads),
            chunk_len=M,
            rel_key=self.rel_key,
        )
        return self.readout(x + self.output(out.flatten(-2)))


def batch() -> tuple[Tensor, Tensor]:
    """Return random tokens [B,N] and neighbours [B,L,1,M]: the chunk after each chunk; random for the last one."""
    chunks = torch.randint(V, (B, N // M + 1, M))
    return chunks[:, :-1].flatten(1), chunks[:, 1:].unsqueeze(2)


def main(steps: int = 150) -> tuple[float, float]:
    """Train. Return the loss of the first and of the last step, in nats a token."""
    torch.manual_seed(0)
    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        tokens, neighbours = batch()
        logits = model(tokens, neighbours)
        # the first M-1 tokens attend nothing: chunk 0 completes at token M-1
        loss = F.cross_entropy(logits[:, M - 1 : -1].flatten(0, 1), tokens[:, M:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 25 == 0 or step == steps - 1:
            print(f"step {step:3d}  loss {losses[-1]:.3f}  (guessing: {math.log(V):.3f})")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
