"""Any JSON is answered with 200 or 400; a 400 changes nothing in the library."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retro_model.folders.reader import open_folder
from tests.model.folders import made as folders

pytest.importorskip("uvicorn")
TestClient = pytest.importorskip("starlette.testclient").TestClient

HEADERS = {"content-type": "application/json"}
surrogates = st.characters(categories=["Cs"])
strings = st.text(st.one_of(st.characters(), surrogates), max_size=40)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), strings),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(strings, inner, max_size=3)),
    max_leaves=6,
)
small = st.integers(-1, 8)
asked = st.fixed_dictionaries(
    {},
    optional={
        "text": st.one_of(strings, values),
        "name": st.one_of(strings, values),
        "passage": st.one_of(small, values),
        "document": st.one_of(small, values),
        "k": st.one_of(small, values),
        "new_tokens": st.one_of(small, values),
        "temperature": st.one_of(st.floats(0, 2), values),
        "seed": st.one_of(small, values),
        "retrieval": values,
        "ticket": values,
    },
)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    from retro_reader.app import make_app

    app = make_app(open_folder(folders.retro(tmp_path_factory.mktemp("retro"))))
    with TestClient(app, base_url="http://127.0.0.1:8765", raise_server_exceptions=False) as made:
        yield made


def library(client) -> dict:
    return client.get("/api/about").json()["library"]


def post(client, verb: str, content) -> int:
    """Return the status; after a refusal check that the library is unchanged and the model can read."""
    before = library(client)
    answer = client.post(f"/api/{verb}", content=json.dumps(content), headers=HEADERS)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert library(client) == before and len(answer.json()["error"]) < 500
    return answer.status_code


@pytest.mark.parametrize(
    ("verb", "content"),
    [
        ("read", {"text": "\ud800"}),
        ("write", {"text": "a\udfff", "new_tokens": 1}),
        ("add", {"name": "\ud800", "text": "harbour"}),
        ("add", {"name": "a", "text": "harbour \udc80"}),
        ("forget", {"document": "\ud800"}),
        ("read", {"passage": "\ud800" * 100_000}),
    ],
)
def test_half_a_character_is_refused(client, verb, content):
    assert post(client, verb, content) == 400
    assert post(client, "read", {"passage": 0}) == 200


@settings(max_examples=150)
@given(st.sampled_from(["read", "write", "forget", "remember", "add", "reset"]), st.one_of(asked, values))
def test_any_json_is_answered_or_refused(client, verb, content):
    post(client, verb, content)


@settings(max_examples=40)
@given(strings, strings)
def test_any_name_and_text_can_be_added(client, name, text):
    if post(client, "add", {"name": name, "text": text}) == 200:
        assert post(client, "read", {"passage": 0}) == 200
    client.post("/api/reset", content="{}", headers=HEADERS)
