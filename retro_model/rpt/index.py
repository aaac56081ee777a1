"""Index of a growing document: keys of its chunks for search, and their states."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

import retro_kernels as rk
from retro_model.base import checks, disk

KEYS, STATES = 1024, 64  # chunks a block; blocks are never moved


class SelfIndex:
    """Keys [n,d] and states [n,...] of one document's chunks, with search among the chunks before a chunk.

    Example:
        index = SelfIndex()
        index.add(keys, states)                          # chunks 0, 1, ... in order; again as the document grows
        scores, found = index.search(query, k=2, chunk=40, excluded_chunks=32)  # [q,2]; query [q,d] of chunks 40, ...
        read = index.states(found)                       # [q,2,...]; -1 gives chunk 0's states, to be masked

    The search is exact, by `rk.TopkStream`.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Empty the index."""
        self._keys: list[Tensor] = []
        self._states: list[Tensor] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, keys: Tensor | None, states: Tensor) -> None:
        """Append chunks: keys [n,d] and states [n,...]. Types and widths must be the same as in the first call.

        keys None: the index is not searched.
        """
        if self._count and (keys is None) != (not self._keys):
            raise ValueError("keys: expected keys in every call or in none; got both")
        if keys is not None:
            if len(keys) != len(states):
                raise ValueError(f"keys: expected [n,d] with n={len(states)} as in states; got n={len(keys)}")
            self._append(self._keys, keys.detach(), KEYS)
        self._append(self._states, states.detach(), STATES)
        self._count += len(states)

    def _append(self, blocks: list[Tensor], new: Tensor, size: int) -> None:
        at = self._count % size
        while len(new):
            if at == 0:
                blocks.append(new.new_empty(size, *new.shape[1:]))
            part, new = new[: size - at], new[size - at :]
            blocks[-1][at : at + len(part)] = part
            at = 0

    def search(self, query: Tensor, k: int, *, chunk: int, excluded_chunks: int) -> tuple[Tensor, Tensor]:
        """Return the k best chunks j <= i - excluded_chunks for queries [q,d] of chunks i = chunk, chunk + 1, ...

        Returns:
            scores float32 [q,k], descending, and numbers int64 [q,k]; -inf and -1 if there are fewer.
        """
        checks.integer("k", k, low=1)
        if not self._count:
            none = torch.full((len(query), k), -torch.inf, device=query.device)
            return none, none.new_full(none.shape, -1, dtype=torch.int64)
        if not self._keys:
            raise ValueError("search: expected an index with keys; got one of states alone")
        stream = rk.TopkStream(query[None], k, causal_gap=excluded_chunks, query_offset=chunk)
        for number, block in enumerate(self._keys):
            stream.update(block[: self._count - number * KEYS][None])
        return tuple(t[0] for t in stream.result())

    def states(self, index: Tensor) -> Tensor:
        """Return the states [...,*shape] of chunks int64 [...]; the index -1 gives the states of chunk 0."""
        rows = index.clamp(min=0).flatten()
        if len(self._states) == 1:
            return self._states[0][rows].unflatten(0, index.shape)
        out = self._states[0].new_empty(len(rows), *self._states[0].shape[1:])
        block = rows // STATES
        for number in block.unique().tolist():
            out[block == number] = self._states[number][rows[block == number] % STATES]
        return out.unflatten(0, index.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and states."""
        return sum(t.nbytes for t in [*self._keys, *self._states])

    def save(self, path: str | Path) -> None:
        """Write one file for `restore`, atomically."""
        path, held = Path(path), {"keys": self._keys, "states": self._states}
        parts = {name: torch.cat(blocks)[: self._count].cpu() for name, blocks in held.items() if blocks}
        temporary = path.with_name(path.name + ".new")
        torch.save({"kind": "SelfIndex", **parts}, temporary)
        temporary.replace(path)

    @classmethod
    def restore(cls, path: str | Path, *, device: str | torch.device = "cpu") -> SelfIndex:
        """Load the index that `save` wrote. Raises: FileNotFoundError, ValueError naming the file."""
        with disk.open_plain(Path(path), "rb") as file:
            try:
                parts = torch.load(file, map_location=device, weights_only=True)
                if parts["kind"] != "SelfIndex":
                    raise KeyError(parts["kind"])
            except Exception as error:
                raise ValueError(f"{path}: truncated, corrupt or no index ({error})") from error
        index = cls()
        if "states" in parts:
            index.add(parts.get("keys"), parts["states"])
        return index
