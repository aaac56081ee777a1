"""Retrofit a trained decoder with retrieval from its own past. The added weights train; the decoder's stay frozen."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from retro_model.layers import initialise, rotation
from retro_model.retro.inputs import check_positions, row_starts
from retro_model.rpt.cache import RPTCache
from retro_model.rpt.config import RPTConfig
from retro_model.rpt.decoding import Call, begin
from retro_model.rpt.inputs import check_index, check_tokens
from retro_model.rpt.layers import CrossAttention, Memory, Retrieved, norm
from retro_model.rpt.memory import SelfMemory
from retro_model.rpt.model import RPT

from .base import Frozen
from .decoders import around, check_fixed, named_blocks

HEAD_DIM = 64  # width of the added attentions' heads, if the model is wide enough
#: fields that an RPT without neighbours determines
FIXED = (
    *("vocab_size", "d_model", "d_ff", "num_heads", "num_layers"),
    *("segment", "window", "gated_ffn", "tie_embeddings"),
)


def retrofit_rpt(
    decoder: nn.Module,
    *,
    blocks: Sequence[nn.Module] | None = None,
    attention: str | None = None,
    backend: str | None = None,
    **changes,
) -> RPT | RetrofittedRPT:
    """Return a model that retrieves from its own past, around a decoder that is frozen in place.

    Before training its logits are the decoder's.

    Example:
        model = retrofit_rpt(LlamaForCausalLM.from_pretrained(...), cca_layers=(12, 14, 16), excluded_chunks=64)
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-4)
        logits, retrieved = model(tokens, return_retrieved=True)  # for `lambda_rank`
        logits = model(tokens, retrieval=False)                   # the decoder's own, to the bit

    Args:
        decoder: an `RPT` without neighbours, or a causal decoder of pre-norm blocks that add their attention's output
            to their input (GPT-2, Llama, Mistral, Qwen and similar models of Hugging Face).
        blocks, attention: its blocks and the name of a block's self-attention; None: looked up where the Hugging Face
            library keeps them.
        backend: of `retro_kernels`; None: the fastest that serves a call.
        changes: fields of `RPTConfig`: cca_layers, chunk_len, num_neighbours, excluded_chunks (chunks that the decoder
            attends itself), num_heads of the added attentions, ... cca_layers None or absent: every second layer of the
            upper half.

    Returns:
        An `RPT` that shares the decoder's weights if the decoder is an `RPT`, else a `RetrofittedRPT`.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if changes.get("cca_layers", ()) is None:
        del changes["cca_layers"]
    if not changes.get("cca_layers", True):
        raise ValueError("cca_layers: expected at least one layer to retrofit; got ()")
    if isinstance(decoder, RPT):
        return _retrofit_own(decoder, backend, changes)
    blocks, attention = named_blocks(decoder, blocks, attention)
    theirs = getattr(decoder, "config", None)
    for name in ("vocab_size", "hidden_size"):
        if not isinstance(getattr(theirs, name, None), int):
            raise TypeError(f"decoder: expected a model whose config has {name}; got {type(decoder).__name__}")
    width = theirs.hidden_size
    sizes = {"vocab_size": theirs.vocab_size, "d_model": width, "d_ff": 4 * width, "num_layers": len(blocks)}
    sizes |= {"num_heads": max(1, width // HEAD_DIM), "cca_layers": _every_second(len(blocks)), "retriever": True}
    check_fixed(changes, {name: sizes[name] for name in ("vocab_size", "d_model", "num_layers")})
    return RetrofittedRPT(decoder, RPTConfig(**sizes | changes), blocks, attention, backend=backend)


def _retrofit_own(decoder: RPT, backend: str | None, changes: dict) -> RPT:
    if decoder.config.uses_neighbours:
        got = f"cca_layers={decoder.config.cca_layers}"
        raise ValueError(f"decoder: expected an RPT without neighbours (cca_layers=()); got {got}")
    check_fixed(changes, {name: getattr(decoder.config, name) for name in FIXED})
    layers = _every_second(decoder.config.num_layers)
    config = decoder.config.replace(**{"cca_layers": layers, "retriever": True} | changes)
    model = around(decoder, RPT, config, backend)
    for layer in model.layers:
        if layer.cca is not None:
            nn.init.zeros_(layer.cca.output.weight)
    return model


def _every_second(num_layers: int) -> tuple[int, ...]:
    return tuple(range(num_layers // 2 + 2, num_layers + 1, 2)) or (num_layers,)


class RetrofittedRPT(SelfMemory, Frozen):
    """Frozen causal decoder. Some of its upper blocks attend chunks of the states after its lower half.

    A block's self-attention update a becomes a + CCA(norm(x + a)), where x is the block's input. With a cache, the
    decoder keeps its own keys and values next to an RPT's, and all rows have one length.

    Args:
        decoder: frozen in place. decoder(tokens, **options) returns logits or an object with `.logits`. Its own
            `generate` decodes without retrieval.
        config: sizes of the added layers. blocks, attention, backend: see `retrofit_rpt`.
    """

    def __init__(
        self,
        decoder: nn.Module,
        config: RPTConfig,
        blocks: Sequence[nn.Module],
        attention: str,
        *,
        backend: str | None = None,
    ):
        super().__init__(decoder, config)
        weight = next(decoder.parameters())
        where = {"device": weight.device, "dtype": weight.dtype}
        names = [str(layer) for layer in config.cca_layers]
        self.cca = nn.ModuleDict({name: CrossAttention(config, backend=backend, **where) for name in names})
        self.cca_norm = nn.ModuleDict({name: norm(config.d_model, **where) for name in names})
        self.add_memory(config, backend=backend, **where)
        for part in (self.cca, self.cca_norm):
            initialise(part, branches=2 * config.num_layers + len(names))
        self.reset_memory()
        for cca in self.cca.values():
            nn.init.zeros_(cca.output.weight)
        blocks[config.lower_layers - 1].register_forward_hook(self._remember)
        self._hook(blocks, attention)

    def forward(
        self,
        tokens: Tensor,
        *,
        index: Tensor | None = None,
        retrieval: bool = True,
        num_neighbours: int | None = None,
        trunk_share: float = 1.0,
        return_retrieved: bool = False,
        cache: RPTCache | None = None,
        **options,
    ) -> Tensor | tuple[Tensor, Retrieved | None]:
        """Return logits [B,N,V] of tokens [B,N], without padding on the left. Arguments as in `RPT.forward`.

        options: arguments of the decoder; with retrieval, no padding on the left and no packed rows. With a cache, no
            attention_mask and no position_ids.
        """
        options = self.decoder_options(options, cache is not None)
        self._check_rows(tokens, retrieval, cache, options)
        check_tokens(self, tokens, cache)
        check_index(self, tokens, index, retrieval, cache)
        if cache is not None:
            return self._decode(tokens, index, retrieval, cache, return_retrieved, options)
        here = None
        if retrieval and (tokens.shape[1] >= self.config.chunk_len or self.config.null_slot):
            here = PassState(index, num_neighbours or self.config.num_neighbours, trunk_share)
            position = self.reader_positions(torch.arange(tokens.shape[1], device=tokens.device))
            here.reader_turn = rotation(position, self.config.head_dim)
        with self._during(here):
            out = self.decoder(tokens, **options)
        logits = getattr(out, "logits", out)
        return (logits, None if here is None else here.retrieved) if return_retrieved else logits

    @staticmethod
    def _check_rows(tokens: Tensor, retrieval: bool, cache: RPTCache | None, options: dict) -> None:
        """Raise ValueError for masks and positions under which a row's chunks do not begin in column 0."""
        mask, positions = (options.get(name) for name in ("attention_mask", "position_ids"))
        for name, value in (("attention_mask", mask), ("position_ids", positions)):
            if cache is not None and value is not None:
                raise ValueError(f"{name}: expected None with a cache, whose rows begin together; got a tensor")
        if not retrieval:
            return
        if row_starts("attention_mask", mask, tokens):
            raise ValueError("attention_mask: expected padding after a row's tokens alone; got some before them")
        if positions is not None:
            check_positions(positions, tokens, mask)

    @torch.no_grad()
    def _decode(self, tokens: Tensor, index, retrieval: bool, cache: RPTCache, return_retrieved: bool, options: dict):
        """`forward` for tokens after those in the cache."""
        retrieved, count = begin(cache, self.embedding.weight, retrieval, tokens.shape[1]), tokens.shape[1]
        here = None
        if retrieval:
            here = PassState(index, cache.num_neighbours, 1.0)
            here.call = Call(self, cache, slice(None), list(cache.positions), list(range(cache.batch)), count)
            here.reader_turn = rotation(self.reader_positions(here.call.position), self.config.head_dim)
        with self._during(here):
            out = self.decoder(tokens, **options | {self._cache_name: cache.decoder, "use_cache": True})
        cache.decoder = getattr(out, self._cache_name)
        if here is not None:
            here.call.store()
            here.call.record(retrieved)
        cache.positions = [p + count for p in cache.positions]
        return (out.logits, retrieved) if return_retrieved else out.logits

    decodes_ragged = False  # the decoder's own cache needs rows of one length
    generation_options = ("retrieval",)

    def make_cache(self, batch: int, capacity: int | None = None, *, num_neighbours: int | None = None) -> RPTCache:
        """Return an empty cache for `batch` rows of one length. Arguments as in `RPTCache`."""
        return RPTCache(self.config, batch, capacity, num_neighbours=num_neighbours)

    def last_logits(self, tokens: Tensor, **options) -> Tensor:
        """Return logits [B,V] after the last token. Arguments as in `forward`."""
        return self(tokens, **options)[:, -1]

    @property
    def embedding(self) -> nn.Module:
        """The decoder's."""
        return self.decoder.get_input_embeddings()

    def _remember(self, block: nn.Module, args: tuple, output) -> None:
        here = self._running
        if here is not None:
            hidden = output[0] if isinstance(output, tuple) else output
            if here.call is not None:
                here.call.complete(hidden, here.index)
                return
            here.memory, here.retrieved = self.remember(hidden, here.index, here.k, here.trunk_share)

    def _retrieved(self, layer: int, hidden: Tensor) -> Tensor:
        here, cca, x = self._running, self.cca[str(layer)], self.cca_norm[str(layer)](hidden)
        if here.call is None:
            return cca(x, here.memory, here.reader_turn)
        return here.call.read(layer, cca, x, here.reader_turn)


class PassState:
    """State of one forward pass, shared by the hooks."""

    def __init__(self, index: Tensor | None, k: int, trunk_share: float):
        self.index, self.k, self.trunk_share = index, k, trunk_share
        self.inputs, self.reader_turn = {}, None
        self.call: Call | None = None  # with a cache, instead of a memory
        self.memory: Memory | None = None
        self.retrieved: Retrieved | None = None
