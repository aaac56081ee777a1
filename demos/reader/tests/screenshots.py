"""Make the pictures in docs/images.

PYTHONPATH=. python demos/reader/tests/screenshots.py FOLDER NOTES

The folders are model folders of `retro-model retrofit`. A question is put to NOTES, which has no held-out documents.
"""

import argparse
from pathlib import Path

import pages as browser
from retro_model.folders.reader import open_folder

IMAGES = Path(__file__).resolve().parents[3] / "docs/images"


def first_page(chromium, address: str) -> None:
    page = browser.open_page(chromium, address)
    page.screenshot(path=IMAGES / "serve-retro.png")
    page.close()


def forgotten(chromium, address: str) -> None:
    """Remove the document that told most, the first, and take the page."""
    page = browser.open_page(chromium, address, scheme="dark")
    with page.expect_response("**/api/read"):
        page.locator("#documents button").first.click()
    page.wait_for_selector("body:not(.busy)")
    page.evaluate("scrollTo(0, 0)")  # the bars keep their place in the window
    page.screenshot(path=IMAGES / "serve-forgotten.png", full_page=True)
    page.locator("#reset").click()
    page.wait_for_selector("#reset", state="hidden")
    page.close()


def asked(chromium, address: str, question: str = "What is the cat called?") -> None:
    """Ask a question of a folder of notes."""
    page = browser.open_page(chromium, address, height=900, ready="#write-on >> text=Ask")
    page.fill("#prompt", question)
    page.keyboard.press("Enter")
    page.wait_for_selector("#answer-how >> text=passages in the prompt")
    page.screenshot(path=IMAGES / "serve-ask.png")
    page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("notes", type=Path)
    options = parser.parse_args()
    if why := browser.unavailable():
        parser.error(why)
    with browser.chromium() as chromium, browser.serving(open_folder(options.folder)) as address:
        first_page(chromium, address)
        forgotten(chromium, address)
    with browser.chromium() as chromium, browser.serving(open_folder(options.notes)) as address:
        asked(chromium, address)


if __name__ == "__main__":
    main()
