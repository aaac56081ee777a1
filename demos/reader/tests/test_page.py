"""The page in a real browser: its content, changes of the library, keyboard, narrow screens, hostile documents."""

import re

import pytest

import pages as browser
from retro_model.folders.reader import Options, open_folder
from tests.model.folders import made as folders

QUESTION = "What is the cat called?"
pytestmark = pytest.mark.skipif(browser.unavailable() is not None, reason=f"needs a browser: {browser.unavailable()}")


@pytest.fixture(scope="module")
def readers(tmp_path_factory):
    return {"retro": open_folder(folders.retro(tmp_path_factory.mktemp("retro")))}


@pytest.fixture(scope="module")
def notes(tmp_path_factory):
    pytest.importorskip("transformers")
    return open_folder(folders.notes(*(tmp_path_factory.mktemp(name) for name in ("decoder", "texts", "out"))))


@pytest.fixture
def page(chromium, readers):
    readers["retro"].library.reset()
    with browser.serving(readers["retro"]) as address:
        page = browser.open_page(chromium, address)
        yield page
        assert page.strange == []
        page.close()


def cost(page, name="on") -> float:
    return float(page.inner_text(f"#{name}-value").split()[0])


def click_and_wait(page, selector: str) -> None:
    """Click, and wait until the text is read again."""
    with page.expect_response("**/api/read"):
        page.locator(selector).first.click()
    page.wait_for_selector("body:not(.busy)")


def test_it_begins_with_a_text_the_model_has_not_seen_and_says_what_retrieval_did(page):
    assert "port.txt" in page.inner_text("#paper-title")
    assert cost(page) < cost(page, "off")
    assert re.search(r"saves \d+% of this text's bits, compared with random", page.inner_text("#verdict"))
    assert page.locator("#text .t[class*=' h']").count() > 10  # coloured words
    blank = page.locator("#text .t").evaluate_all(
        "all => all.filter(w => !w.textContent.trim() && /\\b[ho][1-5]\\b/.test(w.className)).length"
    )
    assert blank == 0


def test_pointing_at_a_word_lights_its_source_in_the_card(page):
    word = page.locator("#text .t.h4, #text .t.h5").last
    word.hover()
    assert page.inner_text("#text .chosen") == word.inner_text() and "gained" in page.inner_text("#gain")
    hit = page.locator("#cards .hit").inner_text()
    assert hit.strip() and hit.strip() in page.inner_text("#text .chosen")
    card = page.locator("#cards .card.lit")
    assert (
        "harbour.txt" in card.inner_text()
        and re.search(r"line \d+", card.inner_text())
        and "% alike" in card.inner_text()
    )
    assert page.locator("#link path").get_attribute("d")  # the line between the two


def test_forgetting_the_document_raises_the_cost_at_once_and_adding_it_lowers_it(page, readers):
    before = cost(page)
    click_and_wait(page, "#documents button")
    assert cost(page) > before and "Forgot harbour.txt: the cost rises" in page.inner_text("#verdict")
    assert "harbour.txt" in page.inner_text("#changed") and "harbour.txt" not in page.inner_text("#documents")
    with page.expect_response("**/api/read"):
        page.set_input_files(
            "#file", {"name": "again.txt", "mimeType": "text/plain", "buffer": folders.texts()[0][2].encode()}
        )
    page.wait_for_selector("#documents >> text=again.txt")
    assert cost(page) == before and "Added again.txt: the cost falls" in page.inner_text("#verdict")
    click_and_wait(page, "#reset")
    assert cost(page) == before and page.locator("#changed li").count() == 0


def test_an_added_file_is_decoded_or_refused_by_name(page):
    text = "Ein Café und " + folders.texts()[0][2]
    with page.expect_request("**/api/add") as asked:
        page.set_input_files("#file", {"name": "utf16.txt", "mimeType": "text/plain", "buffer": text.encode("utf-16")})
    assert asked.value.post_data_json["text"] == text
    page.wait_for_selector("#changed >> text=utf16.txt")
    for encoding in ("latin-1", "utf-16-le"):
        page.set_input_files(
            "#file", {"name": f"{encoding}.txt", "mimeType": "text/plain", "buffer": text.encode(encoding)}
        )
        page.wait_for_selector(f"#error:not([hidden]) >> text={encoding}.txt: expected text in UTF-8")


def test_the_knobs(page):
    with page.expect_response("**/api/read"):
        page.locator("#k").fill("4")
    page.wait_for_selector("body:not(.busy)")
    assert page.locator("#cards .card").count() == 4
    with page.expect_response("**/api/read"):
        page.locator(".switch").click()
    page.wait_for_selector("body:not(.busy)")
    assert cost(page) == cost(page, "off") and page.locator("#cards .card").count() == 0
    assert page.locator("#text .t[class*=' h']").count() == 0


def test_writing_on_from_a_prompt_shows_what_it_writes_alone_too(page):
    page.locator("label", has_text="Write on").click()
    page.fill("#prompt", "The harbour moved the crane near the ")
    page.locator("#temperature").fill("0")  # sampling may end the text early
    with page.expect_response("**/api/write"):
        page.locator("form button[type=submit]").click()
    page.wait_for_selector("#text .written")
    page.wait_for_function("document.querySelector('#verdict').innerText.includes('wrote these words itself')")
    assert page.inner_text("#text").startswith("The harbour moved the crane near the")
    assert page.inner_text("#plain").strip() and "retrieval off" in page.inner_text("#plain-title")
    assert "wrote these words itself" in page.inner_text("#verdict") and not page.locator("#bars").is_visible()


def test_by_keyboard_alone(page):
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    page.focus("#text")
    first = int(page.get_attribute("#text .chosen", "data-i"))
    page.keyboard.press("ArrowRight")
    assert int(page.get_attribute("#text .chosen", "data-i")) > first
    assert page.inner_text("#said")  # for screen readers
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    second_chunk = int(page.get_attribute("#text .chosen", "data-i"))
    assert second_chunk // folders.M == 1
    page.keyboard.press("Enter")
    page.locator("#text .t").nth(second_chunk + 20).hover()  # pinned: hovering elsewhere changes nothing
    assert int(page.get_attribute("#text .chosen", "data-i")) == second_chunk
    page.keyboard.press("Escape")
    reached = set()
    for _ in range(40):  # every control can be reached
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    assert {"passage", "k", "retrieval", "text", "add-itself", "file", "forget"} <= reached


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (768, "light"), (1400, "dark")])
def test_the_page_fits_every_width(chromium, readers, width, scheme):
    with browser.serving(readers["retro"]) as address:
        page = browser.open_page(chromium, address, width=width, height=800, scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        ground, ink = (
            page.evaluate(f"getComputedStyle(document.body).{what}") for what in ("backgroundColor", "color")
        )
        dark, light = (
            sum(map(int, re.findall(r"\d+", c))) for c in ((ground, ink) if scheme == "dark" else (ink, ground))
        )
        assert dark < 200 < 600 < light
        assert page.strange == []
        page.close()


def test_text_of_documents_is_text(page):
    """The text, its neighbours and a file name contain HTML."""
    with page.expect_response("**/api/read"):
        page.select_option("#passage", label="note.html, from line 1")
    page.wait_for_selector("#documents >> text=<b>hostile.html")
    page.locator("#text .t", has_text="script").last.hover()
    assert "<script>" in page.inner_text("#text") and "<b>hostile.html" in page.inner_text("#cards")
    assert page.title() == "A tiny RETRO"
    assert page.locator("main script, main img, main b").count() == 0


def test_the_pictures_of_the_documents_are_taken_by_a_command(chromium, readers, notes, tmp_path, monkeypatch):
    import screenshots

    committed = {p.name for p in screenshots.IMAGES.iterdir()}
    monkeypatch.setattr(screenshots, "IMAGES", tmp_path)
    with browser.serving(readers["retro"]) as address:
        screenshots.first_page(chromium, address)
        screenshots.forgotten(chromium, address)
    with browser.serving(notes) as address:
        screenshots.asked(chromium, address)
    made = {p.name for p in tmp_path.iterdir()}
    assert made == {"serve-retro.png", "serve-forgotten.png", "serve-ask.png"} <= committed


def test_the_page_says_its_limits_and_its_control(page):
    assert cost(page) < cost(page, "random") and "compared with random passages" in page.inner_text("#verdict")
    assert all(page.inner_text(f"#{name}-value").endswith("bits per byte") for name in ("on", "off", "random"))
    assert "256 KB a file, 1 MB in all" in page.inner_text("#limits")
    page.locator("label", has_text="Write on").click()
    assert "65,536 characters" in page.inner_text("#prompt-limits") and page.inner_text("#temperature-value") == "0.7"
    assert not page.locator("#ask-tab").is_visible()
    page.set_input_files("#file", {"name": "big.txt", "mimeType": "text/plain", "buffer": b"a" * (257 << 10)})
    page.wait_for_selector("#error:not([hidden])")
    assert "big.txt: expected a file of at most 256 KB; got 257 KB" in page.inner_text("#error")


def test_who_waits_is_told_his_place(page):
    """Two questions are before this one, as the queue reports."""
    page.route("**/api/queue*", lambda route: route.fulfill(json={"place": 2, "waiting": 3, "seconds": 7}))
    waiting = []
    page.route("**/api/read", lambda route: waiting.append(route))
    page.select_option("#passage", label="note.html, from line 1")
    page.wait_for_selector("#busy >> text=2 before you, about 7 s")
    assert page.locator("body.busy").count() == 1
    waiting[0].continue_()
    page.wait_for_selector("body:not(.busy)")
    assert not page.locator("#busy").is_visible()


def test_a_full_queue_is_said(page):
    page.route("**/api/read", lambda route: route.fulfill(status=503, json={"error": "busy: 32 questions are waiting"}))
    page.select_option("#passage", label="note.html, from line 1")
    page.wait_for_selector("#error >> text=busy: 32 questions are waiting")
    page.strange.clear()  # the browser itself notes the 503


@pytest.fixture
def asking(chromium, notes):
    """The page of a folder that is too small to hold documents out."""
    with browser.serving(notes) as address:
        page = browser.open_page(chromium, address, width=400, ready="#write-on >> text=Ask")
        yield page
        assert page.strange == [] and page.evaluate("document.documentElement.scrollWidth") <= 400
        page.close()


def hold(page, path: str) -> list:
    """Let no request of a path through; return the list into which they come."""
    held = []
    page.route(f"**/api/{path}", lambda route: held.append(route))
    return held


def test_a_question_shows_its_passages_before_the_answer(asking, notes):
    assert "Reads 3 documents; none was held out." in asking.inner_text("#facts")
    assert "bits per byte" not in asking.inner_text("body")
    held = hold(asking, "answer")
    asking.fill("#prompt", "")
    asking.keyboard.type(QUESTION)
    asking.keyboard.press("Enter")
    asking.wait_for_selector("#notes-cards .card.lit >> text=cat.md")
    assert asking.inner_text("#notes-title") == "Your notes say" and asking.inner_text("#answer") == ""
    assert "Professor Biscuit" in asking.inner_text("#notes-cards") and "<user>" not in asking.inner_text("body")
    asking.wait_for_selector("#busy >> text=Writing")
    held[0].continue_()
    asking.wait_for_selector("#answer-how >> text=of these passages in the prompt")
    wanted = notes.answer(QUESTION, Options(k=notes.neighbours, new_tokens=64))
    shown = asking.evaluate("document.getElementById('answer').textContent")
    assert shown == wanted["answer"] and f"with {wanted['read']} of these" in asking.inner_text("#answer-how")


def test_an_answer_is_shown_while_it_is_written_and_can_be_cancelled(asking):
    asking.route("**/api/queue*", lambda route: route.fulfill(json={"place": 0, "waiting": 1, "text": "It is called"}))
    hold(asking, "answer")
    asking.fill("#prompt", QUESTION)
    asking.keyboard.press("Shift+Enter")
    assert asking.input_value("#prompt") == QUESTION + "\n" and not asking.locator("#notes").is_visible()
    asking.keyboard.press("Enter")
    asking.wait_for_selector("#answer >> text=It is called")
    asking.click("#cancel")
    asking.wait_for_selector("#answer-how >> text=Cancelled.")
    assert not asking.locator("#cancel").is_visible() and not asking.locator("#busy").is_visible()
    asking.unroute("**/api/answer")
    asking.keyboard.press("Tab")
    asking.click("#write-on")
    asking.wait_for_selector("#answer-how >> text=of these passages in the prompt")


def test_the_true_reason_is_given_if_nothing_is_read(asking):
    def reason(question: str) -> str:
        asking.fill("#prompt", question)
        with asking.expect_response("**/api/answer"):
            asking.click("#write-on")
        asking.wait_for_selector("#answer-how >> text=Written by the decoder alone.")
        assert asking.inner_text("#notes-title") == "No passage is read"
        return asking.inner_text("#why")

    assert reason("zzz qqq") == "No passage of the library shares a word with the question."
    asking.locator("#least").fill("1")
    far = r'Best match 0\.\d\d, limit 1\.00: lower "Least match" to read it\.'
    assert re.fullmatch(far, reason("Who feeds the cat?"))
    assert asking.locator("#notes-cards .card").count() == 1 and asking.locator("#notes-cards .lit").count() == 0
    asking.locator(".switch").click()
    assert reason(QUESTION) == "The library is off." and asking.locator("#notes-cards .card").count() == 0


def test_a_change_of_mode_clears_what_was_said(asking):
    asking.fill("#prompt", QUESTION)
    asking.keyboard.press("Enter")
    asking.wait_for_selector("#answer-how >> text=of these passages in the prompt")
    asking.locator("label", has_text="Write on").click()
    assert asking.input_value("#prompt") == "" and not asking.locator("#notes").is_visible()
    asking.fill("#prompt", "The cat")
    asking.locator("label", has_text="Ask a question").click()
    assert asking.input_value("#prompt") == "" and asking.inner_text("#prompt-name") == "Question"
    assert asking.evaluate("document.activeElement.id") == "prompt" and not asking.locator("#notes").is_visible()
