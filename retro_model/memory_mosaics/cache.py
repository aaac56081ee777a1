"""Cache of a Memory Mosaic that decodes: the pairs of every contextual memory, and the last averages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from retro_model.base import checks

from .config import MosaicsConfig

EVICTIONS = ("oldest", "least_read")


class MosaicsCache:
    """Cache of the memories of B sequences. `model(tokens, cache=cache)` appends one token or several.

    A contextual memory holds its pairs and its last average. It also holds the last token's key, because the value of
    that pair depends on the next token. A persistent memory holds only its last average. A sequence may have any
    length, because the model has no positions.

    Example:
        cache = model.make_cache(batch=2)                  # grows with the sequence
        cache = model.make_cache(batch=2, capacity=512)    # evicts the oldest pairs
        logits = model(prompt, cache=cache)
        logits = model(token, cache=cache)                 # [2,1] more

    Args:
        config: the model's.
        batch: B.
        capacity: maximum number of pairs of a memory; None: no limit. A call reads all held pairs and those of its N
            tokens, at most capacity + N, and then evicts. Memory for `capacity` pairs is allocated at once.
        limit: likewise; the smaller of the two applies. `join` keeps the limit, but not the capacity.
        evict: "oldest": a sliding window. "least_read": in each head, the pairs with the least sum of attention
            weights. The sums decay by 1 - 1/capacity a token. A new pair starts with 1, the sum of a pair with average
            weights. It costs a second product of queries and keys a step, and a copy of the memory.

    Calls with a cache are not differentiable. The model's weights must not change while a cache is used.

    Source: Zhang et al., arXiv 2405.06394, section 2 (when a pair is stored); eviction: its section 6.
    """

    def __init__(
        self,
        config: MosaicsConfig,
        batch: int,
        capacity: int | None = None,
        *,
        limit: int | None = None,
        evict: str = "oldest",
    ):
        self.config, self.batch, self.limit = config, checks.integer("batch", batch, low=1), limit
        given = {"capacity": capacity, "limit": limit}
        limits = [checks.integer(name, n, low=1) for name, n in given.items() if n is not None]
        self.capacity = min(limits, default=None)
        if evict not in EVICTIONS:
            raise ValueError(f"evict: expected one of {', '.join(EVICTIONS)}; got {evict!r}")
        self.evict, self.length = evict, 0  # tokens of the longest row
        self.contextual = [ContextualState(self.capacity, evict) for _ in range(config.num_layers)]
        self.persistent = [PersistentState() for _ in range(config.num_layers)]

    @property
    def pairs(self) -> int:
        """Number of pairs that a memory of the longest row holds."""
        return self.contextual[0].held

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors held."""
        states = [*self.contextual, *self.persistent]
        return sum(t.nbytes for state in states for t in vars(state).values() if isinstance(t, Tensor))

    @classmethod
    def join(cls, caches: Sequence[MosaicsCache], capacity: int | None = None) -> MosaicsCache:
        """Return one cache of all rows, in order; the rows may differ in length."""
        kinds = [(c.config, c.limit, c.evict) for c in caches]
        if not kinds or any(kind != kinds[0] for kind in kinds) or not all(c.length for c in caches):
            wanted = "at least one, of one configuration, limit and eviction, with tokens in each"
            raise ValueError(f"caches: expected {wanted}; got {kinds}")
        config, limit, evict = kinds[0]
        joined = cls(config, sum(c.batch for c in caches), capacity, limit=limit, evict=evict)
        joined.length = max(c.length for c in caches)
        contextual = zip(*(c.contextual for c in caches))
        joined.contextual = [ContextualState.join(states, joined.capacity) for states in contextual]
        for state, states in zip(joined.persistent, zip(*(c.persistent for c in caches))):
            state.average = torch.cat([s.average for s in states])
        return joined


class Scalars:
    """Cache of a memory's scalars, which do not change while a cache is used."""

    def __init__(self):
        self.scalars: dict[str, Tensor] = {}

    def scalar(self, memory, name: str) -> Tensor:
        if name not in self.scalars:
            self.scalars[name] = getattr(memory, name)
        return self.scalars[name]


class PersistentState(Scalars):
    """State of one persistent layer: `average` [B,h,hd] of the last token."""

    def __init__(self):
        super().__init__()
        self.average: Tensor | None = None

    def store(self, average: Tensor) -> None:
        self.average = average.clone()  # a view would keep a prompt's whole tensor


class ContextualState(Scalars):
    """State of one contextual layer: pairs in columns `first` to `end` of `keys` and `values` [B,room,h,hd].

    `reads` [B,room,h] is the decayed sum of each pair's attention weights. If sequences differ in length, `present`
    [B,room] masks the columns that a row holds; the shortest row lacks the first `missing`.
    """

    def __init__(self, capacity: int | None, evict: str):
        super().__init__()
        self.capacity, self.evict = capacity, evict
        # The last token's average [B,h,hd], its key k_T [B,1,h,hd], and W_psi x_T [B,1,h,hd], from which its value is
        # made.
        self.average = self.last_key = self.last_projected = None
        self.keys = self.values = self.reads = self.present = None
        self.first = self.end = self.missing = 0

    @property
    def held(self) -> int:
        return self.end - self.first

    def store(
        self, average: Tensor, key: Tensor, projected: Tensor, values: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, dict]:
        """Append N tokens [B,N,h,hd]. Return the held keys and values [B,S,h,hd], and options of the read.

        The options are a mask [B,S] if rows differ in length.
        """
        keys, following = key, projected
        if self.last_key is not None:
            keys, following = torch.cat([self.last_key, key], 1), torch.cat([self.last_projected, projected], 1)
        # copies: a view would keep a prompt's whole tensor
        self.average, self.last_key = average[:, -1].clone(), key[:, -1:].clone()
        self.last_projected = projected[:, -1:].clone()
        self._append(keys[:, :-1], values(following))
        held = slice(self.first, self.end)
        return self.keys[:, held], self.values[:, held], {} if self._mask is None else {"key_mask": self._mask}

    @property
    def _mask(self) -> Tensor | None:
        return None if self.present is None else self.present[:, self.first : self.end]

    def settle(self, query: Tensor, lse: Tensor) -> None:
        """Count a read by `query` [B,N,h,hd] with its `lse` [B,h,N], then evict pairs beyond the capacity."""
        if self.capacity is None:
            return
        if self.evict == "least_read":
            self._count(query, lse, self._mask)
        surplus = self.held - self.capacity
        if surplus <= 0:
            return
        if self.evict == "oldest":
            self.first += surplus
        else:
            # [B,capacity,h]
            kept = self.reads[:, self.first : self.end].topk(self.capacity, dim=1).indices.sort(dim=1).values
            for name in ("keys", "values", "reads"):
                table = getattr(self, name)[:, self.first : self.end]
                index = kept if name == "reads" else kept.unsqueeze(-1).expand(-1, -1, -1, table.shape[-1])
                self._replace(name, table.gather(1, index), self.keys.shape[1])
            if self.present is not None:  # a column that a row lacks has reads -inf in every head
                self._replace("present", self._mask.gather(1, kept[..., 0]), self.keys.shape[1])
            self.first, self.end = 0, self.capacity
        self.missing = max(self.missing - surplus, 0)
        if not self.missing:
            self.present = None

    def _count(self, query: Tensor, lse: Tensor, mask: Tensor | None) -> None:
        """Decay `reads` once a token of the call, and add the token's weights softmax_i(query·k_i)."""
        n, s, decay = query.shape[1], self.held, 1 - 1 / self.capacity
        held = slice(self.first, self.end)
        age = torch.arange(n - 1, -1, -1, device=query.device, dtype=lse.dtype)  # number of later tokens in the call
        new = min(n, s)
        self.reads[:, self.first : self.end - new] *= decay**n
        self.reads[:, self.end - new : self.end] = (decay ** age[n - new :])[:, None]
        logits = torch.einsum("bnhd,bshd->bhns", query.to(lse.dtype), self.keys[:, held].to(lse.dtype))
        visible = torch.arange(s, device=query.device) <= torch.arange(s - n, s, device=query.device)[:, None]
        weights = torch.where(visible, torch.exp(logits - lse.unsqueeze(-1)), 0)
        self.reads[:, held] += torch.einsum("bhns,n->bsh", weights, decay**age)
        if mask is not None:
            self.reads[:, held].masked_fill_(~mask.unsqueeze(-1), -torch.inf)  # empty columns are evicted first

    def _append(self, key: Tensor, value: Tensor) -> None:
        held, n = self.held, key.shape[1]
        if self.keys is None or self.end + n > self.keys.shape[1]:
            fits = self.capacity is not None and held + n <= self.capacity
            room = self.capacity if fits else 2 * held + n  # doubling: each column is moved O(1) times
            old = slice(self.first, self.end)
            # half precision would lose the decay
            reads = key[..., 0].to(torch.promote_types(key.dtype, torch.float32))
            for name, like in (("keys", key), ("values", value), ("reads", reads)):
                table = getattr(self, name)
                self._replace(name, like[:, :0] if table is None else table[:, old], room)
            if self.present is not None:
                self._replace("present", self.present[:, old], room)
            self.first, self.end = 0, held
        self.keys[:, self.end : self.end + n], self.values[:, self.end : self.end + n] = key, value
        self.end += n

    def _replace(self, name: str, held: Tensor, room: int) -> None:
        # columns to come are present in every row
        setattr(self, name, F.pad(held, (0, 0) * (held.dim() - 2) + (0, room - held.shape[1]), value=name == "present"))

    @classmethod
    def join(cls, states: Sequence[ContextualState], capacity: int | None) -> ContextualState:
        """Return one state of all rows, shifted so that all end in the same column."""
        longest = max(state.held for state in states)
        joined = cls(capacity, states[0].evict)
        joined.missing = max(longest - state.held + state.missing for state in states)
        for name in ("average", "last_key", "last_projected"):
            setattr(joined, name, torch.cat([getattr(state, name) for state in states]))
        room = longest if capacity is None else max(capacity, longest)
        for name in ("keys", "values", "reads"):
            parts = [getattr(state, name)[:, state.first : state.end] for state in states]
            pads = [(0, 0) * (part.dim() - 2) + (longest - part.shape[1], room - longest) for part in parts]
            setattr(joined, name, torch.cat([F.pad(part, pad) for part, pad in zip(parts, pads)]))
        if joined.missing:
            all_of = [state.average.new_ones(len(state.average), state.held, dtype=torch.bool) for state in states]
            theirs = [a if state._mask is None else state._mask for a, state in zip(all_of, states)]
            joined._replace("present", torch.cat([F.pad(t, (longest - t.shape[1], 0)) for t in theirs]), room)
        joined.end = longest
        return joined
