"""Make the pictures in docs/images.

python -m tools.screenshots --retro FOLDER --rpt FOLDER --mosaics FOLDER

The folders hold models of `retro-model demo`, `rpt cards` and `mosaics text`. Without its folder a picture stays as it
is.
"""

import argparse
from pathlib import Path

from retro_model.apps.serve.reader import open_folder
from tests.model.serving import browser

IMAGES = Path(__file__).resolve().parents[1] / "docs/images"


def first_page(chromium, address: str, kind: str) -> None:
    page = browser.open_page(chromium, address)
    page.screenshot(path=IMAGES / f"serve-{kind}.png")
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    for kind in ("retro", "rpt", "mosaics"):
        parser.add_argument(f"--{kind}", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if why := browser.unavailable():
        parser.error(why)
    with browser.chromium() as chromium:
        for kind in ("retro", "rpt", "mosaics"):
            if folder := getattr(options, kind):
                with browser.serving(open_folder(folder)) as address:
                    first_page(chromium, address, kind)
                    if kind == "retro":
                        forgotten(chromium, address)


if __name__ == "__main__":
    main()
