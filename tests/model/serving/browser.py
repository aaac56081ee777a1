"""A page in a real browser: the system's Chromium, driven by Playwright's Python package; a server for it."""

import contextlib
import shutil
import threading
from collections.abc import Iterator

from retro_model.serving.command import listen
from retro_model.serving.reader import Reader

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def missing() -> str | None:
    """Why no browser can be driven here; None where one can."""
    try:
        import playwright.sync_api  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        return f"{error.name} is not installed"
    return None if any(map(shutil.which, NAMES)) else f"none of {', '.join(NAMES)} is installed"


@contextlib.contextmanager
def serving(reader: Reader) -> Iterator[str]:
    """The address of a server that runs in a thread."""
    import uvicorn

    from retro_model.serving.app import make_app

    server = uvicorn.Server(uvicorn.Config(make_app(reader), log_level="warning", ws="none"))
    with listen(0) as socket:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{socket.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)


@contextlib.contextmanager
def chromium() -> Iterator:
    """A headless browser. It runs as root in containers, where its own sandbox cannot."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = next(filter(None, map(shutil.which, NAMES)))
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def open_page(browser, address: str, *, width: int = 1400, height: int = 1000, scheme: str = "light"):
    """A page that has drawn its first text. What it asks of other hosts and what it complains of is kept in `.strange`."""
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce")
    page.strange = []
    page.on("request", lambda request: None if request.url.startswith((address, "data:")) else page.strange.append(request.url))
    page.on("console", lambda message: page.strange.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.strange.append(str(error)))
    page.goto(address)
    page.wait_for_selector("#text .chosen", timeout=60_000)
    return page
