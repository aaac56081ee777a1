"""Neighbour encoder: a small bidirectional transformer, conditioned on the chunk that retrieved the neighbours."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from retro_model.base import checks
from retro_model.layers import FeedForward, RelativeAttention, RMSNorm, initialise

from .config import RetroConfig

NORM_EPS = 1e-6


class EncoderLayer(nn.Module):
    """Bidirectional attention, cross-attention to the retrieving chunk where `cross`, feed-forward; each a pre-norm
    residual."""

    def __init__(self, config: RetroConfig, *, cross: bool, backend: str | None = None, **where):
        super().__init__()
        width, self.dropout = config.encoder_d_model, config.dropout
        sizes, options = (width, config.encoder_heads, config.encoder_head_dim), {"backend": backend, **where}
        self.attention_norm = RMSNorm(width, eps=NORM_EPS, **where)
        self.attention = RelativeAttention(*sizes, dropout=self.dropout, **options)
        self.cross_norm = self.cross = None
        if cross:
            self.cross_norm = RMSNorm(width, eps=NORM_EPS, **where)
            self.cross = RelativeAttention(*sizes, context_dim=config.d_model, dropout=self.dropout, **options)
        self.feed_forward_norm = RMSNorm(width, eps=NORM_EPS, **where)
        self.feed_forward = FeedForward(width, config.encoder_d_ff, **where)

    def forward(self, x: Tensor, chunks: Tensor, key_mask: Tensor | None) -> Tensor:
        """x [S,R,d'] for S neighbours -> [S,R,d'].

        Args:
            chunks: activations [C,M,d] of the retrieving chunks. Neighbour s belongs to chunk s // (S/C).
            key_mask: bool [S,R], True = a token.
        """
        x = self._added(x, self.attention(self.attention_norm(x), key_mask=key_mask))
        if self.cross is not None:
            # positions restart in every neighbour, so each is a batch entry; a chunk is projected once, then repeated
            neighbours = x.shape[0] // max(chunks.shape[0], 1)
            key, value = (t.repeat_interleave(neighbours, 0) for t in self.cross.project(chunks))
            first = 1 - chunks.shape[1]  # d_enc(i',i) = i' - i
            rel_key = self.cross.positions(first, x.shape[1] - first)
            x = self._added(x, self.cross.attend(self.cross_norm(x), key, value, rel_key, first, query_offset=0))
        return self._added(x, self.feed_forward(self.feed_forward_norm(x)))

    def _added(self, x: Tensor, update: Tensor) -> Tensor:
        return x + F.dropout(update, self.dropout, self.training)


class NeighbourEncoder(nn.Module):
    """Encoder of neighbours, each by itself, conditioned on the activations of the chunk that retrieved it.

    A token attends the unmasked tokens of its own neighbour. In the layers of `encoder_cross_layers` it also attends
    the M activations of the retrieving chunk, at displacement d_enc(i',i) = i' - i. RMSNorm is applied to these
    activations, because the decoder's residual stream is not normalised, and to the result.

    Example:
        encoder = NeighbourEncoder(config, nn.Embedding(config.vocab_size, config.encoder_d_model))
        encoded = encoder(neighbours, chunks)  # neighbours [B,L,K,R] int64, chunks [B,L,M,d] -> [B,L,K,R,d']

    Args:
        config: sizes.
        embedding: tokens -> [...,d']; the decoder's own where embeddings are shared.
        backend: of `retro_kernels`; None: the fastest that serves a call.

    Source: Borgeaud et al., arXiv 2112.04426, section 2.4, Algorithm 1, appendix B.1.2.
    """

    def __init__(
        self, config: RetroConfig, embedding: nn.Embedding, *, backend: str | None = None, device=None, dtype=None
    ):
        super().__init__()
        where = {"device": device, "dtype": dtype}
        if (width := getattr(embedding, "embedding_dim", config.encoder_d_model)) != config.encoder_d_model:
            raise ValueError(f"embedding: expected one of width encoder_d_model={config.encoder_d_model}; got {width}")
        self.config, self.embedding = config, embedding
        self.chunk_norm = RMSNorm(config.d_model, eps=NORM_EPS, **where) if config.encoder_cross_layers else None
        self.layers = nn.ModuleList(
            EncoderLayer(config, cross=layer in config.encoder_cross_layers, backend=backend, **where)
            for layer in range(1, config.encoder_layers + 1)
        )
        self.norm = RMSNorm(config.encoder_d_model, eps=NORM_EPS, **where)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set initial weights, see `initialise`, the embedding's included."""
        initialise(self, branches=2 * self.config.encoder_layers + len(self.config.encoder_cross_layers))

    def forward(self, neighbours: Tensor, chunks: Tensor, *, neighbour_mask: Tensor | None = None) -> Tensor:
        """Return encodings [B,L,K,R,d'] of neighbours [B,L,K,R].

        Args:
            neighbours: int64 token ids, in the vocabulary also under a False mask.
            chunks: activations [B,L,M,d] of the retrieving chunks.
            neighbour_mask: bool [B,L,K] or [B,L,K,R], True = a token. Encodings under False are finite and arbitrary.

        Raises:
            ValueError, TypeError: naming the argument.
        """
        sizes: dict[str, int] = {"d": self.config.d_model}
        checks.shape("neighbours", neighbours, "B,L,K,R", sizes)
        checks.shape("chunks", chunks, "B,L,M,d", sizes)
        vocab_size = getattr(self.embedding, "num_embeddings", self.config.vocab_size)
        checks.token_ids("neighbours", neighbours, vocab_size, chunks.device)
        key_mask = None
        if neighbour_mask is not None:
            checks.neighbour_mask(neighbour_mask, neighbours)
            key_mask = checks.token_mask(neighbour_mask, neighbours).flatten(0, 2)
        chunks, tokens = chunks.flatten(0, 1), neighbours.flatten(0, 2)
        if self.chunk_norm is not None:
            chunks = self.chunk_norm(chunks)
        x = F.dropout(self.embedding(tokens), self.config.dropout, self.training)  # [S,R,d']
        for layer in self.layers:
            x = layer(x, chunks, key_mask)
        return self.norm(x).unflatten(0, neighbours.shape[:3])
