"""Baseline of Memory Mosaics: a GPT-2-like decoder with as many parameters a block as a mosaic with N_m = 3.5 d."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retro_kernels as rk
from retro_model.base import checks
from retro_model.base.config import Config
from retro_model.layers import FeedForward, NextTokenLoss, next_token_loss

ROTARY_BASE = 10_000.0  # longest wavelength / 2 pi: Su et al., arXiv 2104.09864, section 3.2
NORM_EPS = 1e-5
GPT2_STD = 0.02  # Radford et al., 2019
POSITIONS = ("rotary", "learned")


@dataclass(frozen=True)
class TransformerConfig(Config):
    """Sizes of the baseline; positions: "rotary", or "learned" for at most max_len tokens.

    initial_std: of all matrices but embeddings; residual outputs are divided by the square root of their number, as in
    GPT-2. None: fan_in**-0.5, residual outputs divided by the square root of the depth, as in a Memory Mosaic. Which
    of the two learns faster depends on the task.
    """

    vocab_size: int
    d_model: int
    num_heads: int
    num_layers: int
    positions: str = "rotary"
    max_len: int = 1024
    initial_std: float | None = GPT2_STD

    def __post_init__(self):
        if self.positions not in POSITIONS:
            raise ValueError(f"positions: expected one of {', '.join(POSITIONS)}; got {self.positions!r}")
        if self.d_model % self.num_heads:
            raise ValueError(f"num_heads: expected a divisor of d_model={self.d_model}; got {self.num_heads}")
        checks.head_dim("d_model / num_heads", self.d_model // self.num_heads)


def rotated(x: Tensor) -> Tensor:
    """Return x [B,N,H,D] with the pair (x_i, x_{i+D/2}) of position t turned by t * 10000^(-2i/D)."""
    half = x.shape[-1] // 2
    frequency = ROTARY_BASE ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angle = (torch.arange(x.shape[1], device=x.device)[:, None] * frequency)[:, None]  # [N,1,D/2]
    sine, cosine = angle.sin().to(x.dtype), angle.cos().to(x.dtype)
    first, second = x.split(half, -1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], -1)


class TransformerBlock(nn.Module):
    """Causal self-attention, then a feed-forward four times as wide; each a pre-norm residual."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        d = config.d_model
        self.num_heads, self.rotary = config.num_heads, config.positions == "rotary"
        self.attention_norm, self.feed_forward_norm = (nn.LayerNorm(d, eps=NORM_EPS, bias=False) for _ in range(2))
        self.query, self.key, self.value, self.output = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.feed_forward = FeedForward(d, 4 * d)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))

    def attend(self, x: Tensor) -> Tensor:
        heads = (self.num_heads, -1)
        query, key, value = (linear(x).unflatten(-1, heads) for linear in (self.query, self.key, self.value))
        if self.rotary:
            query, key = rotated(query), rotated(key)
        return self.output(rk.relative_attention(query, key, value, causal=True).flatten(-2))


class Transformer(nn.Module):
    """Logits of the next token; embedding and readout are one matrix, as in a Memory Mosaic."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = nn.Embedding(config.max_len, config.d_model) if config.positions == "learned" else None
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.d_model, eps=NORM_EPS, bias=False)
        gpt2 = config.initial_std is not None
        writers = {id(m) for block in self.blocks for m in (block.output, block.feed_forward.output)}
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=GPT2_STD)
            elif isinstance(module, nn.Linear):
                std = config.initial_std if gpt2 else module.in_features**-0.5
                updates = (2 if gpt2 else 1) * config.num_layers if id(module) in writers else 1
                nn.init.normal_(module.weight, std=std / updates**0.5)

    sums_losses = True  # takes `loss_mask`

    def forward(self, tokens: Tensor, *, loss_mask: Tensor | None = None) -> Tensor | NextTokenLoss:
        """Return logits [B,N,V] after each of tokens [B,N], or with loss_mask their loss, as `MemoryMosaics` does.

        Raises: ValueError for more tokens than learned positions.
        """
        x = self.embedding(tokens)
        if self.positions is not None:
            if tokens.shape[1] > self.config.max_len:
                most = f"max_len = {self.config.max_len} learned positions"
                raise ValueError(f"tokens: expected N <= {most}; got N={tokens.shape[1]}")
            x = x + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if loss_mask is None:
            return F.linear(x, self.embedding.weight)
        return next_token_loss(x, self.embedding.weight, tokens, loss_mask)
