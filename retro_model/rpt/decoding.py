"""Forward pass of the tokens after those in a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from retro_model.base import transfer
from retro_model.layers import Rotation, rotation

from .cache import RPTCache
from .config import OWN
from .layers import Memory, Retrieved

ROOM = 64  # initial size of the gate's cache, in chunks


@torch.no_grad()
def decode(
    model, tokens: Tensor, index: Tensor | None, retrieval: bool, cache: RPTCache
) -> tuple[Tensor, Retrieved | None]:
    """Return final activations [B,N,d] of new tokens, and the retrieval (-1 in rows that complete fewer chunks).

    The arguments are the checked arguments of `RPT.forward`.
    """
    retrieved = begin(cache, model.embedding.weight, retrieval, tokens.shape[1])
    n, groups = tokens.shape[1], {}
    for row, p in enumerate(cache.positions):  # single tokens form one group, whatever their positions
        groups.setdefault(p if n > 1 else 0, []).append(row)
    out = None
    for members in groups.values():
        rows = slice(None) if len(groups) == 1 else transfer.numbers(members, tokens.device)
        call = Call(model, cache, rows, [cache.positions[r] for r in members], members, n)
        result = call.run(tokens[rows], None if index is None else index[rows])
        call.record(retrieved)
        out = result.new_empty(cache.batch, *result.shape[1:]) if out is None else out
        out[rows] = result
    cache.positions = [p + n for p in cache.positions]
    return out, retrieved


def begin(cache: RPTCache, like: Tensor, retrieval: bool, count: int) -> Retrieved | None:
    """Begin a call of `count` tokens: return its `Retrieved`, to be filled; None without chunks or retrieval."""
    if cache.retrieval not in (None, retrieval):
        raise ValueError(f"retrieval: expected {cache.retrieval}, as in this cache's first call; got {retrieval}")
    cache.retrieval = retrieval
    chunks = cache.completes(count)
    if not retrieval or not chunks:
        return None
    none = torch.full((cache.batch, chunks, cache.num_neighbours), -1, device=like.device)
    return Retrieved(None, none, none.new_zeros(none.shape, dtype=like.dtype))


class Call:
    """New tokens of some rows: one token each, or several if all rows have the same position.

    `complete` gets the lower decoder's states, `read` is an upper layer's chunked cross-attention, and `store` ends the
    call.
    """

    def __init__(self, model, cache: RPTCache, rows, positions: list[int], members: list[int], count: int):
        self.model, self.cache, self.rows, self.members, self.count = model, cache, rows, members, count
        self.config, self.starts = model.config, positions
        self.fresh: list[tuple[Tensor, Memory]] = []  # rows in which chunks complete, and these chunks' memory
        device = model.embedding.weight.device
        self.row = transfer.numbers(members, device)
        self.position = transfer.numbers(positions, device)[:, None] + torch.arange(count, device=device)  # [b,N]

    def run(self, tokens: Tensor, index: Tensor | None) -> Tensor:
        """Return final activations [b,N,d]."""
        model, config = self.model, self.config
        x = model.embedding(tokens)
        turn = rotation(self.position, config.head_dim, x.dtype)
        reader_turn = rotation(model.reader_positions(self.position), config.head_dim, x.dtype)
        for number, layer in enumerate(model.layers):
            if number == config.lower_layers and self.cache.retrieval:
                self.complete(x, index)
            x = x + self._window(number, layer.attention, layer.attention_norm(x), turn)
            if layer.cca is not None and self.cache.retrieval:
                x = x + self.read(number, layer.cca, layer.cca_norm(x), reader_turn)
            x = layer.feed(x)
        self.store()
        return model.norm(x)

    def store(self) -> None:
        """Store mask and gates of the last chunks' neighbours for the next call."""
        for rows, memory in self.fresh:
            for name, new in (("neighbour mask", memory.neighbour_mask), ("gate", memory.gate)):
                self._put(self.cache.row(name, new, *new.shape[2:]), rows, new[:, -1])

    def record(self, retrieved: Retrieved | None) -> None:
        """Write the neighbours of this call's chunks into their rows of the result of `begin`."""
        for at, memory in self.fresh:
            retrieved.index[at, : memory.index.shape[1]] = memory.index
            retrieved.gate[at, : memory.gate.shape[1]] = memory.gate.to(retrieved.gate.dtype)

    @staticmethod
    def _put(held: Tensor, at, new: Tensor) -> None:
        """Write in the type of `held`, which autocast may differ from."""
        held[at] = new.to(held.dtype)

    def _window(self, number: int, attention, x: Tensor, turn: Rotation) -> Tensor:
        cache, size = self.cache, self.config.segment
        query, new = attention.queries(x, turn), attention.project(x, turn)
        names = (f"window key {number}", f"window value {number}")
        held = [cache.row(name, t, cache.ring, *t.shape[2:]) for name, t in zip(names, new)]
        if self.count > 1:
            p = self.starts[0]
            first = max(0, p - 2 * size + 1 if attention.sliding else size * (p // size - 1))
            columns = torch.arange(first, p, device=x.device) % cache.ring
            before = [t[self.rows][:, columns] for t in held]
        kept = min(self.count, cache.ring)
        columns = self.position[:, -kept:] % cache.ring
        for t, states in zip(held, new):
            self._put(t, (self.row[:, None], columns), states[:, -kept:])
        if self.count > 1:
            return attention.window(query, *(torch.cat([a, b.to(a.dtype)], 1) for a, b in zip(before, new)))
        used = min(cache.ring, max(self.starts) + 1)
        column = torch.arange(used, device=x.device)
        there = self.position - (self.position - column) % cache.ring  # [b,used]: position in each column
        first = 0 if attention.sliding else (size * (self.position // size - 1)).clamp(min=0)
        return attention.attend(query, *(t[self.rows][:, :used] for t in held), key_mask=there >= first)

    def complete(self, hidden: Tensor, index: Tensor | None) -> None:
        """Encode, search and gate the chunks that complete with states [b,N,d], into `fresh`."""
        m = self.config.chunk_len
        chunk = self.cache.row("chunk", hidden, m, hidden.shape[-1])
        if self.count == 1:
            self._put(chunk, (self.row, self.position[:, 0] % m), hidden[:, 0])
            groups: dict[int, list[int]] = {}
            for at, p in enumerate(self.starts):
                if (p + 1) % m == 0:
                    groups.setdefault(p // m, []).append(at)
            for number, ats in groups.items():
                members = [self.members[at] for at in ats]
                rows = transfer.numbers(members, hidden.device)
                given = None if index is None else index[transfer.numbers(ats, hidden.device)][:, :1]
                self.fresh.append((rows, self._remember(rows, members, number, chunk[rows].unsqueeze(1), given)))
            return
        phase, first = self.starts[0] % m, self.starts[0] // m
        hidden = torch.cat([chunk[self.rows, :phase], hidden.to(chunk.dtype)], 1)
        complete = hidden.shape[1] // m
        rest = hidden[:, complete * m :]
        chunk[self.rows, : rest.shape[1]] = rest
        if complete:
            chunks = hidden[:, : complete * m].unflatten(1, (complete, m))
            given = None if index is None else index[:, :complete]
            self.fresh.append((self.row, self._remember(self.row, self.members, first, chunks, given)))

    def _remember(self, rows: Tensor, members: list[int], first: int, chunks: Tensor, index: Tensor | None):
        """Return the memory of chunks [g,c,m,d], numbers first, first + 1, ..., of these rows; `members` on the host.

        A chunk joins the index when its successor completes.
        """
        model, cache, k = self.model, self.cache, self.cache.num_neighbours
        states, query, key = chunks, None, None
        if model.retriever is not None:
            states = model.retriever.encode(chunks.flatten(1, 2))
            query, key = model.retriever.project(states)
        series, keys = self._after_waiting("states", rows, first, states), None
        pairs = model.neighbours.pair(series[:, :-1], series[:, 1:]) if series.shape[1] > 1 else None
        if key is not None:
            keys = self._after_waiting("key", rows, first, key)
        indexes = [cache.indexes[row] for row in members]
        if pairs is not None:
            for at, held in enumerate(indexes):
                held.add(None if keys is None else keys[at, :-1], pairs[at])
        if query is not None:
            options = {"chunk": first, "excluded_chunks": self.config.excluded_chunks}
            own = torch.stack([held.search(asked, k, **options)[1] for held, asked in zip(indexes, query)])
            index = own if index is None else torch.where(index == OWN, own, index)
        empty = chunks.new_zeros(*index.shape[1:], 2 * chunks.shape[2], chunks.shape[3])
        read = torch.stack([held.states(asked) if len(held) else empty for held, asked in zip(indexes, index)])
        neighbours, neighbour_mask = model.neighbours.augment(read, chunks), index >= 0
        position = torch.arange(neighbours.shape[-2], device=chunks.device)
        turn = rotation(position, self.config.head_dim, neighbours.dtype)
        start = first * k

        def extend(*new: Tensor) -> list[Tensor]:
            end, room = start + new[0].shape[1], ROOM * k
            while room < end:
                room *= 2
            parts = []
            for name, part in zip(("gate key", "gate value", "gate mask"), new):
                held = cache.row(name, part, room, *part.shape[2:])
                held[rows, start:end] = part.to(held.dtype)
                parts.append(held[rows, :end])
            return parts

        return Memory(neighbours, turn, index, model.gate(neighbours, neighbour_mask, start, extend))

    def _after_waiting(self, name: str, rows: Tensor, first: int, new: Tensor) -> Tensor:
        """Prepend the last call's last chunk to new ones [g,c,...], and keep the last of these for the next call."""
        waiting = self.cache.row(f"waiting {name}", new, *new.shape[2:])
        series = new if not first else torch.cat([waiting[rows].unsqueeze(1), new], 1)
        self._put(waiting, rows, new[:, -1])
        return series

    def read(self, number: int, cca, x: Tensor, turn: Rotation) -> Tensor:
        """Return layer `number`'s chunked cross-attention of x [b,N,d] to the neighbours of cached and new chunks."""
        config, k, m = self.config, self.cache.num_neighbours, self.config.chunk_len
        shape = (k, config.neighbour_len, config.num_heads, config.head_dim)
        held = [self.cache.row(f"{name} {number}", x, *shape) for name in ("key", "value")]
        mask = self.cache.row("neighbour mask", torch.zeros(0, dtype=torch.bool, device=x.device), k)
        gate = self.cache.row("gate", x, k)
        if self.count == 1:
            parts = [*held, mask.clone(), gate.clone()]  # `keep` stores masks and gates after the last layer
            for rows, memory in self.fresh:
                for t, new in zip(parts, memory.seen(cca)):
                    self._put(t, rows, new[:, 0])
            return cca.read(x, turn, [t[self.rows].unsqueeze(1) for t in parts], m - 1)
        parts = [t[self.rows].unsqueeze(1) for t in (*held, mask, gate)]  # the cached chunk is chunk 0 of the op's call
        for rows, memory in self.fresh:
            parts = [torch.cat([a, b.to(a.dtype)], 1) for a, b in zip(parts, memory.seen(cca))]
            for t, part in zip(held, parts):
                t[rows] = part[:, -1]
        return cca.read(x, turn, parts, self.starts[0] % m + m)
