"""MemoryMosaics: a language model of contextual and persistent memories."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retro_kernels as rk
from retro_model.base import checks
from retro_model.layers import NextTokenLoss, next_token_loss

from .cache import MosaicsCache
from .config import MosaicsConfig
from .contextual_memory import ContextualMemory, PersistentMemory

NORM_EPS = 1e-5  # epsilon of the layer norms, which have no bias, as in the authors' code


class Block(nn.Module):
    """Contextual memories, then persistent memories; each a pre-norm residual."""

    def __init__(self, config: MosaicsConfig, *, backend: str | None = None, **where):
        super().__init__()
        sizes, options = (config.d_model, config.num_heads), {"backend": backend, **where}
        options |= {"attention_dropout": config.attention_dropout, "output_dropout": config.output_dropout}
        self.context_norm = nn.LayerNorm(config.d_model, eps=NORM_EPS, bias=False, **where)
        self.context = ContextualMemory(*sizes, **options)
        self.persistent_norm = nn.LayerNorm(config.d_model, eps=NORM_EPS, bias=False, **where)
        self.persistent = PersistentMemory(*sizes, config.persistent_slots, **options)

    def forward(self, x: Tensor, segment: Tensor | None = None, states: tuple = (None, None)) -> Tensor:
        """x [B,N,d] -> [B,N,d]. states: cached states of the two layers."""
        x = x + self.context(self.context_norm(x), segment=segment, state=states[0])
        return x + self.persistent(self.persistent_norm(x), segment=segment, state=states[1])


class MemoryMosaics(nn.Module):
    """Language model of associative memories: it predicts the token that followed similar contexts.

    Blocks of contextual and persistent memories are between a token embedding and the same matrix as readout. There are
    no positions, so a sequence may be longer than any in training.

    Example:
        model = MemoryMosaics(MosaicsConfig.preset("small"))
        logits = model(tokens)                            # [B,N] -> [B,N,50304]
        texts = retro_model.generate(model, [[5, 3, 9], [7]], 64)

    Args:
        config: sizes.
        backend: of `retro_kernels`, for every layer; None: the fastest that serves a call.
        checkpoint: recompute each block's activations in the backward pass rather than keep them.

    Initial weights: N(0, 1/fan_in), residual outputs divided by the square root of the depth; scalars as in the
    authors' code.

    Source: Zhang et al., "Memory Mosaics", arXiv 2405.06394, section 5 and figure 8.
    """

    sums_losses = True  # takes `loss_mask`
    decodes_ragged = True  # rows of different lengths share a cache

    def __init__(
        self, config: MosaicsConfig, backend: str | None = None, device=None, dtype=None, *, checkpoint: bool = False
    ):
        super().__init__()
        where = {"device": device, "dtype": dtype}
        self.config, self.checkpoint = config, checkpoint
        self.memory_limit, self.eviction = None, "oldest"  # of caches, see `limit_memory`
        self.embedding = nn.Embedding(config.vocab_size, config.d_model, **where)
        self.blocks = nn.ModuleList(Block(config, backend=backend, **where) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.d_model, eps=NORM_EPS, bias=False, **where)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set initial weights, also of a model that was built on the meta device."""
        nn.init.normal_(self.embedding.weight, std=self.config.embedding_std)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
        for block in self.blocks:
            block.context.reset_parameters(self.config.num_layers)
            block.persistent.reset_parameters(self.config.num_layers)

    def forward(
        self,
        tokens: Tensor,
        *,
        segment: Tensor | None = None,
        cache: MosaicsCache | None = None,
        loss_mask: Tensor | None = None,
    ) -> Tensor | NextTokenLoss:
        """Return logits [B,N,V] of the token after each of `tokens` [B,N]; with `loss_mask`, a `NextTokenLoss`.

        Args:
            tokens: int64, any N. With a cache: the tokens after those it holds.
            segment: int64 [B,N], for packed documents: all memories restart where it changes. Not with a cache.
            cache: a `MosaicsCache` with the tokens before these; these are appended. The call is not differentiable.
            loss_mask: [B,N], True for tokens whose negative log-likelihood counts; a document's first token never does.
                The result is a `NextTokenLoss`, and the logits of all tokens are never in memory together.

        Raises:
            ValueError, TypeError: naming the argument. Ids outside the vocabulary raise only on the CPU.
        """
        x = self.activations(tokens, segment=segment, cache=cache)
        if loss_mask is None:
            return self.readout(x)
        checks.shape("loss_mask", loss_mask, "B,N", {"B": tokens.shape[0], "N": tokens.shape[1]})
        if segment is not None:
            loss_mask = F.pad(loss_mask[:, 1:] * (segment[:, 1:] == segment[:, :-1]), (1, 0))
        return next_token_loss(x * self.config.logit_scale, self.embedding.weight, tokens, loss_mask)

    def readout(self, x: Tensor) -> Tensor:
        """Return logits [...,V] of final activations [...,d]."""
        return F.linear(x * self.config.logit_scale, self.embedding.weight)

    def activations(self, tokens: Tensor, *, segment=None, cache: MosaicsCache | None = None) -> Tensor:
        """Return final hidden states [B,N,d], the input of `readout`. Arguments as in `forward`."""
        self._check(tokens, segment, cache)
        if cache is None:
            x = self.embedding(tokens)
            for block in self.blocks:
                recompute = self.checkpoint and torch.is_grad_enabled()
                x = checkpoint(block, x, segment, use_reentrant=False) if recompute else block(x, segment)
            return self.norm(x)
        with torch.no_grad():
            x = self.embedding(tokens)
            for block, *states in zip(self.blocks, cache.contextual, cache.persistent):
                x = block(x, None, states)
            cache.length += tokens.shape[1]
            return self.norm(x)

    def last_logits(self, tokens: Tensor, **options) -> Tensor:
        """Return logits [B,V] after the last token alone, as sampling needs. Arguments as in `forward`."""
        return self.readout(self.activations(tokens, **options)[:, -1])

    def make_cache(self, batch: int, capacity: int | None = None, *, evict: str | None = None) -> MosaicsCache:
        """Return an empty cache for `batch` rows. Arguments as in `MosaicsCache`."""
        return MosaicsCache(self.config, batch, capacity, limit=self.memory_limit, evict=evict or self.eviction)

    def limit_memory(self, pairs: int | None, evict: str = "oldest") -> None:
        """Limit the caches made from now on, by `generate` too, to `pairs` a memory; None: no limit."""
        MosaicsCache(self.config, 1, limit=pairs, evict=evict)  # checks both
        self.memory_limit, self.eviction = pairs, evict

    def shard_units(self) -> list[nn.Module]:
        """Return the modules that FSDP2 gathers one at a time."""
        return list(self.blocks)

    def _check(self, tokens: Tensor, segment: Tensor | None, cache: MosaicsCache | None) -> None:
        sizes = checks.tokens(tokens, self.config, self.embedding.weight.device, cache)
        if tokens.shape[1] == 0:
            raise ValueError("tokens: expected N >= 1; got N=0")
        if segment is None:
            return
        if cache is not None:
            raise ValueError("segment: expected None with a cache, whose rows are one document each; got a tensor")
        checks.shape("segment", segment, "B,N", sizes)
        if segment.dtype not in rk.checks.INTEGERS:
            raise TypeError(f"segment: expected integers; got {segment.dtype}")
        if segment.device != tokens.device:
            raise ValueError(f"segment: expected the device of the tokens, {tokens.device}; got {segment.device}")
