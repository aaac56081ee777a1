"""A real browser: the system's Chromium, driven by Playwright's Python package."""

import contextlib
import shutil
from collections.abc import Iterator

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def unavailable() -> str | None:
    """Return the reason why no browser can be driven here, or None."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is not installed"
    return None if any(map(shutil.which, NAMES)) else f"none of {', '.join(NAMES)} is installed"


@contextlib.contextmanager
def chromium() -> Iterator:
    """Start a headless browser. Containers run it as root, where its sandbox cannot work."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = next(filter(None, map(shutil.which, NAMES)))
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
