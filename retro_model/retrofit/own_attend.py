"""Three kinds of passes of a decoder that retrieves with its own attention.

`Prefix` reads the shared prefix, `NeighbourPass` reads neighbours, `Attending` computes a text that attends both.

The passes use the Hugging Face library's registry of attention functions. A decoder whose `_attn_implementation` is
"retro-sdpa" calls `_attend` in every layer. One of the three objects is the keyword `retro` of the decoder's forward,
and the library hands it to `_attend`. A forward without this keyword computes the decoder's own attention.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

import retro_kernels as rk
from retro_model.base import transfer
from retro_model.retro.cache import left_mask

from .own_copy import Entries

ARGUMENT = "retro"  # keyword that the decoder's forward hands down to its attention
PREFIX = "retro-"
BEFORE = ("sdpa", "eager")
#: Decoders whose blocks do not hand the keywords of a forward pass to their attention.
CLOSED = ("nemotron", "stablelm")


def _attend(before: str, module: nn.Module, query, key, value, mask, retro=None, **options):
    from transformers import AttentionInterface

    if retro is not None:
        token_major = (t.transpose(1, 2) for t in (query, key, value))
        # Qwen2-MoE's attention has a window that it does not pass on, because its mask has it too
        window = options.get("sliding_window", getattr(module, "sliding_window", None))
        out = retro.attend(module.layer_idx, *token_major, options["scaling"], window)
        if out is not None:
            return out, None
    # "eager" is each model's own function, not the registry's; FSDP wraps the module's class
    homes = (sys.modules.get(kind.__module__) for kind in type(module).__mro__)
    eager = next((home.eager_attention_forward for home in homes if hasattr(home, "eager_attention_forward")), None)
    return AttentionInterface().get(before, eager)(module, query, key, value, mask, **options)


@functools.cache
def register() -> None:
    """Enter the attention functions in the library's registries."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for before in BEFORE:
        AttentionInterface.register(PREFIX + before, functools.partial(_attend, before))
        AttentionMaskInterface.register(PREFIX + before, AttentionMaskInterface()[before])


def hook_attention(decoder: nn.Module) -> None:
    """Make the decoder's forward take a `NeighbourPass` or `Attending` as its argument `retro`.

    A forward pass without this argument is unchanged.

    Raises: ValueError for a decoder whose attention is neither "sdpa" nor "eager".
    """
    register()
    before = decoder.config._attn_implementation.removeprefix(PREFIX)
    if before not in BEFORE:
        raise ValueError(f"decoder: expected attn_implementation 'sdpa' or 'eager'; got {before!r}")
    decoder.config._attn_implementation = PREFIX + before
    if decoder.config.model_type in CLOSED:
        for block in decoder.base_model.layers:
            block.register_forward_pre_hook(_keep_argument, with_kwargs=True)
            block.self_attn.register_forward_pre_hook(_hand_argument, with_kwargs=True)


def _keep_argument(block: nn.Module, args: tuple, kwargs: dict) -> None:
    """Keep a block's argument `retro` for its attention."""
    vars(block.self_attn)[ARGUMENT] = kwargs.get(ARGUMENT)


def _hand_argument(attention: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Hand the argument `retro` that the block kept to the attention."""
    retro = vars(attention).pop(ARGUMENT, None)
    return None if retro is None else (args, kwargs | {ARGUMENT: retro})


class StopReading(Exception):
    """Raised to end the pass that reads neighbours, after the last layer whose keys and values are needed."""


class Prefix:
    """Keys and values of the shared prefix in every layer, in front of the text's own keys and values.

    It is also the pass that reads the prefix [1,P].

    states: layer -> keys and values [1,P,G,D], rotated to positions 0 to P-1.
    """

    def __init__(self, length: int):
        self.length = length
        self.states: dict[int, tuple[Tensor, Tensor]] = {}

    def before(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [B,P+S,G,D]: the prefix, then those given [B,S,G,D]."""
        pairs = zip(self.states[layer], (key, value))
        key, value = (torch.cat([p.to(t.dtype).expand(len(t), -1, -1, -1), t], 1) for p, t in pairs)
        return key, value

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> None:
        """Store keys and values. Return None, because the attention itself is the decoder's."""
        self.states[layer] = key, value


class NeighbourPass:
    """Pass that reads neighbours and stores the keys and values of the attending layers.

    Without a prefix the first token of each text is the attention sink, whose keys and values are not stored.

    Args:
        layers: index of a layer, from 0 -> its place among the attending layers.
        into: [U,A,2,R,G,D], for the keys and values.
        prefix: the neighbours are read as continuations of it; None for no prefix.
        backend: of `retro_kernels`.
        whole: read through the last layer.

    Attributes:
        done: whether the last attending layer's keys and values are stored.

    Raises: StopReading, from the last attending layer, when its keys and values are stored, unless `whole`.
    """

    def __init__(self, layers: dict[int, int], into: Tensor, prefix: Prefix | None, backend: str | None, whole: bool):
        self.layers, self.into, self.prefix, self.backend = layers, into, prefix, backend
        self.whole, self.done = whole, False

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None):
        """Store keys and values. Return [U,R,H,D] with a prefix, else None: the attention itself is the decoder's."""
        if (place := self.layers.get(layer)) is not None:
            first = 0 if self.prefix else 1
            self.into[:, place, 0], self.into[:, place, 1] = key[:, first:], value[:, first:]
            self.done = place == len(self.layers) - 1
            if self.done and not self.whole:
                raise StopReading
        if self.prefix is None:
            return None
        key, value = self.prefix.before(layer, key, value)
        return rk.relative_attention(query, key, value, causal=True, window=window, scale=scale, backend=self.backend)


class Slots(NamedTuple):
    """Places of the neighbours of each chunk that the tokens of a pass attend.

    Slot t of row b is one chunk: the row's last complete chunk before the call where a cache holds its neighbours, then
    those that complete within the call.

    query_start: position of the first column, counted in slots: an int, or int64 [B] where rows differ.
    place: int64 [B,T,K], which states of the pool each neighbour has. mask: bool [B,T,K,R].
    last: int64 [B], the slot of each row's last complete chunk after the call; None: as before the call.
    """

    query_start: int | Tensor
    place: Tensor
    mask: Tensor
    last: Tensor | None

    def twice(self, m: int) -> Slots:
        """Return them for first looks, then second looks, which attend what first looks attend m - 1 tokens later."""
        start = torch.arange(2, device=self.mask.device).repeat_interleave(len(self.mask)) * (m - 1)
        place, mask = (t.repeat(2, *[1] * (t.dim() - 1)) for t in (self.place, self.mask))
        return Slots(start, place, mask, None)


def slots(first: Sequence[int], count: int, m: int, chosen: Sequence[Tensor], held: Sequence[Tensor] | None) -> Slots:
    """Lay out the chunks that `count` columns attend. Rows begin at positions `first` (-s: s columns of padding).

    chosen: place and mask, [B,L,K] and [B,L,K,R], of the chunks that complete within the call; L may be 0. held: the
    same, [B,K] and [B,K,R], of each row's last complete chunk before the call.
    """
    lead, device = int(held is not None), chosen[0].device
    chunk = [f // m for f in first]  # chunk of each row's first column; negative on padding
    begin = [f % m + m * lead for f in first]
    query_start = begin[0] if len(set(begin)) == 1 else transfer.numbers(begin, device)
    total = (max(begin) + count) // m
    complete = [max(f + count, 0) // m - max(f, 0) // m for f in first]
    if not any(chunk) and len(set(complete)) == 1:  # whole rows, from their beginnings: no chunk before them
        last = torch.full((len(first),), total - 1, device=device)
        return Slots(query_start, *(t[:, :total] for t in chosen), last)
    shift = transfer.numbers([lead - min(c, 0) for c in chunk], device)[:, None]
    number = torch.arange(total, device=device) - shift  # index of the slot's chunk among the chunks that complete
    known = (number >= 0) & (number < transfer.numbers(complete, device)[:, None])
    if length := chosen[0].shape[1]:
        rows, at = torch.arange(len(first), device=device)[:, None], number.clamp(0, length - 1)
        place, mask = (t[rows, at] for t in chosen)
        mask = mask & known[..., None, None]
    else:
        place, mask = (t.new_zeros(t.shape[0], total, *t.shape[2:]) for t in chosen)
    if held is not None:
        place[:, 0], mask[:, 0] = held
    last = (transfer.numbers(complete, device) - 1 + shift[:, 0]).clamp(min=0) if any(complete) else None
    return Slots(query_start, place, mask, last)


class QueryRotations(NamedTuple):
    """Rotations [1 or B,N,1,E] of queries, each a pair of cosines and sines: `back` to position 0, `on` from there to
    the place after a neighbour, `both` at once."""

    back: tuple[Tensor, Tensor]
    on: tuple[Tensor, Tensor]
    both: tuple[Tensor, Tensor]

    @classmethod
    def between(cls, here: tuple[Tensor, Tensor], there: tuple[Tensor, Tensor]) -> QueryRotations:
        """From the tables with which queries were turned, which may be scaled, to others."""
        (c, s), (to_c, to_s) = here, there
        norm = c * c + s * s
        back = (c / norm, -s / norm)
        return cls(back, there, (to_c * back[0] - to_s * back[1], to_s * back[0] + to_c * back[1]))


def turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the first E entries of heads [B,N,H,D], paired by halves. The others stay."""
    cos, sin = turn
    width = cos.shape[-1]
    part, rest = x[..., :width], x[..., width:]
    low, high = part.chunk(2, -1)
    out = (part * cos + torch.cat((-high, low), -1) * sin).to(x.dtype)
    return torch.cat((out, rest), -1) if rest.shape[-1] else out


def mapped(x: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """Add their low-rank map to heads [B,N,H,D]; down [H,D,r], up [H,r,D]."""
    return x + torch.einsum("bnhr,hrd->bnhd", torch.einsum("bnhd,hdr->bnhr", x.to(down.dtype), down), up).to(x.dtype)


def _after_padding(key: Tensor, value: Tensor, length: int, starts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Move the prefix, the first `length` keys of each row, behind the row's padding, because windows count columns.

    starts: columns of padding on the left of each row, negative for a row without its first tokens, whose windows have
    left the prefix behind. Return keys and values [B,P+S,G,D] and their mask [B,P+S].
    """
    start = transfer.numbers(starts, key.device)[:, None]
    column = torch.arange(key.shape[1], device=key.device)
    index = torch.where(column < start, column + length, torch.where(column < start + length, column - start, column))
    hidden = (column < start) | ((start < 0) & (column < length))
    index = torch.where(start < 0, column, index)
    rows = torch.arange(len(starts), device=key.device)[:, None]
    return key[rows, index], value[rows, index], ~hidden


class Attending:
    """Pass of a text, or of the tokens that follow a cache's.

    It changes nothing that it holds, so that checkpointing may compute a layer again.

    Args:
        model: an `OwnAttention`.
        prefix: in front of the text in every layer; None for no prefix.
        pool: states [U,A,2,R,G,D]; None if no token attends a neighbour.
        laid: their places; None without states.
        total: S, number of columns of this pass and of earlier calls.
        turns: one per attending layer; None for a layer that does not rotate queries. None without states.
        starts: columns of padding on the left of each row. None: without padding.
        last: states and mask of each row's last complete chunk after the call, for the cache; None if no chunk
            completes.
        copied: the tokens of neighbours that can be copied; None for none.
    """

    def __init__(
        self,
        model,
        prefix: Prefix | None,
        pool: Tensor | None,
        laid: Slots | None,
        total: int,
        turns: Sequence[QueryRotations | None] | None,
        starts: Sequence[int] | None,
        last: tuple[Tensor, Tensor] | None,
        copied: Entries | None = None,
    ):
        self.model, self.pool, self.laid, self.turns, self.starts = model, pool, laid, turns, starts
        self.prefix, self.total, self.last, self.copied = prefix, total, last, copied
        self.looks = 1 if laid is None or not model.config.second_look else 2  # the second half of the rows looks again

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None):
        """Return [B,N,H,D]: one softmax over the prefix, the text's own keys and its neighbours'.

        Return None in a layer that attends neither, where the attention is the decoder's, unless tokens look twice.
        """
        place = None if self.pool is None else self.model.layers.get(layer)
        if place is None and self.prefix is None and self.looks == 1:
            return None
        if window is None and key.shape[1] != self.total:
            raise ValueError(f"cache: expected keys of the {self.total} columns so far; got {key.shape[1]}")
        own = (self._own if self.looks == 1 else self._twice)(layer, query, key, value, window, scale)
        return own[0] if place is None else self._merged(place, query, *own, scale)

    def _own(self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float):
        """Return the attention over the prefix and the text's own keys, and its log-sum-exp."""
        dropped = self.total - key.shape[1]  # columns that a cache of a sliding window no longer holds
        starts = [start - dropped for start in self.starts or ()]
        key_mask = left_mask(starts, key.shape[1], key.device) if any(start > 0 for start in starts) else None
        # Such a cache drops a row's tokens only after the window has left the prefix behind.
        if self.prefix is not None and (not dropped or key_mask is not None or self.looks == 2):
            key, value = self.prefix.before(layer, key, value)
            if key_mask is not None:
                key, value, key_mask = _after_padding(key, value, self.prefix.length, starts)
        options = {"causal": True, "window": window, "key_mask": key_mask, "scale": scale, "return_lse": True}
        return rk.relative_attention(query, key, value, **options, backend=self.model.backend)

    def _twice(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *options):
        """Return `_own` of rows of first looks, then of second looks. A chunk of the former continues the latter."""
        m, rows = self.model.config.chunk_len, len(query) // 2
        second = self._own(layer, query[rows:], key[rows:], value[rows:], *options)
        first = []
        for start in range(0, self.total, m):
            now = slice(start, start + m)
            keys, values = (torch.cat((t[rows:, :start], t[:rows, now]), 1) for t in (key, value))
            first.append(self._own(layer, query[:rows, now], keys, values, *options))
        outs, lses = zip(*first)
        return torch.cat((torch.cat(outs, 1), second[0])), torch.cat((torch.cat(lses, 2), second[1]))

    def _merged(self, place: int, query: Tensor, own: Tensor, own_lse: Tensor, scale: float) -> Tensor:
        """Return one softmax over what `own` attended and the neighbours."""
        model, laid = self.model, self.laid
        common = {"scale": scale, "return_lse": True, "backend": model.backend}
        states = self.pool[:, place].index_select(0, laid.place.flatten()).unflatten(0, laid.place.shape)
        common |= {"chunk_len": model.config.chunk_len, "neighbour_mask": laid.mask, "query_start": laid.query_start}
        keys_and_values = states.unbind(3)  # [B,T,K,R,G,D] each
        near, near_lse = rk.chunked_cross_attention(self._query(place, query), *keys_and_values, **common)
        if model.config.rank:
            near = mapped(near, model.value_down[place], model.value_up[place])
        near = (near * model.scale[place, :, None]).to(own.dtype)
        near_lse = near_lse + model.bias[place, :, None]
        return rk.merge_attention(torch.stack((own, near)), torch.stack((own_lse, near_lse)))[0]

    def _query(self, place: int, query: Tensor) -> Tensor:
        """Return the queries that meet neighbours."""
        model, turns = self.model, self.turns[place]
        if model.config.rank:
            raw = query if turns is None else turned(query, turns.back)
            query = mapped(raw, model.query_down[place], model.query_up[place])
            return query if turns is None else turned(query, turns.on)
        return query if turns is None else turned(query, turns.both)
