"""The page of a model folder, for this machine alone: 127.0.0.1, own hosts and origins, nothing from elsewhere on the
page."""

from __future__ import annotations

import asyncio
import functools
import json
import mimetypes
from collections.abc import Callable, Mapping
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from .desk import Desk, Full, Stopped
from .library import LARGEST_FILE, MOST_ADDED
from .reader import LONGEST_TEXT, Options, Reader

PAGE = Path(__file__).resolve().parent / "page"
HOSTS = ("127.0.0.1", "localhost")
LARGEST_BODY = 2 << 20  # bytes; JSON may write a byte of a file as six
BODY_SECONDS = 20.0
LONGEST_NAME = 200
LONGEST_ERROR = 400  # characters: an error may quote the question
#: scripts, styles and data from here only; nobody may frame the page
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src "
    "'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "X-Frame-Options": "DENY",
}


def _stated(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Headers as they are sent."""
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]


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
        request = Request(scope)
        if refused := self.refused(request.method, request.headers):
            await JSONResponse({"error": refused}, 403, HEADERS)(scope, receive, send)
            return

        async def guarded(message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_stated(HEADERS)]
            await send(message)

        await self.app(scope, receive, guarded)

    @staticmethod
    def refused(method: str, headers: Mapping[str, str]) -> str | None:
        """Why a request is refused."""
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
    """Answers to the page's questions. All but `said` are given by the desk's thread, one at a time.

    said: the answer to `about`, made anew after each change of the library, so that it never waits for the model.
    """

    def __init__(self, reader: Reader, desk: Desk) -> None:
        self.reader, self.limits = (
            reader,
            {
                "text": LONGEST_TEXT,
                "file": LARGEST_FILE,
                "added": MOST_ADDED,
                "waiting": desk.most,
                "seconds": desk.seconds,
            },
        )
        self._changed()

    def _changed(self) -> dict:
        self.said = self.reader.about() | {"limits": self.limits}
        return {"library": self.said["library"]}

    def read(self, asked: dict) -> dict:
        return self.reader.read(self._tokens(asked), _options(asked)).to_dict()

    def write(self, asked: dict) -> dict:
        tokens = self.reader.question(_text(asked, "text")) if asked.get("question") is True else self._tokens(asked)
        reading, plain = self.reader.write(tokens, _options(asked))
        return reading.to_dict() | {"plain": plain}

    def forget(self, asked: dict) -> dict:
        self._library().forget(asked.get("document"))
        return self._changed()

    def remember(self, asked: dict) -> dict:
        self._library().remember(asked.get("document"))
        return self._changed()

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
        return {"document": number} | self._changed()

    def reset(self, _: dict) -> dict:
        self._library().reset()
        return self._changed()

    def _tokens(self, asked: dict):
        return self.reader.passage(asked["passage"]) if "passage" in asked else self.reader.encode(_text(asked, "text"))

    def _library(self):
        if self.reader.library is None:
            raise ValueError(f"a {self.reader.folder.kind} model has no library: it reads its own past")
        return self.reader.library


def _text(asked: dict, name: str) -> str:
    """A string that can be written as UTF-8: JSON also has halves of characters."""
    text = asked.get(name)
    if not isinstance(text, str):
        raise ValueError(f"{name}: expected a string; got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: expected text; got a lone surrogate as character {error.start + 1}") from None
    return text


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


async def _gone(request: Request) -> None:
    """Returns when the client leaves."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _page() -> dict[str, Response]:
    """The page's files, read once: they are served without a thread and never wait for one."""
    kinds = {".js": "text/javascript"}  # not every system's table says so
    return {
        file.name: Response(file.read_bytes(), media_type=kinds.get(file.suffix) or mimetypes.guess_type(file.name)[0])
        for file in PAGE.iterdir()
        if file.is_file()
    }


def plain_files() -> Callable[[str, Mapping[str, str]], bytes | None]:
    """Return what `patient.Patient` answers by itself: the page's files, for requests that `OwnOrigin` lets through."""
    answers = {}
    for name, response in _page().items():
        headers = [*response.raw_headers, *_stated(HEADERS)]
        answers[f"/page/{name}"] = b"".join([b"%s: %s\r\n" % pair for pair in headers]) + b"\r\n" + response.body
    answers["/"] = answers["/page/index.html"]
    return lambda path, headers: None if OwnOrigin.refused("GET", headers) else answers.get(path)


def make_app(reader: Reader, desk: Desk | None = None) -> ASGIApp:
    """The server of one model; see `command` for how it listens. desk: the queue; None: one of the usual size."""
    desk = Desk(reader.model) if desk is None else desk
    service, files = Service(reader, desk), _page()

    async def answer(request: Request, work: Callable, ticket: str | None):
        """The desk's answer; raises Stopped where the client leaves first."""
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
                return _refusal(408, late, headers={"Connection": "close"})
            except Full:
                seconds = round(desk.wait(desk.most)) + 1
                busy = f"busy: {desk.most} questions are before yours; try again in {seconds} s"
                return _refusal(503, busy, {"Retry-After": str(seconds)}, place=desk.most)
            except (Stopped, ClientDisconnect) as error:
                return _refusal(503, str(error))

        return call

    async def about(_: Request) -> Response:
        return JSONResponse(service.said)

    async def queue(request: Request) -> Response:
        place = desk.place(request.query_params.get("ticket", ""))
        seconds = None if place is None else round(desk.wait(place))
        return JSONResponse({"place": place, "waiting": len(desk.line), "seconds": seconds})

    async def page(request: Request) -> Response:
        return files.get(request.path_params.get("name", "index.html")) or Response("not found", 404)

    asked = [
        Route(f"/api/{name}", endpoint(name), methods=["POST"])
        for name in ("read", "write", "forget", "remember", "add", "reset")
    ]
    routes = [
        Route("/", page),
        Route("/page/{name}", page),
        Route("/api/about", about),
        Route("/api/queue", queue),
        *asked,
    ]
    return OwnOrigin(Starlette(routes=routes))


def _ticket(asked: dict) -> str | None:
    """The name under which a client asks for its place."""
    ticket = asked.get("ticket")
    return ticket if isinstance(ticket, str) and 0 < len(ticket) <= 64 else None


def _refusal(status: int, error: str, headers: dict | None = None, **more) -> Response:
    return JSONResponse({"error": error[:LONGEST_ERROR], **more}, status, headers)
