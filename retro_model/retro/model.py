"""Retro: a causal decoder with chunked cross-attention to retrieved neighbours in some of its layers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from retro_model import layers
from retro_model.base import checks

from .cache import RetroCache, left_mask
from .config import RetroConfig
from .encoder import NORM_EPS, NeighbourEncoder
from .inputs import Retrieved, check_inputs, row_starts
from .retrieval import Encoded, Retrieval


class DecoderLayer(nn.Module):
    """Causal attention, chunked cross-attention in the layers of `cca_layers`, feed-forward; each a pre-norm
    residual."""

    def __init__(self, config: RetroConfig, index: int, *, backend: str | None = None, **where):
        super().__init__()
        self.index, self.dropout = index, config.dropout  # index: from 1
        sizes = (config.d_model, config.num_heads, config.head_dim)
        options = {"dropout": config.dropout, "backend": backend, **where}
        self.attention_norm = layers.RMSNorm(config.d_model, eps=NORM_EPS, **where)
        self.attention = layers.RelativeAttention(*sizes, causal=True, **options)
        self.cca_norm = self.cca = None
        if index in config.cca_layers:
            self.cca_norm = layers.RMSNorm(config.d_model, eps=NORM_EPS, **where)
            options |= {"chunk_len": config.chunk_len, "context_dim": config.encoder_d_model}
            self.cca = layers.ChunkedCrossAttention(*sizes, **options)
        self.feed_forward_norm = layers.RMSNorm(config.d_model, eps=NORM_EPS, **where)
        self.feed_forward = layers.FeedForward(config.d_model, config.d_ff, **where)

    def forward(
        self, x: Tensor, retrieval=None, encoded: Encoded | None = None, *, key_mask=None, cache=None, part=None
    ) -> tuple[Tensor, Encoded | None]:
        """Return x [B,N,d] and the encoded neighbours, which the first layer with CCA encodes for the later ones.

        Args:
            retrieval: of this call; None: without retrieval.
            encoded: result of an earlier layer.
            key_mask: bool [B,S], False on the padding before a row's first token.
            cache: of this layer's self-attention.
            part: range of the sequences that this process holds, see `Retro.forward`.
        """
        x = self._residual(self.attention_norm, partial(self.attention, key_mask=key_mask, cache=cache, part=part), x)
        if self.cca is not None and retrieval is not None:
            encoded = retrieval.encode(x) if encoded is None else encoded
            if retrieval.retrieves:
                read = partial(retrieval.cross_attend, self.cca, encoded=encoded, layer=self.index)
                x = self._residual(self.cca_norm, read, x)
        return self._residual(self.feed_forward_norm, self.feed_forward, x), encoded

    def _residual(self, norm: nn.Module, update: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return x plus `update` of the normalised x, with dropout."""
        return x + F.dropout(update(norm(x)), self.dropout, self.training)


class Retro(nn.Module):
    """Retrieval-enhanced transformer: next-token logits from the tokens so far and their chunks' neighbours.

    The encoder runs once, conditioned on the residual stream after the self-attention of layer min(P), before that
    layer's chunked cross-attention (Algorithm 1). The logits at token t depend on tokens <= t and on the neighbours of
    chunk u only for t >= (u+1)M - 1.

    Example:
        model = Retro(RetroConfig.preset("172m"))
        logits = model(tokens, neighbours)  # tokens [B,N], neighbours [B,N//64,K,128] int64 -> [B,N,128000]
        logits = model(tokens)              # RETRO[OFF]: the plain decoder

    Args:
        config: sizes; with cca_layers=() the baseline transformer.
        backend: of `retro_kernels`, for every layer; None: the fastest that serves a call.
        checkpoint: recompute each layer's activations in the backward pass rather than keep them; the encoder's with
            those of layer min(P), in which it runs.

    Initial weights: N(0, 1/fan_in), residual outputs scaled down by depth, see `layers.initialise`.

    Source: Borgeaud et al., arXiv 2112.04426, sections 2.4 and 2.5, Algorithm 1.
    """

    def __init__(
        self, config: RetroConfig, *, backend: str | None = None, checkpoint: bool = False, device=None, dtype=None
    ):
        super().__init__()
        where = {"device": device, "dtype": dtype}
        self.config, self.checkpoint = config, checkpoint
        self.embedding = nn.Embedding(config.vocab_size, config.d_model, **where)
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, backend=backend, **where) for index in range(1, config.num_layers + 1)
        )
        self.norm = layers.RMSNorm(config.d_model, eps=NORM_EPS, **where)
        self.readout = nn.Linear(config.d_model, config.vocab_size, bias=False, **where)
        self.encoder = None
        if config.retrieves:
            embedding = self.embedding
            if not config.share_embeddings:
                embedding = nn.Embedding(config.vocab_size, config.encoder_d_model, **where)
            self.encoder = NeighbourEncoder(config, embedding, backend=backend, **where)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set initial weights, see `layers.initialise`, also of a model that was built on the meta device."""
        if self.encoder is not None:
            self.encoder.reset_parameters()
        branches = 2 * self.config.num_layers + len(self.config.cca_layers)
        for part in (self.embedding, self.layers, self.norm, self.readout):
            layers.initialise(part, branches)

    def forward(
        self,
        tokens: Tensor,
        neighbours: Tensor | None = None,
        *,
        neighbour_mask: Tensor | None = None,
        cache: RetroCache | None = None,
        token_mask: Tensor | None = None,
        loss_mask: Tensor | None = None,
        part=None,
    ) -> Tensor | layers.NextTokenLoss:
        """Return logits [B,N,V] of the token after each of `tokens` [B,N]; with `loss_mask`, a `NextTokenLoss`.

        Args:
            tokens: int64, N <= max_len; N need not be a multiple of M = chunk_len. With a cache: the tokens after those
                it holds.
            neighbours: int64 [B,L,K,R] of the L = N // M complete chunks, any K and R; None: RETRO[OFF]. With a cache:
                of the L = cache.completes(N) chunks that complete within this call, with the K and R of the first call.
                A row that completes fewer uses its first ones. None: these chunks have no neighbours.
            neighbour_mask: bool [B,L,K] or [B,L,K,R], True = a token to attend; a missing neighbour is all False. Ids
                under False must be in the vocabulary, and have no effect.
            cache: a `RetroCache` with the tokens before these; these are appended. The call is not differentiable.
            token_mask: bool [B,N], False on padding before or after a row's tokens. A row's logits are the same
                as if it were alone, because its chunks are counted from its first token. L is the number of chunks of
                the longest row. A cache takes a token_mask only in its first call.
            loss_mask: [B,N], True for tokens whose negative log-likelihood counts. The result is a `NextTokenLoss`, and
                the logits of all tokens are never in memory together; see `layers.linear_cross_entropy`.
            part: this process's range of longer sequences, see `retro_model.parallel.SequencePart`. tokens and
                neighbours belong to the range.

        Raises:
            ValueError, TypeError: naming the argument. Ids outside the vocabulary raise only on the CPU, because
                reading them on a GPU would make the host wait in every call; call `checks.token_range` to check them.
        """
        options = {"neighbour_mask": neighbour_mask, "cache": cache, "token_mask": token_mask, "part": part}
        x = self.activations(tokens, neighbours, **options)
        if loss_mask is None:
            return self.readout(x)
        checks.shape("loss_mask", loss_mask, "B,N", {"B": tokens.shape[0], "N": tokens.shape[1]})
        loss = layers.next_token_loss if part is None else part.next_token_loss
        return loss(x, self.readout.weight, tokens, loss_mask)

    def activations(
        self, tokens: Tensor, neighbours=None, *, neighbour_mask=None, cache=None, token_mask=None, part=None
    ) -> Tensor:
        """Return final hidden states [B,N,d], the input of `readout`. Arguments as in `forward`."""
        if part is not None:
            part.check(self.config, tokens, cache, token_mask)
        starts = row_starts("token_mask", token_mask, tokens)
        if cache is not None and starts is not None:
            cache.pad(starts)
        retrieved = Retrieved(neighbours, neighbour_mask)
        check_inputs(self.config, tokens, retrieved, self.embedding.weight.device, cache, starts)
        with nullcontext() if cache is None else torch.no_grad():
            return self._activations(tokens, retrieved, cache, starts, part)

    def _activations(self, tokens: Tensor, retrieved: Retrieved, cache: RetroCache | None, starts, part) -> Tensor:
        """`activations` of checked arguments. starts: see `row_starts`."""
        count, retrieval, key_mask = tokens.shape[1], None, None
        neighbours, mask = retrieved
        if self.encoder is not None and (cache is not None or (neighbours is not None and neighbours.shape[1])):
            if part is not None:
                retrieval = part.retrieval(self.encoder, neighbours, mask)
            else:
                retrieval = Retrieval(self.encoder, tokens, neighbours, mask, cache=cache, starts=starts)
        if cache is not None:
            key_mask = cache.key_mask(count, tokens.device)
        elif starts is not None:
            key_mask = left_mask(starts, count, tokens.device)
        encoded = None
        x = F.dropout(self.embedding(tokens), self.config.dropout, self.training)
        for layer in self.layers:
            kept = None if cache is None else cache.layers[layer.index - 1]
            x, encoded = self._run(layer, x, retrieval, encoded, key_mask=key_mask, cache=kept, part=part)
        if cache is not None:
            cache.length += count
            if retrieval is not None:
                retrieval.finish()
        return self.norm(x)

    sums_losses = True  # takes `loss_mask`
    decodes_ragged = True  # rows of different lengths share a cache
    pads_prompts = "token_mask"  # and enter together under this mask

    def make_cache(self, batch: int, capacity: int | None = None) -> RetroCache:
        """Return an empty cache for `batch` rows of at most `capacity` tokens; None: config.max_len."""
        return RetroCache(self.config, batch, capacity)

    def last_logits(self, tokens: Tensor, neighbours: Tensor | None = None, **options) -> Tensor:
        """Return logits [B,V] after the last token alone, as sampling needs. Arguments as in `forward`."""
        return self.readout(self.activations(tokens, neighbours, **options)[:, -1])

    def shard_units(self) -> list[nn.Module]:
        """Return the modules that FSDP2 gathers one at a time: the layers of encoder and decoder."""
        return [*(() if self.encoder is None else self.encoder.layers), *self.layers]

    def _run(self, layer: DecoderLayer, *args, **options):
        recompute = self.checkpoint and torch.is_grad_enabled()
        return checkpoint(layer, *args, use_reentrant=False, **options) if recompute else layer(*args, **options)
