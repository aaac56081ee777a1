"""Make the pictures in docs/images.

python -m tools.screenshots --retro FOLDER --rpt FOLDER --mosaics FOLDER

The folders hold models of `retro-model demo`, `rpt cards` and `mosaics text`. Without a folder its picture stays.
"""

import argparse
from pathlib import Path

from retro_model.apps.serve.reader import open_folder
from tests.model.serving import browser

IMAGES = Path(__file__).resolve().parents[1] / "docs/images"


def of_retro(chromium, address: str, out: Path) -> None:
    """Take the first page, and the page after the document that told most is forgotten."""
    page = browser.open_page(chromium, address)
    page.screenshot(path=out / "serve-retro.png")
    page.close()
    page = browser.open_page(chromium, address, scheme="dark")
    with page.expect_response("**/api/read"):
        page.locator("#documents button").first.click()
    page.wait_for_selector("body:not(.busy)")
    page.evaluate("scrollTo(0, 0)")  # the bars stay where the window is
    page.screenshot(path=out / "serve-forgotten.png", full_page=True)
    page.locator("#reset").click()
    page.wait_for_selector("#reset", state="hidden")
    page.close()


def of_another(chromium, address: str, out: Path, kind: str) -> None:
    """Take the first page."""
    page = browser.open_page(chromium, address)
    page.screenshot(path=out / f"serve-{kind}.png")
    page.close()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    for kind in ("retro", "rpt", "mosaics"):
        parser.add_argument(f"--{kind}", type=Path, metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=IMAGES)
    options = parser.parse_args()
    if why := browser.unavailable():
        parser.error(why)
    with browser.chromium() as chromium:
        for kind in ("retro", "rpt", "mosaics"):
            if folder := getattr(options, kind):
                with browser.serving(open_folder(folder)) as address:
                    if kind == "retro":
                        of_retro(chromium, address, options.out)
                    else:
                        of_another(chromium, address, options.out, kind)


if __name__ == "__main__":
    main()
