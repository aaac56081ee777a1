"""Baseline of Memory Mosaics: a GPT-2-like decoder with as many parameters per block as a mosaic.

`regbench.py`, `mosaics_text.py` and `model_steps.py` import it. Run as a program, it trains for some steps on a text
that repeats, to show that it learns to continue one:

    python examples/baseline.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retro_kernels as rk
from retro_model.layers import FeedForward, NextTokenLoss, next_token_loss

ROTARY_BASE = 10_000.0  # Su et al., arXiv 2104.09864, section 3.2
NORM_EPS = 1e-5
GPT2_STD = 0.02  # Radford et al., 2019


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of the baseline.

    positions: "rotary", or "learned" for at most max_len tokens. initial_std: standard deviation of all matrices; None
    takes fan_in**-0.5, as a Memory Mosaic does. Residual outputs are divided by the square root of their number.
    """

    vocab_size: int
    d_model: int
    num_heads: int
    num_layers: int
    positions: str = "rotary"
    max_len: int = 1024
    initial_std: float | None = GPT2_STD


def rotated(x: Tensor) -> Tensor:
    """Return x [B,N,H,D], in which the pair (x_i, x_{i+D/2}) of position t is rotated by t * ROTARY_BASE^(-2i/D)."""
    half = x.shape[-1] // 2
    frequency = ROTARY_BASE ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angle = (torch.arange(x.shape[1], device=x.device)[:, None] * frequency)[:, None]  # [N,1,D/2]
    sine, cosine = angle.sin().to(x.dtype), angle.cos().to(x.dtype)
    first, second = x.split(half, -1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], -1)


class TransformerBlock(nn.Module):
    """Causal self-attention, then a feed-forward of four times the width; each is a pre-norm residual."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        d = config.d_model
        self.num_heads, self.rotary = config.num_heads, config.positions == "rotary"
        self.attention_norm, self.feed_forward_norm = (nn.LayerNorm(d, eps=NORM_EPS, bias=False) for _ in range(2))
        self.query, self.key, self.value, self.output = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.feed_forward = FeedForward(d, 4 * d)

    def forward(self, x: Tensor) -> Tensor:
        y, heads = self.attention_norm(x), (self.num_heads, -1)
        query, key, value = (linear(y).unflatten(-1, heads) for linear in (self.query, self.key, self.value))
        if self.rotary:
            query, key = rotated(query), rotated(key)
        x = x + self.output(rk.relative_attention(query, key, value, causal=True).flatten(-2))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    """Decoder whose embedding and readout are one matrix, as in a Memory Mosaic."""

    sums_losses = True  # forward takes `loss_mask`

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = nn.Embedding(config.max_len, config.d_model) if config.positions == "learned" else None
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.d_model, eps=NORM_EPS, bias=False)
        writers = {id(m) for block in self.blocks for m in (block.output, block.feed_forward.output)}
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=GPT2_STD)
            elif isinstance(module, nn.Linear):
                std = config.initial_std or module.in_features**-0.5
                updates = (2 if config.initial_std else 1) * config.num_layers if id(module) in writers else 1
                nn.init.normal_(module.weight, std=std / updates**0.5)

    def forward(self, tokens: Tensor, *, loss_mask: Tensor | None = None) -> Tensor | NextTokenLoss:
        """Return logits [B,N,V] after each of tokens [B,N]; with loss_mask the loss, as `MemoryMosaics` does."""
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if loss_mask is None:
            return F.linear(x, self.embedding.weight)
        return next_token_loss(x, self.embedding.weight, tokens, loss_mask)


def main(steps: int = 60) -> tuple[float, float]:
    """Train on random phrases of 12 tokens that repeat. Return the first and the last loss after the first phrase."""
    torch.manual_seed(0)
    model, losses = Transformer(TransformerConfig(24, 64, 4, 2, initial_std=None)), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        tokens = torch.rand(16, 24).argsort(1)[:, :12].repeat(1, 4)
        nats = F.cross_entropy(model(tokens)[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
        optimizer.zero_grad()
        nats.mean().backward()
        optimizer.step()
        losses.append(nats[:, 12:].mean().item())
    print(
        f"loss after the first phrase, nats per token: {losses[0]:.2f} at first, {losses[-1]:.2f} after {steps} steps"
    )
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
