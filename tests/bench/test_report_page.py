"""The HTML report in a real browser: sorting, filtering, light and dark, narrow screens."""

import re

import pytest

from retro_bench.records import environment, record
from retro_bench.report import html
from tests import browser

pytestmark = pytest.mark.skipif(browser.unavailable() is not None, reason=f"needs a browser: {browser.unavailable()}")
RECORD = environment.ROOT / "bench/results/cpu-zen4-2core-2026-11-28.jsonl"
TOO_FAST = "leaky_average/cpu/long/float32/fwd"  # its share of the roofline becomes more than 1


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    records = [r for r in record.read(RECORD) if r["op"] in ("topk_chunks", "leaky_average")]
    for one in records:
        if one["id"] == TOO_FAST:
            one["roofline"]["fraction"] = 1.13
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(html.page(records), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def page(chromium, report):
    page, strange = chromium.new_page(viewport={"width": 1300, "height": 900}), []
    page.on("request", lambda request: None if request.url == report else strange.append(request.url))
    page.on("pageerror", lambda error: strange.append(str(error)))
    page.goto(report)
    yield page
    assert strange == []
    page.close()


def column(page, head: str) -> list[str]:
    number = page.locator("#all thead th").all_inner_texts().index(head)
    return page.locator(f"#all tbody tr:visible td:nth-child({number + 1})").all_inner_texts()


def test_columns_sort_by_their_numbers_both_ways(page):
    page.locator("#all th button", has_text="roofline").click()
    shares = [
        float(re.match(r"[\d.]+", text).group())
        for text in column(page, page.locator("#all th[aria-sort]").inner_text())
    ]
    assert shares == sorted(shares) and len(set(shares)) > 5
    page.locator("#all th button", has_text="roofline").press("Enter")  # by keyboard
    assert (
        page.locator("#all th[aria-sort=descending]").count() == 1
        and "113%!" in page.locator("#all tbody tr").first.inner_text()
    )


def test_words_filter_and_words_with_a_minus_leave_out(page):
    whole = page.locator("#all tbody tr:visible").count()
    page.locator("input[type=search]").first.fill("leaky_average -bfloat16")
    rows = page.locator("#all tbody tr:visible").all_inner_texts()
    assert 0 < len(rows) < whole and all("leaky_average" in row and "bfloat16" not in row for row in rows)
    assert page.inner_text("#timed-count") == f"{len(rows)} of {whole}"


def test_a_share_above_1_is_an_error_of_the_ceiling(page):
    assert "an error of the ceiling" in page.inner_text("p.wrong")


@pytest.mark.parametrize(("width", "scheme"), [(380, "dark"), (1300, "dark"), (1300, "light")])
def test_it_fits_and_follows_the_scheme(chromium, report, width, scheme):
    page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.goto(report)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ground = sum(map(int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))))
    assert (ground < 200) == (scheme == "dark")
    page.close()
