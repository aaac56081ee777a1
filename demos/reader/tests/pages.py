"""A server of a model's page, and the page in a browser."""

import contextlib
import importlib.util
import threading
from collections.abc import Iterator

from retro_model.folders.reader import Reader
from retro_reader.command import listen
from tests import browser
from tests.browser import chromium

__all__ = ["chromium", "open_page", "serving", "unavailable"]


def unavailable() -> str | None:
    """Return the reason why the page cannot be opened here, or None."""
    return browser.unavailable() or (None if importlib.util.find_spec("uvicorn") else "uvicorn is not installed")


@contextlib.contextmanager
def serving(reader: Reader) -> Iterator[str]:
    """Start a server in a thread and return its address."""
    import uvicorn

    from retro_reader.app import make_app

    server = uvicorn.Server(uvicorn.Config(make_app(reader), log_level="warning", ws="none"))
    with listen(0) as socket:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{socket.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)


def open_page(
    chromium, address: str, *, width: int = 1400, height: int = 1000, scheme: str = "light", ready="#text .chosen"
):
    """Open a page and wait for its first text, or for another selector.

    Requests to other hosts and console messages are kept in `.strange`.
    """
    page = chromium.new_page(viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce")
    page.set_default_timeout(120_000)  # milliseconds; a busy machine is slow
    page.strange = []
    page.on(
        "request",
        lambda request: None if request.url.startswith((address, "data:")) else page.strange.append(request.url),
    )
    page.on("console", lambda message: page.strange.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.strange.append(str(error)))
    page.goto(address)
    page.wait_for_selector(ready)
    return page
