"""The page of a model folder, for this machine alone: 127.0.0.1, own
hosts and origins, nothing from elsewhere on the page.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from .reader import Options, Reader

PAGE = Path(__file__).resolve().parent / "page"
HOSTS = ("127.0.0.1", "localhost")
LARGEST_BODY = 4 << 20  # bytes
LONGEST_NAME = 200
#: scripts, styles and data from here only; nobody may frame the page
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src "
    "'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "X-Frame-Options": "DENY",
}


class OwnOrigin:
    """Lets through requests to `HOSTS` and, where they change or ask something, from a page of this server.

    A name that a stranger's server resolves to 127.0.0.1 stays in the Host header: it is refused, and so is another
    site's Origin.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # websockets there are none
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        refused = self._refused(Request(scope))
        if refused:
            await JSONResponse({"error": refused}, 403, HEADERS)(scope, receive, send)
            return

        async def guarded(message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    *((k.lower().encode(), v.encode()) for k, v in HEADERS.items()),
                ]
            await send(message)

        await self.app(scope, receive, guarded)

    @staticmethod
    def _refused(request: Request) -> str | None:
        host = request.headers.get("host", "")
        if host.rpartition(":")[0] not in HOSTS and host not in HOSTS:
            return "Host: expected 127.0.0.1 or localhost"
        origin = request.headers.get("origin")
        if origin is not None and origin != f"http://{host}":
            return "Origin: expected this server's own page"
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return "Sec-Fetch-Site: expected this server's own page"
        if request.method == "POST" and request.headers.get("content-type", "").split(";")[0] != "application/json":
            return "Content-Type: expected application/json"
        return None


class Service:
    """What the page may ask of a reader; one request at a time, for the library changes under them."""

    def __init__(self, reader: Reader) -> None:
        self.reader, self.lock = reader, threading.Lock()

    def about(self, _: dict) -> dict:
        return self.reader.about()

    def read(self, asked: dict) -> dict:
        return self.reader.read(self._tokens(asked), _options(asked)).to_dict()

    def write(self, asked: dict) -> dict:
        reading, plain = self.reader.write(self._tokens(asked), _options(asked))
        return reading.to_dict() | {"plain": plain}

    def forget(self, asked: dict) -> dict:
        self._library().forget(asked.get("document"))
        return {"library": self.reader.library_state()}

    def remember(self, asked: dict) -> dict:
        self._library().remember(asked.get("document"))
        return {"library": self.reader.library_state()}

    def add(self, asked: dict) -> dict:
        """A file that was given, or a held-out document whole."""
        if "passage" in asked:
            self.reader.passage(asked["passage"])  # raises where there is none
            number = self.reader.passages[asked["passage"]]["document"]
            name = self.reader.held_out.documents[number].name
            text = self.reader.tokenizer.decode_bytes(self.reader.held_out.document_tokens(number)).decode(
                "utf-8", "replace"
            )
        else:
            name, text = _text(asked, "name")[:LONGEST_NAME] or "a file", _text(asked, "text")
        number = self._library().add(name, text)
        return {"document": number, "library": self.reader.library_state()}

    def reset(self, _: dict) -> dict:
        self._library().reset()
        return {"library": self.reader.library_state()}

    def _tokens(self, asked: dict):
        return self.reader.passage(asked["passage"]) if "passage" in asked else self.reader.encode(_text(asked, "text"))

    def _library(self):
        if self.reader.library is None:
            raise ValueError(f"a {self.reader.folder.kind} model has no library: it reads its own past")
        return self.reader.library

    def answer(self, name: str, asked: dict) -> dict:
        """The result of a method by name, alone."""
        with self.lock:
            return getattr(self, name)(asked)


def _text(asked: dict, name: str) -> str:
    if not isinstance(asked.get(name), str):
        raise ValueError(f"{name}: expected a string; got {type(asked.get(name)).__name__}")
    return asked[name]


def _options(asked: dict) -> Options:
    return Options(
        **{name: asked[name] for name in ("k", "retrieval", "temperature", "new_tokens", "seed") if name in asked}
    )


async def _body(request: Request) -> dict:
    """The JSON object that was sent. Raises: ValueError."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > LARGEST_BODY:
            raise ValueError(f"expected at most {LARGEST_BODY >> 20} MB; got more")
    try:
        asked = json.loads(bytes(data) or b"{}")
    except (ValueError, RecursionError):
        raise ValueError("expected JSON; got something else") from None
    if not isinstance(asked, dict):
        raise ValueError(f"expected a JSON object; got {type(asked).__name__}")
    return asked


def make_app(reader: Reader) -> ASGIApp:
    """The server of one model; see `command` for how it listens."""
    service = Service(reader)

    def endpoint(name: str) -> Callable:
        async def call(request: Request) -> Response:
            try:
                asked = await _body(request) if request.method == "POST" else {}
                return JSONResponse(await run_in_threadpool(service.answer, name, asked))
            except ValueError as error:
                return JSONResponse({"error": str(error)}, 400)

        return call

    async def page(_: Request) -> Response:
        return FileResponse(PAGE / "index.html")

    asked = [
        Route(f"/api/{name}", endpoint(name), methods=["POST"])
        for name in ("read", "write", "forget", "remember", "add", "reset")
    ]
    routes = [
        Route("/", page),
        Route("/api/about", endpoint("about")),
        *asked,
        Mount("/page", StaticFiles(directory=PAGE)),
    ]
    return OwnOrigin(Starlette(routes=routes))
