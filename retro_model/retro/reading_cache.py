"""Cache of encodings of neighbours that recur, within a call and from call to call; `OwnAttention.keeping` turns it on.

A decoder's encoding of a neighbour is a function of the neighbour's tokens. Windows of one document, and overlapping
windows, often retrieve the same neighbours.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path

import numpy as np
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


def digest(modules: Iterable[nn.Module], *facts: object) -> str:
    """Return a digest of the weights' bytes and the facts' repr, equal in every process."""
    made = hashlib.sha256(repr(facts).encode())
    for module in modules:
        for weight in (*module.parameters(), *module.buffers()):
            made.update(f"{weight.dtype}{list(weight.shape)}".encode())
            made.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return made.hexdigest()


class DiskCache:
    """Folder of encodings, one file a neighbour, shared by processes.

    Files are written atomically and never evicted.

    Args:
        folder: folder of one set of weights. state: `fingerprint` of these weights; the folder serves no other state.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, state: Hashable):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.dtype, self.state = folder, dtype, state

    def get(self, key: bytes) -> Tensor | None:
        """Return the encoding; None if there is none."""
        try:
            return torch.from_numpy(np.load(self._path(key), allow_pickle=False)).view(self.dtype)
        except FileNotFoundError:
            return None

    def put(self, key: bytes, reading: Tensor) -> None:
        """Write an encoding from the host's memory."""
        part = self.folder / f"part-{os.getpid()}-{threading.get_ident()}.npy"
        np.save(part, reading.contiguous().view(torch.uint8).numpy())
        part.replace(self._path(key))

    def _path(self, key: bytes) -> Path:
        return self.folder / f"{hashlib.sha256(key).hexdigest()}.npy"


class ReadingCache:
    """LRU cache of encodings of neighbours, of at most `max_bytes`.

    on_disk: a second cache, on disk and without limit.
    """

    def __init__(self, max_bytes: int, on_disk: DiskCache | None = None):
        self.max_bytes, self.bytes, self.on_disk = max_bytes, 0, on_disk
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
            if self.on_disk is not None and self.on_disk.state == state:
                there = {key: self.on_disk.get(key) for key in keys if key not in here}
                there = {key: reading for key, reading in there.items() if reading is not None}
                self._add(there)
                here |= there
            self.found += len(here)
            self.read += len(keys) - len(here)
            return here

    def store(self, keys: Sequence[bytes], readings: Tensor, state: Hashable) -> None:
        """Cache encodings [U,R,d'] of the neighbours `keys`."""
        with self._lock:
            if state != self.state:
                return
            if self.on_disk is not None and self.on_disk.state == state:
                for key, reading in zip(keys, readings.detach().cpu()):
                    self.on_disk.put(key, reading)
            self._add(dict(zip(keys, readings.detach())))

    def _add(self, readings: dict[bytes, Tensor]) -> None:
        for key, reading in readings.items():
            if key not in self._kept and reading.nbytes <= self.max_bytes:
                self._kept[key] = reading.clone()
                self.bytes += reading.nbytes
        while self.bytes > self.max_bytes:
            self.bytes -= self._kept.popitem(last=False)[1].nbytes
