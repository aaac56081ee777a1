"""Cache of encodings of neighbours that recur, within a call and from call to call; `OwnAttention.keeping` turns it on.

A decoder's encoding of a neighbour is a function of the neighbour's tokens. Windows of one document, and overlapping
windows, often retrieve the same neighbours.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor, nn

from retro_model.base import checks


def row_keys(neighbours: Tensor) -> list[bytes] | None:
    """Return keys that identify neighbours [S,R]. Waits for the device.

    None in a call that is compiled, captured or transformed, because it runs again with other tokens.
    """
    if not checks.readable(neighbours) or not neighbours.numel():
        return None
    if neighbours.device.type != "cpu" and torch.cuda.is_current_stream_capturing():
        return None
    return [row.tobytes() for row in neighbours.cpu().numpy()]


def autocast_types() -> tuple[torch.dtype | None, ...]:
    """Return autocast's type on the CPU and on the GPU; None if it is off."""
    return tuple(torch.get_autocast_dtype(d) if torch.is_autocast_enabled(d) else None for d in ("cpu", "cuda"))


def fingerprint(modules: Iterable[nn.Module]) -> Hashable | None:
    """Return a value that changes with every weight (memory, type, version) and with autocast.

    None if a weight has no version. A write through `.data` changes no version.
    """
    weights = [w for module in modules for w in (*module.parameters(), *module.buffers())]
    if any(type(w) not in (Tensor, nn.Parameter) or w.is_inference() for w in weights):
        return None
    return autocast_types(), *((id(w), w.data_ptr(), w.dtype, w._version) for w in weights)


class ReadingCache:
    """LRU cache of encodings of neighbours, of at most `max_bytes`."""

    def __init__(self, max_bytes: int):
        self.max_bytes, self.bytes = max_bytes, 0
        self.state: Hashable = None  # `fingerprint` of the weights
        self.found = self.read = 0  # distinct neighbours of all calls: hits and misses
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self._lock = threading.RLock()

    def __reduce__(self):
        return ReadingCache, (self.max_bytes,)  # a copy of the model has an empty cache

    def __len__(self) -> int:
        return len(self._kept)

    def forget(self) -> None:
        """Empty the cache."""
        with self._lock:
            self._kept.clear()
            self.bytes, self.state = 0, None

    def known(self, keys: Sequence[bytes], state: Hashable) -> dict[bytes, Tensor]:
        """Return the cached encodings of `keys`. A change of state empties the cache first."""
        with self._lock:
            if state != self.state:
                self.forget()
                self.state = state
            here = {key: self._kept[key] for key in keys if key in self._kept}
            for key in here:
                self._kept.move_to_end(key)
            self.found += len(here)
            self.read += len(keys) - len(here)
            return here

    def store(self, keys: Sequence[bytes], readings: Tensor, state: Hashable) -> None:
        """Cache encodings [U,R,d'] of the neighbours `keys`."""
        with self._lock:
            if state != self.state:
                return
            for key, reading in zip(keys, readings.detach()):
                if key not in self._kept and reading.nbytes <= self.max_bytes:
                    self._kept[key] = reading.clone()
                    self.bytes += reading.nbytes
            while self.bytes > self.max_bytes:
                self.bytes -= self._kept.popitem(last=False)[1].nbytes
