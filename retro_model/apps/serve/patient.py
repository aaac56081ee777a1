"""uvicorn's protocol for HTTP/1.1 with a time limit on the head of a request, and a fast path for files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
#: a whole request: path, then headers, a line each
GET = re.compile(rb"GET (/[\w./-]*) HTTP/1\.1\r\n((?:[\w-]+:[\x20-\x7e]*\r\n)+)\r\n")
#: headers of a request with a body or for another protocol, which h11 must read
MORE = {"content-length", "transfer-encoding", "upgrade"}


class Patient(H11Protocol):
    """Protocol that closes a connection if the head of a request takes over `HEAD_SECONDS`; uvicorn's waits for ever.

    It answers a GET of a file itself, in less than half the time of h11 and the application. file: (path, headers) ->
    headers and body of the answer, or None if the application must answer.
    """

    late = None

    def __init__(self, *args, file: Callable[[str, Mapping[str, str]], bytes | None] = lambda *_: None, **kwargs):
        super().__init__(*args, **kwargs)
        self.file = file

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        if not self._served(data):
            super().data_received(data)
        self._watch()

    def connection_lost(self, error) -> None:
        self._unwatch()
        super().connection_lost(error)

    def _served(self, data: bytes) -> bool:
        """Answer if the data is one whole request for a file; return whether it was."""
        asked = GET.fullmatch(data)
        if not asked or self.conn.their_state is not h11.IDLE or self.conn.trailing_data[0]:
            return False
        lines = [line.partition(":") for line in asked[2].decode("ascii").splitlines()]
        headers = {name.lower(): value.strip() for name, _, value in lines}
        if len(headers) < len(lines) or MORE & headers.keys():
            return False
        answer = self.file(asked[1].decode("ascii"), headers)
        if answer is None:
            return False
        self._unset_keepalive_if_required()
        self._unwatch()  # the next request has a time limit of its own
        closing = "close" in headers.get("connection", "").lower()
        stated = [*self.server_state.default_headers, *([(b"connection", b"close")] if closing else [])]
        head = b"".join([b"%s: %s\r\n" % pair for pair in stated])
        self.transport.write(b"HTTP/1.1 200 OK\r\n" + head + answer)
        if closing:
            self.transport.close()
        return True

    def _watch(self) -> None:
        """Start the clock at the first byte of a head, and stop it at the last."""
        if self.conn.their_state is not h11.IDLE:
            self._unwatch()
        elif self.late is None:
            self.late = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _unwatch(self) -> None:
        if self.late is not None:
            self.late.cancel()
            self.late = None
