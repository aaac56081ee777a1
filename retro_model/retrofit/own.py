"""Retrieval by a decoder's own attention. Only a bias and a scale a head are added: it works before training too."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from retro_model.base import checks, transfer
from retro_model.retro.cache import left_mask
from retro_model.retro.inputs import Retrieved
from retro_model.retro.recurring import Readings, Sharing, Shelf, autocast_types, digest, fingerprint, row_keys

from .base import FrozenDecoder, RetrofitCache
from .decoders import base_of
from .own_attend import ARGUMENT, Attending, Reading, StopReading, Turns, hook_attention, register, slots

#: Decoders of the Hugging Face library by `model_type`: where the base model keeps its rotary tables; None: learnt
#: positions. Decoders that are not here place tokens in other ways (ALiBi, paired rotary entries, bases by layer) or
#: change the logits after the product (Gemma 2's cap).
DECODERS = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "rotary_emb"),
    "gpt2": None,
    "gpt_neox": "rotary_emb",
}
#: Rotary frequencies that depend on the length of the text: a neighbour's would not be those of the text it is for.
MOVING = ("dynamic", "longrope")
READ_TOKENS = 2**13  # tokens of neighbours in one pass of the decoder


@dataclass(frozen=True)
class OwnConfig:
    """Sizes of a decoder with retrieval by its own attention.

    Args:
        vocab_size, num_layers, num_heads, max_len: the decoder's; max_len: the most tokens of a text.
        cca_layers: the layers, from 1, that attend neighbours.
        chunk_len: M. neighbour_len: R of the neighbours it is meant for; a call may have another.
        sink_token: the token before each neighbour.
        rank: of the low-rank maps of queries and of what was attended; 0: none.
        score_bias: whether a neighbour's retrieval score, times a slope a head, is added to its logits.
    """

    vocab_size: int
    num_layers: int
    num_heads: int
    max_len: int
    cca_layers: tuple[int, ...]
    chunk_len: int = 32
    neighbour_len: int = 64
    sink_token: int = 0
    rank: int = 0
    score_bias: bool = False

    retrieves = True

    def __post_init__(self):
        layers = self.cca_layers
        if not layers:
            raise ValueError(f"cca_layers: expected at least one layer (from 1 to {self.num_layers}); got ()")
        for layer in layers:
            checks.integer("cca_layers", layer)
        if not 1 <= layers[0] <= layers[-1] <= self.num_layers or sorted(set(layers)) != list(layers):
            raise ValueError(f"cca_layers: expected layers from 1 to {self.num_layers}, ascending; got {layers}")
        for name in ("chunk_len", "neighbour_len"):
            checks.integer(name, getattr(self, name), low=1)
        checks.integer("sink_token", self.sink_token, low=0, high=self.vocab_size - 1)
        checks.integer("rank", self.rank, low=0)
        checks.flag("score_bias", self.score_bias)

    def to_dict(self) -> dict:
        """Options of `retrofit` that make it again; JSON can hold them."""
        names = ("chunk_len", "neighbour_len", "sink_token", "rank", "score_bias")
        return {"neighbours": "own", "cca_layers": list(self.cca_layers)} | {n: getattr(self, n) for n in names}


class OwnAttention(FrozenDecoder):
    """A frozen decoder that attends the neighbours of the last complete chunk with its own projections.

    The decoder reads each neighbour by itself, after a first token that takes what attention has to spare (a sink).
    Layer l keeps the keys k and values v of its R tokens, at positions 1 to R. Token p of the text attends the
    neighbours of chunk (p+1)//M - 1. With i = (p+1) mod M, a neighbour's key has the logit

        logit = rotate(q, R+1+i)·k / sqrt(D) + bias[l, head]

    One softmax goes over these and the decoder's own logits. The neighbours' values count scale[l, head] times. With
    learnt positions (GPT-2) the query is not rotated.

    With a rank r, each head has two more maps I + down up, with down [D,r] and up [r,D], which start as identities. One
    maps the queries that meet neighbours, before they are rotated; the other maps the attention's result. The second is
    linear, so it adapts the values. Neighbours' states stay the decoder's, so kept ones stay valid.

    With score_bias, slope[l, head]·score is added to the logit, where score is the neighbour's retrieval score. The
    slopes start at zero. Each neighbour is then attended by itself, because a shift of its logits is an addition to its
    log-sum-exp.

    Example:
        model = retrofit(AutoModelForCausalLM.from_pretrained(FOLDER), neighbours="own")
        logits = model(tokens, neighbours, neighbour_mask=mask)  # tokens [B,N], neighbours [B,N//M,K,R]
        with model.keeping() as kept, torch.no_grad():           # a neighbour that recurs is read once
            ...

    Attributes:
        bias, scale: [attending layers, heads], all that trains at rank 0 without score_bias.
        slope: [attending layers, heads], of the score; None without score_bias.
        query_down, query_up, value_down, value_up: [attending layers, heads, D, r] and [..., r, D]; None at rank 0.
        seconds: spent so far in calls with neighbours, by the host's clock: reading neighbours ("reading"), in the
            attention of layers that attend them ("attention"), in all else of the decoder ("decoder").

    Source of RETRO's chunks: Borgeaud et al., arXiv 2112.04426, section 2.4.
    """

    def __init__(self, decoder: nn.Module, config: OwnConfig, *, bias: float = -1.0, backend: str | None = None):
        super().__init__(decoder, config)
        hook_attention(base_of(decoder))
        shape, width, rank = (len(config.cca_layers), config.num_heads), self._head()[1], config.rank
        self.bias = nn.Parameter(torch.full(shape, float(bias), **self.where))
        self.scale = nn.Parameter(torch.ones(shape, **self.where))
        slope = nn.Parameter(torch.zeros(shape, **self.where)) if config.score_bias else None
        self.register_parameter("slope", slope)
        for name in ("query", "value"):
            down = nn.Parameter(torch.randn(*shape, width, rank, **self.where) * width**-0.5) if rank else None
            up = nn.Parameter(torch.zeros(*shape, rank, width, **self.where)) if rank else None
            self.register_parameter(f"{name}_down", down)
            self.register_parameter(f"{name}_up", up)
        self.backend = backend
        self.seconds = {"decoder": 0.0, "reading": 0.0, "attention": 0.0}
        self.layers = {layer - 1: place for place, layer in enumerate(config.cca_layers)}
        self._kept: Readings | None = None

    @contextlib.contextmanager
    def keeping(self, max_bytes: int = 2**30, folder: str | os.PathLike | None = None) -> Iterator[Readings]:
        """Keep the states of neighbours from call to call, within the context.

        Args:
            max_bytes: maximum size of the cache in memory. The least recently used states are evicted first. All states
                are discarded if a weight or the configuration of the decoder changes.
            folder: also write every state to this folder; each distinct neighbour takes `neighbour_bytes()`. Later
                processes with the same decoder, layers and sink token load the states from there. Files in the folder
                are never deleted.

        Example:
            with model.keeping() as kept:
                logits = [model(tokens, neighbours) for tokens, neighbours in batches]
            print(kept.found, kept.read)  # distinct neighbours of each call that were kept, and that were not
        """
        shelf = None
        if folder is not None:
            facts = (self.config.cca_layers, self.config.sink_token, autocast_types(), self._described())
            name = digest([self.decoder], *facts)
            shelf = Shelf(Path(folder) / name, next(self.decoder.parameters()).dtype, self._state())
        before, self._kept = self._kept, Readings(max_bytes, shelf)
        try:
            yield self._kept
        finally:
            self._kept = before

    @property
    def keeps(self) -> bool:
        """Whether states of neighbours are kept from call to call."""
        return self._kept is not None

    def neighbour_bytes(self, neighbour_len: int | None = None) -> int:
        """Return the bytes of one neighbour's states."""
        length, layers = neighbour_len or self.config.neighbour_len, len(self.config.cca_layers)
        return 2 * length * layers * math.prod(self._head()) * next(self.decoder.parameters()).itemsize

    def _head(self) -> tuple[int, int]:
        """Return G and D of the decoder's keys."""
        return heads_of(base_of(self.decoder).config)[1:]

    @torch.no_grad()
    def neighbour_states(self, neighbours: Tensor) -> Tensor:
        """Read neighbours int64 [U,R], each by itself. Return keys and values [U,A,2,R,G,D] of attending layers."""
        began = time.perf_counter()
        register()
        base, (heads, width) = base_of(self.decoder).base_model, self._head()
        sink = torch.full_like(neighbours[:, :1], self.config.sink_token)
        texts = torch.cat([sink, neighbours], 1)
        weight = next(self.decoder.parameters())
        shape = (len(texts), len(self.layers), 2, neighbours.shape[1], heads, width)
        states = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        rows = max(1, READ_TOKENS // texts.shape[1])
        for part, into in zip(texts.split(rows), states.split(rows)):
            with contextlib.suppress(StopReading):
                base(part, use_cache=False, **{ARGUMENT: Reading(self.layers, into)})
        self.seconds["reading"] += time.perf_counter() - began
        return states

    def read(self, neighbours: Tensor) -> None:
        """Read neighbours int64 [S,R] ahead of the calls that need them. Has an effect within `keeping` alone."""
        for part in neighbours.split(max(1, READ_TOKENS // neighbours.shape[1])) if len(neighbours) else ():
            self._pool(part)

    def _pool(self, neighbours: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states [U,A,2,R,G,D] of the distinct rows of neighbours [S,R], and the index [S] of each row's."""
        keys = row_keys(neighbours)
        if keys is None:
            return self.neighbour_states(neighbours), torch.arange(len(neighbours), device=neighbours.device)
        state = None if self._kept is None else self._state()
        sharing = Sharing(keys, neighbours.device, None if state is None else self._kept, state)
        read = self.neighbour_states(neighbours[sharing.rows]) if sharing.new else None
        return sharing.pool(read), sharing.place

    def _described(self) -> str:
        """Return the decoder's configuration, on which the states of neighbours depend besides the weights."""
        fields = base_of(self.decoder).config.to_dict()
        ignored = ("_name_or_path", "transformers_version", "dtype")  # the type is a fact of the weights
        return json.dumps({n: v for n, v in fields.items() if n not in ignored}, sort_keys=True, default=str)

    def _state(self) -> Hashable | None:
        """Return a value that changes with every weight and with the configuration; None if weights have no version."""
        weights = fingerprint([self.decoder])
        return None if weights is None else (weights, self._described())

    def _cut(self, tokens, starts, retrieved):
        neighbours, longest = retrieved.neighbours, tokens.shape[1] - (min(starts) if starts else 0)
        needed = longest // self.config.chunk_len
        if not isinstance(neighbours, Tensor) or neighbours.dim() != 4 or neighbours.shape[1] in (0, needed):
            return retrieved
        if neighbours.shape[1] < needed:
            raise ValueError(
                f"neighbours: expected [B,L,K,R] with L >= N//chunk_len = {needed} complete chunks for N={longest}, "
                f"chunk_len={self.config.chunk_len}; got L={neighbours.shape[1]}"
            )
        whole = neighbours.shape[:2]
        parts = (t[:, :needed] if isinstance(t, Tensor) and t.shape[:2] == whole else t for t in retrieved)
        return Retrieved(*parts)

    def _with_neighbours(self, tokens, retrieved, starts, cache: RetrofitCache | None, options):
        attending = self._attending(tokens, retrieved, starts, cache, options.get("position_ids"))
        if attending is None:
            return self.decoder(tokens, **options)
        register()
        began, attention = time.perf_counter(), self.seconds["attention"]
        out = self.decoder(tokens, **options, **{ARGUMENT: attending})
        self.seconds["decoder"] += time.perf_counter() - began - (self.seconds["attention"] - attention)
        if cache is not None and attending.last is not None:
            cache.states, cache.neighbour_mask, cache.scores = attending.last
        return out

    def _attending(self, tokens, retrieved, starts, cache: RetrofitCache | None, positions) -> Attending | None:
        """Return the pass for the layers, or None if no token attends a neighbour."""
        neighbours, neighbour_mask, neighbour_scores = retrieved
        held, length = (None, 0) if cache is None else (cache.states, cache.length)
        starts = (starts or [0] * len(tokens)) if cache is None else cache.starts
        first = [length - start for start in starts]
        if neighbours is None and held is not None:
            neighbours = tokens.new_zeros(len(tokens), 0, *cache.neighbour_mask.shape[1:])
        if neighbours is None:
            return None
        neighbour_mask = checks.token_mask(neighbour_mask, neighbours)
        live, pools, before = neighbour_mask.any(-1), [], None
        place, scores = (torch.zeros_like(live, dtype=dtype) for dtype in (torch.int64, self.bias.dtype))
        if neighbour_scores is not None:
            scores = neighbour_scores.to(scores.dtype).masked_fill(~live, 0)
        if live.numel() and live.any():  # `any` waits for a GPU: not where no chunk completes
            pool, place[live] = self._pool(neighbours[live])
            pools.append(pool)
        if held is not None:
            held_place = torch.arange(held.shape[0] * held.shape[1], device=tokens.device).view(held.shape[:2])
            held_place += len(pools[0]) if pools else 0
            pools.append(held.flatten(0, 1))
            before = held_place, cache.neighbour_mask, cache.scores
        if not pools:
            return None
        laid = slots(first, tokens.shape[1], self.config.chunk_len, (place, neighbour_mask, scores), before)
        pool = pools[0] if len(pools) == 1 else torch.cat(pools)
        last = None
        if cache is not None and laid.last is not None:
            rows = torch.arange(cache.batch, device=tokens.device)
            last = (pool[laid.place[rows, laid.last]], *(t[rows, laid.last].clone() for t in (laid.mask, laid.scores)))
        key_mask = left_mask(starts, length + tokens.shape[1], tokens.device) if any(starts) else None
        turns = self._turns(first, tokens.shape[1], laid.mask.shape[-1], positions)
        return Attending(self, pool, laid, tokens.shape[1], length + tokens.shape[1], turns, key_mask, last)

    def _turns(self, first: Sequence[int], count: int, neighbour_len: int, positions: Tensor | None) -> Turns | None:
        """Return rotations of queries from their own positions to those after a neighbour; None if learnt.

        positions: the decoder's position_ids; None if each row's positions are counted from its first token.
        """
        base = base_of(self.decoder)
        name = DECODERS[base.config.model_type]
        if name is None:
            return None
        rows = first if len(set(first)) > 1 else first[:1]
        weight, m = next(self.decoder.parameters()), self.config.chunk_len
        index = torch.arange(count, device=weight.device) + transfer.numbers(rows, weight.device)[:, None]
        index = index.clamp(min=0)  # padding has position 0
        there = neighbour_len + 1 + (index + 1) % m
        wide = torch.promote_types(weight.dtype, torch.float32)
        tables = getattr(base.base_model, name)  # the decoder's own angles, as it rounds them
        here, there = (
            tuple(t.to(wide).unsqueeze(2) for t in tables(weight, at))
            for at in (index if positions is None else positions, there)
        )
        return Turns.between(here, there)


def heads_of(config) -> tuple[int, int, int]:
    """Return H, G and D of a Hugging Face decoder's attention."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, getattr(config, "num_key_value_heads", None) or heads, width


def retrofit_own(
    decoder: nn.Module, *, cca_layers: Sequence[int] | None = None, bias=-1.0, sink_token=None, backend=None, **fields
) -> OwnAttention:
    """`retrofit(decoder, neighbours="own", ...)`. fields: of `OwnConfig`."""
    base = base_of(decoder)
    theirs = getattr(base, "config", None)
    kind = getattr(theirs, "model_type", None)
    if kind not in DECODERS:
        known = ", ".join(DECODERS)
        raise TypeError(f"decoder: expected a Hugging Face decoder of {known}; got {type(base).__name__}")
    rope = (getattr(theirs, "rope_parameters", None) or {}).get("rope_type", "default")
    if DECODERS[kind] is not None and rope in MOVING:
        raise ValueError(f"decoder: expected rotary positions whose frequencies are fixed; got {rope!r}")
    if getattr(theirs, "reorder_and_upcast_attn", False):
        raise ValueError("decoder: expected reorder_and_upcast_attn=False; got True")
    if not math.isfinite(checks.number("bias", bias)):
        raise ValueError(f"bias: expected a finite number; got {bias}")
    heads, _, width = heads_of(theirs)
    checks.head_dim("decoder's head_dim", width)
    if sink_token is None:
        sink_token = theirs.bos_token_id if isinstance(theirs.bos_token_id, int) else 0
    layers = range(1, theirs.num_hidden_layers + 1) if cca_layers is None else cca_layers
    sizes = (theirs.vocab_size, theirs.num_hidden_layers, heads, theirs.max_position_embeddings)
    config = OwnConfig(*sizes, tuple(layers), sink_token=sink_token, **fields)
    return OwnAttention(decoder, config, bias=bias, backend=backend)
