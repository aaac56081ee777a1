"""Application that serves a model folder's page to this machine alone: it checks hosts and origins."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import mimetypes
from collections.abc import Callable, Mapping
from pathlib import Path

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from retro_model.folders.documents import LARGEST_FILE, MOST_ADDED
from retro_model.folders.reader import LONGEST_TEXT, Options, Reader

from .desk import Desk, Full, Stopped

PAGE = Path(__file__).resolve().parent / "page"
HOSTS = ("127.0.0.1", "localhost")
LARGEST_BODY = 2 << 20  # bytes; JSON may take six bytes for one byte of a file
BODY_SECONDS = 20.0
LONGEST_NAME = 200
LONGEST_ERROR = 400  # characters; an error may quote the question
#: scripts, styles and data only from this server; no frame may hold the page
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src "
    "'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "X-Frame-Options": "DENY",
}


class OwnOrigin:
    """Middleware that refuses requests to other hosts than `HOSTS` and requests from other sites' pages.

    A stranger's name server may resolve its own name to 127.0.0.1; the Host header then still has that name.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # a websocket gets no answer
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        request = Request(scope)
        if refused := self.refused(request.method, request.headers):
            await JSONResponse({"error": refused}, 403, HEADERS)(scope, receive, send)
            return

        async def guarded(message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self.app(scope, receive, guarded)

    @staticmethod
    def refused(method: str, headers: Mapping[str, str]) -> str | None:
        """Return the reason to refuse a request, or None."""
        host = headers.get("host", "")
        if host.rpartition(":")[0] not in HOSTS and host not in HOSTS:
            return "Host: expected 127.0.0.1 or localhost"
        origin = headers.get("origin")
        if origin is not None and origin != f"http://{host}":
            return "Origin: expected this server's own page"
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return "Sec-Fetch-Site: expected this server's own page"
        if method == "POST" and headers.get("content-type", "").split(";")[0] != "application/json":
            return "Content-Type: expected application/json"
        return None


class Service:
    """Answers to the page's requests. The desk's thread runs these methods, one at a time.

    said: the answer to `about`. Each change of the library builds the answer again, so that it never waits for the
    model.
    """

    def __init__(self, reader: Reader, desk: Desk) -> None:
        self.reader, self.written = reader, {}
        self.limits = {"text": LONGEST_TEXT, "file": LARGEST_FILE, "added": MOST_ADDED}
        self.limits |= {"waiting": desk.most, "seconds": desk.seconds}
        self._changed()

    def _changed(self) -> dict:
        self.said = self.reader.about() | {"limits": self.limits}
        return {"library": self.said["library"]}

    def read(self, asked: dict) -> dict:
        return self.reader.score(self._tokens(asked), _options(asked)).to_dict()

    def write(self, asked: dict) -> dict:
        reading, plain = self.reader.write(self._tokens(asked), _options(asked))
        return reading.to_dict() | {"plain": plain}

    def find(self, asked: dict) -> dict:
        return self.reader.find(_text(asked, "text"), _options(asked))

    def answer(self, asked: dict) -> dict:
        """Answer a question. While it is written, `written` has its beginning under the client's ticket."""
        ticket = _ticket(asked)
        try:
            return self.reader.answer(
                _text(asked, "text"), _options(asked), lambda text: self.written.__setitem__(ticket, text)
            )
        finally:
            self.written.pop(ticket, None)

    def forget(self, asked: dict) -> dict:
        self.reader.library.forget(asked.get("document"))
        return self._changed()

    def remember(self, asked: dict) -> dict:
        self.reader.library.remember(asked.get("document"))
        return self._changed()

    def add(self, asked: dict) -> dict:
        """Add the whole held-out document of a passage, or a file of the user's."""
        if "passage" in asked:
            self.reader.passage(asked["passage"])  # raises for an unknown passage
            number = self.reader.passages[asked["passage"]]["document"]
            name, ids = self.reader.held_out.documents[number].name, self.reader.held_out.document_tokens(number)
            text = self.reader.tokenizer.decode_bytes(ids).decode("utf-8", "replace")
        else:
            name, text = _text(asked, "name")[:LONGEST_NAME] or "a file", _text(asked, "text")
        number = self.reader.library.add(name, text)
        return {"document": number} | self._changed()

    def reset(self, _: dict) -> dict:
        self.reader.library.reset()
        return self._changed()

    def _tokens(self, asked: dict):
        return self.reader.passage(asked["passage"]) if "passage" in asked else self.reader.encode(_text(asked, "text"))


def _text(asked: dict, name: str) -> str:
    """Return a string of the request, checked: JSON may hold lone surrogates, UTF-8 may not."""
    text = asked.get(name)
    if not isinstance(text, str):
        raise ValueError(f"{name}: expected a string; got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: expected text; got a lone surrogate as character {error.start + 1}") from None
    return text


def _options(asked: dict) -> Options:
    return Options(**{field.name: asked[field.name] for field in dataclasses.fields(Options) if field.name in asked})


async def _body(request: Request) -> dict:
    """Return the JSON object of a request. Raises: ValueError."""
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


async def _gone(request: Request) -> None:
    """Return when the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _page() -> dict[str, Response]:
    """Return the page's files as responses, so that serving one needs no thread."""
    kinds = {".js": "text/javascript"}  # some systems' tables of types have another
    type_of = lambda file: kinds.get(file.suffix) or mimetypes.guess_type(file.name)[0]  # noqa: E731
    files = filter(Path.is_file, PAGE.iterdir())
    return {file.name: Response(file.read_bytes(), headers=HEADERS, media_type=type_of(file)) for file in files}


def make_app(reader: Reader, desk: Desk | None = None) -> ASGIApp:
    """Return the ASGI application of one model. desk: the queue; None: one of the default size."""
    desk = Desk(reader.model) if desk is None else desk
    service, files = Service(reader, desk), _page()

    async def answer(request: Request, work: Callable, ticket: str | None):
        """Return the desk's answer. Raises: Stopped if the client leaves first."""
        asking, leaving = (asyncio.ensure_future(c) for c in (desk.ask(work, ticket), _gone(request)))
        try:
            await asyncio.wait((asking, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise Stopped("the client has left")
            return asking.result()
        finally:
            asking.cancel()
            leaving.cancel()

    def endpoint(name: str) -> Callable:
        async def call(request: Request) -> Response:
            try:
                asked = await asyncio.wait_for(_body(request), BODY_SECONDS)
                work = functools.partial(getattr(service, name), asked)
                return JSONResponse(await answer(request, work, _ticket(asked)))
            except ValueError as error:
                return _refusal(400, str(error))
            except TimeoutError:
                late = f"expected the whole request within {BODY_SECONDS:.0f} s"
                return _refusal(408, late, {"Connection": "close"})
            except Full:
                seconds = round(desk.wait(desk.most)) + 1
                busy = f"busy: {desk.most} questions are waiting; try again in {seconds} s"
                return _refusal(503, busy, {"Retry-After": str(seconds)}, place=desk.most)
            except (Stopped, ClientDisconnect) as error:
                return _refusal(503, str(error))

        return call

    async def about(_: Request) -> Response:
        return JSONResponse(service.said)

    async def queue(request: Request) -> Response:
        ticket = request.query_params.get("ticket", "")
        place, text = desk.place(ticket), service.written.get(ticket)
        seconds = None if place is None else round(desk.wait(place))
        return JSONResponse({"place": place, "waiting": len(desk.line), "seconds": seconds, "text": text})

    async def page(request: Request) -> Response:
        return files.get(request.path_params.get("name", "index.html")) or Response("not found", 404)

    routes = [Route("/", page), Route("/page/{name}", page), Route("/api/about", about), Route("/api/queue", queue)]
    for name in ("read", "write", "find", "answer", "forget", "remember", "add", "reset"):
        routes.append(Route(f"/api/{name}", endpoint(name), methods=["POST"]))
    return OwnOrigin(Starlette(routes=routes))


def _ticket(asked: dict) -> str | None:
    """Return the name under which a client asks for its place in the queue."""
    ticket = asked.get("ticket")
    return ticket if isinstance(ticket, str) and 0 < len(ticket) <= 64 else None


def _refusal(status: int, error: str, headers: dict | None = None, **more) -> Response:
    return JSONResponse({"error": error[:LONGEST_ERROR], **more}, status, headers)
