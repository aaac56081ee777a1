"""A frozen decoder with an encoder of neighbours and chunked cross-attentions: see `retrofit`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from torch import Tensor, nn

from retro_model.layers import ChunkedCrossAttention, RMSNorm, initialise
from retro_model.retro.config import RetroConfig
from retro_model.retro.encoder import NORM_EPS, NeighbourEncoder
from retro_model.retro.retrieval import Encoded, Retrieval

from .base import FrozenDecoder, RetrofitCache


class RetrofittedDecoder(FrozenDecoder):
    """A frozen causal decoder, with a chunked cross-attention after the self-attention of some of its blocks.

    A block's self-attention update a becomes a + CCA(norm(x + a)), x the block's input. The encoder is conditioned on x
    + a of the first such block.

    Args:
        decoder, config: see `FrozenDecoder`.
        blocks, attention: see `retrofit`.
    """

    def __init__(
        self,
        decoder: nn.Module,
        config: RetroConfig,
        blocks: Sequence[nn.Module],
        attention: str,
        *,
        backend: str | None = None,
    ):
        super().__init__(decoder, config)
        where = self.where
        embedding = nn.Embedding(config.vocab_size, config.encoder_d_model, **where)
        self.encoder = NeighbourEncoder(config, embedding, backend=backend, **where)
        names = [str(layer) for layer in config.cca_layers]
        sizes = (config.d_model, config.num_heads, config.head_dim)
        options = {"chunk_len": config.chunk_len, "context_dim": config.encoder_d_model}
        options |= {"dropout": config.dropout, "backend": backend}
        self.cca = nn.ModuleDict({name: ChunkedCrossAttention(*sizes, **options, **where) for name in names})
        self.cca_norm = nn.ModuleDict({name: RMSNorm(config.d_model, eps=NORM_EPS, **where) for name in names})
        for part in (self.cca, self.cca_norm):
            initialise(part, branches=2 * config.num_layers + len(names))
        self._hook(blocks, attention)

    def _checkpointing_options(self) -> dict:
        return {"context_fn": self._checkpoint_contexts}

    def _checkpoint_contexts(self):
        """Return contexts of checkpointing: a block that is computed again gets the retrieval of its own pass."""
        return nullcontext(), self._during(self._running)

    def _with_neighbours(self, tokens, retrieved, starts, cache: RetrofitCache | None, options):
        retrieval = Retrieval(self.encoder, tokens, retrieved.neighbours, retrieved.mask, starts=starts, cache=cache)
        with self._during(PassState(retrieval)):
            out = self.decoder(tokens, **options)
        if cache is not None:
            retrieval.finish()
        return out

    def _retrieved(self, layer: int, hidden: Tensor) -> Tensor | None:
        here, retrieval = self._running, self._running.retrieval
        hidden = hidden.to(next(self.cca.parameters()).dtype)  # the decoder may be in half precision
        if layer == self.config.cca_layers[0]:
            here.encoded = retrieval.encode(hidden)  # again where checkpointing computes the block again
        if not retrieval.retrieves:
            return None
        name = str(layer)
        return retrieval.cross_attend(self.cca[name], self.cca_norm[name](hidden), here.encoded, layer)


class PassState:
    """State that one forward pass hands from hook to hook."""

    def __init__(self, retrieval: Retrieval):
        self.retrieval = retrieval
        self.inputs: dict[int, Tensor] = {}  # inputs of the blocks that retrieve
        self.encoded: Encoded | None = None
