"""Retrieval through the attention layers that a trained decoder already has.

The decoder's weights do not change. Retrieval adds one bias and one scale per head, and it works
before any training.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from retro_model.base import checks, transfer
from retro_model.base.config import layer_numbers
from retro_model.retro.inputs import Retrieved
from retro_model.retro.reading_cache import (
    ReadingCache,
    autocast_types,
    fingerprint,
    row_keys,
)

from .base import FrozenDecoder, RetrofitCache
from .decoders import base_of
from .own_attend import (
    ARGUMENT,
    Attending,
    NeighbourPass,
    Prefix,
    QueryRotations,
    StopReading,
    hook_attention,
    register,
    slots,
)
from .own_copy import Copying, Entries

ROTARY = (
    *("llama", "mistral", "ministral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "phi3"),
    *("gemma", "gemma2", "gemma3_text", "olmo", "olmo2", "olmo3", "granite", "starcoder2", "stablelm"),
    *("nemotron", "gpt_neox"),
)
#: Supported Hugging Face decoders: `model_type` -> attribute of the base model that holds the rotary tables, or None
#: for learned positions. Other decoders are refused, because they encode positions differently (ALiBi, paired rotary
#: entries, queries scaled by position).
DECODERS = {**dict.fromkeys(ROTARY, "rotary_emb"), "gpt2": None}
#: Rotary types whose frequencies depend on the length of the text. They are refused, because a neighbour and the text
#: that attends it would have different frequencies.
MOVING = ("dynamic", "longrope")
#: Settings of a decoder's configuration that change its attention, with the only value that is supported.
SERVED = {
    "attn_logit_softcapping": None,
    "use_bidirectional_attention": False,
    "is_causal": True,
    "reorder_and_upcast_attn": False,
}
READ_TOKENS = 2**13  # maximum number of neighbour tokens per forward pass of the decoder


@dataclass(frozen=True)
class OwnConfig:
    """Configuration of a decoder that retrieves with its own attention.

    Args:
        vocab_size, num_layers, num_heads: sizes of the decoder.
        max_len: maximum number of tokens in a text.
        cca_layers: layers that attend neighbours, in ascending order, counted from 1.
        chunk_len: M, tokens per chunk.
        neighbour_len: R, default number of tokens per neighbour. A call may use another R.
        sink_token: token that is placed before each neighbour as an attention sink.
        rank: rank of the low-rank maps of queries and attention outputs; 0 for no maps.
        prefix: tokens in front of every text and every neighbour; empty for none.
        copying: whether tokens of neighbours can be copied, see `own_copy.Copying`.
        second_look: whether a complete chunk is read a second time, with its own neighbours; see `OwnAttention`.
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
    prefix: tuple[int, ...] = ()
    copying: bool = False
    second_look: bool = False

    retrieves = True

    def __post_init__(self):
        if not layer_numbers("cca_layers", self.cca_layers, "num_layers", self.num_layers):
            raise ValueError(f"cca_layers: expected at least one layer (from 1 to {self.num_layers}); got ()")
        for name in ("chunk_len", "neighbour_len"):
            checks.integer(name, getattr(self, name), low=1)
        checks.integer("sink_token", self.sink_token, low=0, high=self.vocab_size - 1)
        checks.integer("rank", self.rank, low=0)
        for name in ("copying", "second_look"):
            checks.flag(name, getattr(self, name))
        for token in self.prefix:
            checks.integer("prefix", token, low=0, high=self.vocab_size - 1)
        if self.max_len < 1:
            most = len(self.prefix) + self.max_len - 1
            raise ValueError(f"prefix: expected at most {most} tokens for this decoder; got {len(self.prefix)}")

    def to_dict(self) -> dict:
        """Return the options with which `retrofit` creates the same configuration. They can be stored as JSON."""
        names = ("chunk_len", "neighbour_len", "sink_token", "rank", "copying", "second_look")
        lists = {"cca_layers": list(self.cca_layers), "prefix": list(self.prefix)}
        return {"neighbours": "own"} | lists | {n: getattr(self, n) for n in names}


class OwnAttention(FrozenDecoder):
    """A frozen decoder that attends the neighbours of the last complete chunk with its own projections.

    The decoder encodes each neighbour separately, after one leading token that acts as an attention sink. Each
    attending layer l stores the keys k and values v of the neighbour's R tokens, at positions 1 to R. Token p of the
    text attends the neighbours of chunk (p+1)//M - 1. Let i = (p+1) mod M. The logit of a neighbour's key is

        logit = rotate(q, R+1+i)·k / sqrt(D) + bias[l, head]

    One softmax runs over these logits and the decoder's own logits. The values of neighbours are multiplied by
    scale[l, head]. If the decoder has learned positions (GPT-2), the query is not rotated.

    If the rank r is positive, each head has two additional linear maps I + down up, with down [D,r] and up [r,D]. Both
    are initialised to the identity. The first maps queries before they attend neighbours and before rotation. The
    second maps the attention output; because it is linear, this is the same as mapping the values. The stored states of
    neighbours do not depend on the maps, so they remain valid during training.

    If there is a prefix of P tokens, it takes the place of the sink: neighbours are read as its continuations, at
    positions P to P+R-1, and texts begin at position P and attend it in every layer. A neighbour's key then meets the
    query at position P+R+i. The prefix is read once, and its tokens count neither as the text's nor in a cache.

    If copying is set, `Copying` mixes the tokens of the neighbours of all chunks so far into the distribution. Its
    numbers have to be fitted. Neighbours are then read through the last layer, and their last states are kept.

    If second_look is set, a call with neighbours computes every token twice. The second look attends the neighbours of
    the token's own chunk, with i = p mod M, and second looks. The first look attends the second looks of earlier
    chunks, the first looks of its own chunk, and neighbours as above; its logits are returned. This serves whole texts,
    without a cache or padding on the left.

    Example:
        model = retrofit(AutoModelForCausalLM.from_pretrained(FOLDER), neighbours="own")
        logits = model(tokens, neighbours, neighbour_mask=mask)  # tokens [B,N], neighbours [B,N//M,K,R]
        with model.keeping() as kept, torch.no_grad():           # encodes a recurring neighbour only once
            ...  # kept.found, kept.read: cache hits and misses, in distinct neighbours per call

    Attributes:
        bias, scale: [attending layers, heads]. The only trained parameters at rank 0.
        query_down, value_down: [attending layers, heads, D, r]; None at rank 0.
        query_up, value_up: [attending layers, heads, r, D]; None at rank 0.
        copying: a `Copying`; None for none.

    Source of the chunk-wise causality: Borgeaud et al., arXiv 2112.04426, section 2.4.
    """

    def __init__(self, decoder: nn.Module, config: OwnConfig, *, bias: float = -1.0, backend: str | None = None):
        super().__init__(decoder, config)
        hook_attention(base_of(decoder))
        shape, width, rank = (len(config.cca_layers), config.num_heads), self._head()[1], config.rank
        self.bias = nn.Parameter(torch.full(shape, float(bias), **self.where))
        self.scale = nn.Parameter(torch.ones(shape, **self.where))
        for name in ("query", "value"):
            down = nn.Parameter(torch.randn(*shape, width, rank, **self.where) * width**-0.5) if rank else None
            up = nn.Parameter(torch.zeros(*shape, rank, width, **self.where)) if rank else None
            self.register_parameter(f"{name}_down", down)
            self.register_parameter(f"{name}_up", up)
        self.copying = Copying(base_of(decoder).config.hidden_size, **self.where) if config.copying else None
        self.backend = backend
        self.layers = {layer - 1: place for place, layer in enumerate(config.cca_layers)}
        self._kept: ReadingCache | None = None
        self._prefix: tuple[Hashable, Prefix] | None = None  # with the state of the weights that read it

    @property
    def always_attends(self) -> bool:
        return bool(self.config.prefix)

    @property
    def changes_logits(self) -> bool:
        return self.config.copying

    @contextlib.contextmanager
    def keeping(self, max_bytes: int = 2**30) -> Iterator[ReadingCache]:
        """Context manager: cache the states of neighbours across calls.

        max_bytes: maximum size of the cache. Each distinct neighbour takes `neighbour_bytes()`. The least recently used
        states are evicted first. All states are discarded if a weight or the configuration of the decoder changes.
        """
        before, self._kept = self._kept, ReadingCache(max_bytes)
        try:
            yield self._kept
        finally:
            self._kept = before

    @property
    def keeps(self) -> bool:
        """Whether the states of neighbours are cached across calls."""
        return self._kept is not None

    def neighbour_bytes(self, neighbour_len: int | None = None) -> int:
        """Return the size in bytes of one neighbour's states."""
        length = neighbour_len or self.config.neighbour_len
        return sum(map(math.prod, self._shapes(length))) * next(self.decoder.parameters()).itemsize

    def _head(self) -> tuple[int, int]:
        """Return the number of key heads G and the head dimension D."""
        return heads_of(base_of(self.decoder).config)[1:]

    def _shapes(self, length: int) -> tuple[tuple[int, ...], tuple[int, int]]:
        """Return the shapes [A,2,R,G,D] of a neighbour's keys and values and [R,d] of its last states."""
        width = 0 if self.copying is None else len(self.copying.centre)
        return (len(self.layers), 2, length, *self._head()), (length, width)

    def _parts(self, states: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return views of flat states: keys and values [...,A,2,R,G,D] and last states [...,R,d]."""
        near, last = self._shapes(length)
        parts = states.split([math.prod(near), math.prod(last)], -1)
        return parts[0].unflatten(-1, near), parts[1].view(*states.shape[:-1], *last)

    @torch.no_grad()
    def neighbour_states(self, neighbours: Tensor) -> Tensor:
        """Encode each of the neighbours int64 [U,R] separately.

        Return flat states [U,F]: the keys and values [A,2,R,G,D] of the A attending layers and, if the model copies,
        the decoder's last states [R,d].
        """
        register()
        base, length = base_of(self.decoder).base_model, neighbours.shape[1]
        prefix, texts, options = self.prefix_states(), neighbours, {"use_cache": False}
        if prefix is None:
            sink = torch.full_like(neighbours[:, :1], self.config.sink_token)
            texts = torch.cat([sink, neighbours], 1)
        else:
            options["position_ids"] = prefix.length + torch.arange(length, device=texts.device)[None]
        weight = next(self.decoder.parameters())
        size = self.neighbour_bytes(length) // weight.itemsize
        states = torch.empty(len(texts), size, dtype=weight.dtype, device=weight.device)
        rows = max(1, READ_TOKENS // texts.shape[1])
        for part, into in zip(texts.split(rows), states.split(rows)):
            near, last = self._parts(into, length)
            reading = NeighbourPass(self.layers, near, prefix, self.backend, whole=self.config.copying)
            with contextlib.suppress(StopReading):
                read = base(part, **options, **{ARGUMENT: reading})
                if self.config.copying:
                    last.copy_(read.last_hidden_state[:, -length:])
            if not reading.done:
                raise RuntimeError(f"decoder: {type(base).__name__} does not hand keywords to its attention")
        return states

    @torch.no_grad()
    def prefix_states(self) -> Prefix | None:
        """Return the keys and values of the prefix. They are read again when a weight of the decoder has changed."""
        if not self.config.prefix:
            return None
        state = self._state(), autocast_types()
        if self._prefix is None or state[0] is None or self._prefix[0] != state:
            register()
            read = Prefix(len(self.config.prefix))
            tokens = transfer.numbers(self.config.prefix, self.device)[None]
            base_of(self.decoder).base_model(tokens, use_cache=False, **{ARGUMENT: read})
            self._prefix = state, read
        return self._prefix[1]

    def _pool(self, neighbours: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states [U,F] of the distinct neighbours in `neighbours` [S,R].

        Return also, for each row, the index [S] of its states.
        """
        keys = row_keys(neighbours)
        if keys is None:
            return self.neighbour_states(neighbours), torch.arange(len(neighbours), device=neighbours.device)
        first: dict[bytes, int] = {}
        for row, key in enumerate(keys):
            first.setdefault(key, row)
        state = None if self._kept is None else self._state()
        known = {} if state is None else self._kept.known(list(first), state)
        parts, new = [], [key for key in first if key not in known]
        if new:
            rows = transfer.numbers([first[key] for key in new], neighbours.device)
            parts.append(self.neighbour_states(neighbours[rows]))
            if state is not None:
                self._kept.store(new, parts[0], state)
        if known:
            parts.append(torch.stack([*known.values()]))
        place = {key: at for at, key in enumerate((*new, *known))}
        pool = parts[0] if len(parts) == 1 else torch.cat(parts)
        return pool, transfer.numbers([place[key] for key in keys], neighbours.device)

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
        positions = options.get("position_ids")
        attending = self._attending(tokens, retrieved, starts, cache, positions)
        if attending is None:
            return self.decoder(tokens, **options)
        if attending.copied is not None and isinstance(options.get("logits_to_keep"), Tensor):
            raise ValueError("logits_to_keep: expected a number of last tokens with copying; got a tensor")
        register()
        if attending.prefix is not None:
            length = 0 if cache is None else cache.length
            index = torch.arange(length, length + tokens.shape[1], device=tokens.device)[None]
            options["position_ids"] = attending.prefix.length + (index if positions is None else positions)
        hidden: list[Tensor] = []
        with contextlib.ExitStack() as stack:
            if attending.copied is not None or attending.looks == 2:
                keep = functools.partial(_first_looks, len(tokens), hidden)
                stack.enter_context(base_of(self.decoder).base_model.register_forward_hook(keep))
            if attending.looks == 2:
                rows = {name: options[name] for name in ("attention_mask", "position_ids") if name in options}
                options |= {name: t.expand(len(tokens), -1).repeat(2, 1) for name, t in rows.items() if t is not None}
                tokens = tokens.repeat(2, 1)
            out = self.decoder(tokens, **options, **{ARGUMENT: attending})
        if attending.copied is not None:
            out.logits = self.copying(out.logits, hidden[0], attending.copied)
        if cache is not None and attending.last is not None:
            cache.states, cache.neighbour_mask = attending.last
        if cache is not None and attending.copied is not None:
            cache.copied = attending.copied.after(tokens.shape[1])
        return out

    def _attending(self, tokens, retrieved, starts, cache: RetrofitCache | None, positions) -> Attending | None:
        """Return the pass that the layers attend in, or None for a call with neither a prefix nor a neighbour."""
        neighbours, neighbour_mask = retrieved
        held, length = (None, 0) if cache is None else (cache.states, cache.length)
        starts = (starts or [0] * len(tokens)) if cache is None else cache.starts
        first, total = [length - start for start in starts], length + tokens.shape[1]
        padding = starts if any(starts) else None
        prefix = self.prefix_states()
        alone = Attending(self, prefix, None, None, total, None, padding, None) if prefix else None
        copied = None if cache is None else cache.copied
        if neighbours is None and held is not None:
            neighbours = tokens.new_zeros(len(tokens), 0, *cache.neighbour_mask.shape[1:])
        if neighbours is None:
            return alone
        if self.config.second_look and (cache is not None or padding):
            raise ValueError("second_look: expected whole texts without padding on the left and without a cache")
        neighbour_mask = checks.token_mask(neighbour_mask, neighbours)
        live, pools, before = neighbour_mask.any(-1), [], None
        place = torch.zeros_like(live, dtype=torch.int64)
        if live.numel() and live.any():  # skip `any`, which waits for a GPU, if no chunk completes
            pool, place[live] = self._pool(neighbours[live])
            pools.append(pool)
            if self.copying is not None:
                last = self._parts(pool, neighbours.shape[-1])[1][place]
                new = Entries.of(last, neighbours, neighbour_mask, first, self.config.chunk_len)
                copied = new if copied is None else Entries(*(torch.cat(pair, 1) for pair in zip(copied, new)))
        if held is not None:
            held_place = torch.arange(held.shape[0] * held.shape[1], device=tokens.device).view(held.shape[:2])
            held_place += len(pools[0]) if pools else 0
            pools.append(held.flatten(0, 1))
            before = held_place, cache.neighbour_mask
        if not pools:
            return alone
        laid = slots(first, tokens.shape[1], self.config.chunk_len, (place, neighbour_mask), before)
        laid = laid.twice(self.config.chunk_len) if self.config.second_look else laid
        pool = pools[0] if len(pools) == 1 else torch.cat(pools)
        last = None
        if cache is not None and laid.last is not None:
            rows = torch.arange(cache.batch, device=tokens.device)
            last = pool[laid.place[rows, laid.last]], laid.mask[rows, laid.last].clone()
        turns = self._turns(first, tokens.shape[1], laid.mask.shape[-1], positions)
        pool = self._parts(pool, laid.mask.shape[-1])[0]
        return Attending(self, prefix, pool, laid, total, turns, padding, last, copied)

    def _turns(
        self, first: Sequence[int], count: int, neighbour_len: int, positions: Tensor | None
    ) -> list[QueryRotations | None]:
        """Return each attending layer's rotations that move queries from their own positions to positions after a
        neighbour; None for a layer that does not rotate.

        positions: the decoder's position_ids; None if each row's positions are counted from its first token.
        """
        theirs = base_of(self.decoder).config
        kinds = [rotary_kind(theirs, layer - 1) for layer in self.config.cca_layers]
        if all(kind is None for kind in kinds):
            return kinds
        rows = first if len(set(first)) > 1 else first[:1]
        weight, m = next(self.decoder.parameters()), self.config.chunk_len
        index = torch.arange(count, device=weight.device) + transfer.numbers(rows, weight.device)[:, None]
        index = index.clamp(min=0)  # padding gets position 0
        lead = len(self.config.prefix)
        here = lead + (index if positions is None else positions)
        index = index + 1
        if self.config.second_look:  # rows of first looks, then of second looks
            index = torch.cat([index, index - 1]).repeat_interleave(len(first), 0)
            here = here.expand(len(first), -1).repeat(2, 1)
        there = (lead or 1) + neighbour_len + index % m
        turns = {kind: self._rotations(kind, here, there) for kind in set(kinds) if kind is not None}
        return [turns.get(kind) for kind in kinds]

    def _rotations(self, kind: str, here: Tensor, there: Tensor) -> QueryRotations:
        """Return the rotations of one kind of layers from positions `here` to positions `there`, [1 or B,N]."""
        base, weight = base_of(self.decoder), next(self.decoder.parameters())
        wide = torch.promote_types(weight.dtype, torch.float32)
        # the decoder's own tables, rounded as it rounds them
        tables = functools.partial(getattr(base.base_model, DECODERS[base.config.model_type]), weight)
        name = (kind,) if kind else ()
        return QueryRotations.between(
            *(tuple(t.to(wide).unsqueeze(2) for t in tables(at, *name)) for at in (here, there))
        )


def _first_looks(count: int, hidden: list[Tensor], base: nn.Module, args: tuple, out):
    """Hook of the base model: hand the first `count` rows of its last states to the readout, and keep them."""
    if len(out[0]) > count:
        out.last_hidden_state = out[0][:count]
    hidden.append(out[0])


def ropes_of(config) -> dict[str, dict]:
    """Return the rotary parameters by kind of layer; of the kind "" if all layers share them."""
    ropes = getattr(config, "rope_parameters", None) or {}
    return ropes if ropes and all(isinstance(rope, dict) for rope in ropes.values()) else {"": ropes}


def rotary_kind(config, layer: int) -> str | None:
    """Return the kind of rotary parameters of a layer, counted from 0; None if the layer does not rotate."""
    rotates = getattr(config, "no_rope_layers", None)  # despite its name, 1 for a layer that rotates
    if DECODERS[config.model_type] is None or (rotates and not rotates[layer]):
        return None
    return "" if "" in ropes_of(config) else config.layer_types[layer]


def heads_of(config) -> tuple[int, int, int]:
    """Return (query heads H, key heads G, head dimension D) of a Hugging Face decoder."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, getattr(config, "num_key_value_heads", None) or heads, width


def check_served(config) -> None:
    """Raise ValueError for a setting of a supported decoder that changes its attention to an unsupported kind."""
    ropes = [rope.get("rope_type", "default") for rope in ropes_of(config).values()]
    for rope in ropes:
        if DECODERS[config.model_type] is not None and rope in MOVING:
            raise ValueError(f"decoder: expected rotary positions whose frequencies are fixed; got {rope!r}")
    for name, served in SERVED.items():
        got = getattr(config, name, served)
        if got != served and not (got is None and served is False):
            raise ValueError(f"decoder: expected {name}={served}; got {got}")


def retrofit_own(
    decoder: nn.Module,
    *,
    cca_layers: Sequence[int] | None = None,
    bias=-1.0,
    sink_token=None,
    prefix: Sequence[int] | Tensor = (),
    backend=None,
    **fields,
) -> OwnAttention:
    """Implement `retrofit(decoder, neighbours="own", ...)`. `fields` are further fields of `OwnConfig`."""
    base = base_of(decoder)
    theirs = getattr(base, "config", None)
    kind = getattr(theirs, "model_type", None)
    if kind not in DECODERS:
        known = ", ".join(DECODERS)
        raise TypeError(f"decoder: expected a Hugging Face decoder of {known}; got {type(base).__name__}")
    check_served(theirs)
    if not math.isfinite(checks.number("bias", bias)):
        raise ValueError(f"bias: expected a finite number; got {bias}")
    heads, _, width = heads_of(theirs)
    checks.head_dim("decoder's head_dim", width)
    if sink_token is None:
        sink_token = theirs.bos_token_id if isinstance(theirs.bos_token_id, int) else 0
    layers = range(1, theirs.num_hidden_layers + 1) if cca_layers is None else cca_layers
    prefix = tuple(prefix.tolist() if isinstance(prefix, Tensor) else prefix)
    sizes = (theirs.vocab_size, theirs.num_hidden_layers, heads, theirs.max_position_embeddings - len(prefix))
    config = OwnConfig(*sizes, tuple(layers), sink_token=sink_token, prefix=prefix, **fields)
    return OwnAttention(decoder, config, bias=bias, backend=backend)
