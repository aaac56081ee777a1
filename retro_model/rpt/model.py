"""RPT, the Retrieval-Pretrained Transformer: a decoder that retrieves from its own past."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from retro_model.base import checks
from retro_model.layers import NextTokenLoss, Rotation, initialise, next_token_loss, rotation

from .cache import RPTCache
from .config import RPTConfig
from .decoding import decode
from .inputs import check_index, check_tokens, neighbour_count
from .layers import DecoderLayer, Retrieved, norm
from .memory import SelfMemory


class RPT(SelfMemory):
    """Decoder whose upper half reads chunks of the sequence's own past, which its lower half retrieves.

        layer:   x += Attn(norm x);   (some upper layers) x += CCA(norm x);   x += FFN(norm x)     logits = norm(x) E^T
        chunk i: e_i = H_i + BiAttn(norm H_i);   q_i and k_i are projections of its mean
                 its neighbours are the K best j <= i - w by q_i·k_j, as [e_j; e_{j+1}] after attention to themselves
                 and to chunk i; the tokens from the last one of chunk i on attend them, weighted by their gates

    The logits at token t depend on tokens <= t alone.

    Example:
        model = RPT(RPTConfig.preset("rpt"))
        logits = model(tokens)                    # [B,N] int64 -> [B,N,50277], with what its retriever finds
        logits = model(tokens, index=index)       # with given neighbours [B,N//64,K], -1: none
        logits = model(tokens, retrieval=False)   # chunked cross-attention adds nothing

    Args:
        config: sizes and switches.
        backend: of `retro_kernels`, for every layer; None: the fastest that serves a call.
        checkpoint: recompute each layer's activations in the backward pass rather than keep them.

    Initial weights: N(0, 1/fan_in), scaled down by depth in the matrices that write to the residual stream. W_K starts
    equal to W_Q, so that at first chunks retrieve similar chunks.

    Source: Rubin and Berant, arXiv 2306.13421, section 3.
    """

    def __init__(
        self, config: RPTConfig, backend: str | None = None, *, checkpoint: bool = False, device=None, dtype=None
    ):
        super().__init__()
        where = {"device": device, "dtype": dtype}
        self.config, self.checkpoint = config, checkpoint
        self.embedding = nn.Embedding(config.vocab_size, config.d_model, **where)
        self.layers = nn.ModuleList(
            DecoderLayer(config, reads=layer in config.cca_layers, backend=backend, **where)
            for layer in range(1, config.num_layers + 1)
        )
        self.norm = norm(config.d_model, **where)
        untied = not config.tie_embeddings
        self.unembedding = nn.Linear(config.d_model, config.vocab_size, bias=False, **where) if untied else None
        self.add_memory(config, backend=backend, **where)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set initial weights, also of a model that was built on the meta device."""
        branches = 2 * self.config.num_layers + len(self.config.cca_layers)
        for part, passed in ((self.embedding, 1), (self.layers, branches), (self.norm, 1), (self.unembedding, 1)):
            if part is not None:
                initialise(part, passed)
        self.reset_memory()

    def forward(
        self,
        tokens: Tensor,
        *,
        index: Tensor | None = None,
        retrieval: bool = True,
        cache: RPTCache | None = None,
        num_neighbours: int | None = None,
        trunk_share: float = 1.0,
        return_retrieved: bool = False,
        loss_mask: Tensor | None = None,
    ) -> Tensor | NextTokenLoss | tuple[Tensor | NextTokenLoss, Retrieved | None]:
        """Return logits [B,N,V] of the token after each of `tokens` [B,N]; with `loss_mask`, a `NextTokenLoss`.

        Args:
            tokens: int64, any N. With a cache: the tokens after those it holds.
            index: int64 [B,L,K], neighbours of the L = N // m complete chunks, instead of the retriever's choice:
                numbers of earlier chunks, -1: none, -2 (`OWN`): the retriever's choice. With a cache: of the chunks
                that complete in this call.
            retrieval: False: chunked cross-attention adds nothing.
            cache: a `RPTCache` with the tokens before these; these are appended. The call is not differentiable.
            num_neighbours: K of the retriever's choice; None: config.num_neighbours. A cache has its own.
            trunk_share: factor of the retrieval loss's gradient that flows from q and k into the decoder.
            return_retrieved: also return scores, index and gates (None if nothing was retrieved).
            loss_mask: [B,N], True for tokens whose negative log-likelihood counts. The result is a `NextTokenLoss`, and
                the logits of all tokens are never in memory together; see `layers.linear_cross_entropy`.

        Raises:
            ValueError, TypeError: naming the argument. Values of tokens and index are checked on the CPU only.
        """
        options = {"cache": cache, "num_neighbours": num_neighbours, "trunk_share": trunk_share}
        x, retrieved = self.activations(tokens, index=index, retrieval=retrieval, **options)
        if loss_mask is None:
            out = self.readout(x)
        else:
            checks.shape("loss_mask", loss_mask, "B,N", {"B": tokens.shape[0], "N": tokens.shape[1]})
            out = next_token_loss(x, self.readout_weight, tokens, loss_mask)
        return (out, retrieved) if return_retrieved else out

    sums_losses = True  # takes `loss_mask`

    @property
    def readout_weight(self) -> Tensor:
        """[V,d], the embedding's if they are tied."""
        return self.embedding.weight if self.unembedding is None else self.unembedding.weight

    def readout(self, x: Tensor) -> Tensor:
        """Return logits [...,V] of final activations [...,d]."""
        return F.linear(x, self.readout_weight)

    def activations(
        self, tokens: Tensor, *, index=None, retrieval=True, cache=None, num_neighbours=None, trunk_share=1.0
    ) -> tuple[Tensor, Retrieved | None]:
        """Return final hidden states [B,N,d], the input of `readout`, and the retrieval. Arguments as in `forward`."""
        check_tokens(self, tokens, cache)
        retrieval = retrieval and self.config.uses_neighbours
        check_index(self, tokens, index, retrieval, cache)
        if cache is not None:
            return decode(self, tokens, index, retrieval, cache)
        config = self.config
        x, position, turn = self._lower(tokens)
        memory = retrieved = reader_turn = None
        if retrieval and (tokens.shape[1] >= config.chunk_len or config.null_slot):
            count = neighbour_count(config, num_neighbours)
            memory, retrieved = self.remember(x, index, count, trunk_share)
            reader_turn = rotation(self.reader_positions(position), config.head_dim, x.dtype)
        for layer in self.layers[config.lower_layers :]:
            x = self._run(layer, x, turn, memory, reader_turn)
        return self.norm(x), retrieved

    def _lower(self, tokens: Tensor) -> tuple[Tensor, Tensor, Rotation]:
        """Run the lower half: its states [B,N,d], the positions of the tokens and their rotation."""
        position = torch.arange(tokens.shape[1], device=tokens.device)
        x = F.dropout(self.embedding(tokens), self.config.dropout, self.training)
        turn = rotation(position, self.config.head_dim, x.dtype)
        for layer in self.layers[: self.config.lower_layers]:
            x = self._run(layer, x, turn)
        return x, position, turn

    def retrieve(self, tokens: Tensor, num_neighbours: int | None = None) -> tuple[Tensor, Tensor]:
        """Return scores [B,L,L] of every pair of chunks (-inf: not retrievable) and the K best [B,L,K] (-1: none).

        Raises: ValueError if the model has no retriever.
        """
        check_tokens(self, tokens, None)
        if self.retriever is None:
            raise ValueError("retrieve: expected a model with a retriever (config.retriever); got one without")
        query, key = self.retriever.project(self.retriever.encode(self._lower(tokens)[0]))
        found = self.retriever.search(query, key, neighbour_count(self.config, num_neighbours))
        return self.retriever.scores(query, key), found

    def shard_units(self) -> list[nn.Module]:
        """Return the modules that FSDP2 gathers one at a time; the others stay gathered."""
        return list(self.layers)

    decodes_ragged = True  # rows of different lengths share a cache
    generation_options = ("retrieval",)

    def make_cache(self, batch: int, capacity: int | None = None, *, num_neighbours: int | None = None) -> RPTCache:
        """Return an empty cache for `batch` rows. Arguments as in `RPTCache`."""
        return RPTCache(self.config, batch, capacity, num_neighbours=num_neighbours)

    def last_logits(self, tokens: Tensor, **options) -> Tensor:
        """Return logits [B,V] after the last token alone, as sampling needs. Arguments as in `forward`."""
        return self.readout(self.activations(tokens, **options)[0][:, -1])

    def _run(self, layer, *args):
        recompute = self.checkpoint and torch.is_grad_enabled()
        return checkpoint(layer, *args, use_reentrant=False) if recompute else layer(*args)
