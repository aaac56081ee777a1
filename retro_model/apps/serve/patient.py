"""uvicorn's protocol for HTTP/1.1 with a limit on how long the head of a request may take to arrive."""

from __future__ import annotations

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0


class Patient(H11Protocol):
    """Closes a connection whose next request is not whole after `HEAD_SECONDS`; uvicorn itself would wait for ever."""

    late = None

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, error) -> None:
        self._unwatch()
        super().connection_lost(error)

    def _watch(self) -> None:
        """Starts the clock at the first byte of a head, and stops it at the last."""
        if self.conn.their_state is not h11.IDLE:
            self._unwatch()
        elif self.late is None:
            self.late = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _unwatch(self) -> None:
        if self.late is not None:
            self.late.cancel()
            self.late = None
