"""Neighbours that recur: what the encoder makes of their tokens alone is made once a call, and kept between calls where
nothing changes it.

Up to the first layer that attends the retrieving chunk, a neighbour's encoding is a function of its tokens. Windows of
one document retrieve the same neighbours again and again, and so do overlapping windows.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor, nn


def row_keys(neighbours: Tensor, mask: Tensor | None, share: bool | None) -> list[bytes] | None:
    """Keys that identify neighbours [S,R] under their mask [S,R]; None if the host must not read them.

    share: None reads what lies in the host's memory, True also what a GPU has to be waited for, False nothing. What is
    compiled, captured or transformed is never read, for it runs again with other tokens.
    """
    if share is False or torch.compiler.is_compiling() or not neighbours.numel():
        return None
    traced = torch._C._get_tracing_state() is not None or torch._C._len_torch_dispatch_stack()
    if traced or type(neighbours) is not Tensor or torch._C._functorch.is_functorch_wrapped_tensor(neighbours):
        return None
    if neighbours.device.type != "cpu" and (not share or torch.cuda.is_current_stream_capturing()):
        return None
    rows = neighbours.cpu().numpy()
    if mask is None:
        return [b"\0" + row.tobytes() for row in rows]
    return [b"\1" + row.tobytes() + real.tobytes() for row, real in zip(rows, mask.cpu().numpy())]


def fingerprint(modules: Iterable[nn.Module]) -> Hashable | None:
    """Changes whenever a weight does: memory, type and version of each; None where a weight has no version to ask for.

    A version counts what autograd sees. Who writes through `.data` goes behind its back, and ours.
    """
    weights = [w for module in modules for w in (*module.parameters(), *module.buffers())]
    if any(type(w) not in (Tensor, nn.Parameter) or w.is_inference() for w in weights):
        return None
    return tuple((id(w), w.data_ptr(), w.dtype, w._version) for w in weights)


class Readings:
    """LRU cache of encodings of neighbours, of at most `max_bytes`; the least recently used go
    first.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes, self.bytes = max_bytes, 0
        self.state: Hashable = None  # of whatever the readings depend on beside the tokens
        self.found = self.read = 0  # distinct neighbours that were here, and that were not
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self):
        return Readings, (self.max_bytes,)  # a copy of the model begins with none

    def __len__(self) -> int:
        return len(self._kept)

    def forget(self) -> None:
        """Everything."""
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        self._kept.clear()
        self.bytes, self.state = 0, None

    def known(self, keys: Sequence[bytes], state: Hashable) -> dict[bytes, Tensor]:
        """Cached encodings of `keys`. A change of state empties the cache first."""
        with self._lock:
            if state != self.state:
                self._forget()
                self.state = state
            here = {key: self._kept[key] for key in keys if key in self._kept}
            for key in here:
                self._kept.move_to_end(key)
            self.found += len(here)
            self.read += len(keys) - len(here)
            return here

    def keep(self, keys: Sequence[bytes], readings: Tensor, state: Hashable) -> None:
        """Readings [U,R,d'] of the neighbours `keys`."""
        with self._lock:
            if state != self.state:
                return
            for key, reading in zip(keys, readings.detach()):
                if key not in self._kept and reading.nbytes <= self.max_bytes:
                    self._kept[key] = reading.clone()
                    self.bytes += reading.nbytes
            while self.bytes > self.max_bytes:
                self.bytes -= self._kept.popitem(last=False)[1].nbytes


class Sharing:
    """One call's S neighbours: those in `rows` are read, of which `spread` makes what was read of each of the S."""

    def __init__(self, keys: Sequence[bytes], device: torch.device, kept: Readings | None, state: Hashable):
        first = {}
        for row, key in enumerate(keys):
            first.setdefault(key, row)
        self.kept, self.state = kept, state
        self.known = {} if kept is None else kept.known(list(first), state)
        self.new = [key for key in first if key not in self.known]
        place = {key: at for at, key in enumerate((*self.new, *self.known))}
        self.rows = torch.tensor([first[key] for key in self.new], dtype=torch.int64, device=device)
        self.place = torch.tensor([place[key] for key in keys], dtype=torch.int64, device=device)

    def pool(self, read: Tensor | None) -> Tensor:
        """Readings of the distinct neighbours, in the order that `place` counts: those in `rows` as they were `read`
        (None: none were), then those known before."""
        parts = [] if read is None else [read]
        if self.kept is not None:
            if read is not None:
                self.kept.keep(self.new, read, self.state)
            if self.known:
                parts.append(torch.stack(list(self.known.values())))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def spread(self, read: Tensor) -> Tensor:
        """Encodings of the S neighbours [S,R,d'], gathered from the encodings of `rows`."""
        return self.pool(read).index_select(0, self.place)
