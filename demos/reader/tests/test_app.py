"""The server: it listens on this machine alone, answers only its own page, and names the fault of a question."""

import gc
import json
import os
import socket
from pathlib import Path

import pytest

from retro_model.folders.reader import open_folder
from retro_reader import app as serving_app
from retro_reader import command
from tests.model.folders import made as folders

pytest.importorskip("uvicorn")
TestClient = pytest.importorskip("starlette.testclient").TestClient
OWN = "http://127.0.0.1:8765"


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    from retro_reader.app import make_app

    return TestClient(make_app(open_folder(folders.retro(tmp_path_factory.mktemp("retro")))), base_url=OWN)


def test_it_listens_on_the_loopback_only():
    with command.listen(0) as made:
        assert made.getsockname()[0] == "127.0.0.1"
        for wrong in (made.getsockname()[1], 65536):
            with pytest.raises(SystemExit, match=f"--port: expected a free port, from 0 to 65535; got {wrong}"):
                command.listen(wrong)
    options = [line for line in Path(command.__file__).read_text().splitlines() if "add_argument" in line]
    # the server cannot listen elsewhere
    assert not [line for line in options if "host" in line.lower().replace("{host}", "")]


def test_two_hundred_clients_may_come_before_the_server_runs():
    """They wait in the socket's queue; a client beyond its end would try again after a second."""
    with command.listen(0) as made:
        waiting = [socket.create_connection(made.getsockname(), timeout=0.5) for _ in range(200)]
    for one in waiting:
        one.close()


def test_the_page_and_its_parts_are_served_with_a_strict_policy(client):
    answer = client.get("/")
    assert answer.status_code == 200 and "retro-model" in answer.text
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    for name in ("main.js", "text.js", "cards.js", "library.js", "words.js", "dom.js", "page.css"):
        part = client.get(f"/page/{name}")
        # offline: no reference to another host
        assert part.status_code == 200 and "http" not in part.text.replace("http-equiv", ""), name
        assert (
            "innerHTML" not in part.text and "insertAdjacentHTML" not in part.text and "document.write" not in part.text
        ), name


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ({"host": "evil.example:8765"}, "Host"),
        ({"host": "127.0.0.1.evil.example"}, "Host"),
        ({"host": ""}, "Host"),
        ({"origin": "http://evil.example"}, "Origin"),
        ({"origin": "null"}, "Origin"),
        ({"origin": "http://127.0.0.1:9999"}, "Origin"),
        ({"sec-fetch-site": "cross-site"}, "Sec-Fetch-Site"),
        ({"sec-fetch-site": "same-site"}, "Sec-Fetch-Site"),
        ({"content-type": "text/plain"}, "Content-Type"),
    ],
)
def test_strangers_are_refused(client, headers, named):
    """A rebound name, another site's script, a form: each is refused before anything is read or changed."""
    answer = client.post(
        "/api/forget", content='{"document": 0}', headers={"content-type": "application/json"} | headers
    )
    assert answer.status_code == 403 and named in answer.json()["error"]
    assert client.get("/api/about").json()["library"]["forgotten"] == []
    if named in ("Host", "Origin"):
        assert client.get("/", headers=headers).status_code == 403


def test_its_own_page_is_answered(client):
    for host in ("127.0.0.1:8765", "localhost:8765"):
        assert (
            client.post(
                "/api/read", json={"passage": 0}, headers={"host": host, "origin": f"http://{host}"}
            ).status_code
            == 200
        )


@pytest.mark.parametrize(
    ("verb", "asked", "named"),
    [
        ("read", {}, "text: expected a string"),
        ("read", {"passage": 99}, "passage"),
        ("read", {"passage": True}, "passage"),
        ("read", {"text": ""}, "text: expected some"),
        ("read", {"passage": 0, "k": 0}, "k: expected"),
        ("read", {"passage": 0, "k": 2.5}, "k: expected"),
        ("read", {"passage": 0, "retrieval": "yes"}, "retrieval"),
        ("write", {"text": "The", "temperature": 9}, "temperature"),
        ("write", {"text": "The", "temperature": float("nan")}, "temperature"),
        ("write", {"text": "The", "new_tokens": 10**9}, "new_tokens"),
        ("forget", {"document": -1}, "document"),
        ("forget", {}, "document"),
        ("add", {"name": "a", "text": ""}, "text"),
        ("add", {"name": 3, "text": "x"}, "name"),
        ("add", [], "object"),
    ],
)
def test_what_is_wrong_with_a_question_is_said(client, verb, asked, named):
    answer = client.post(f"/api/{verb}", content=json.dumps(asked), headers={"content-type": "application/json"})
    assert answer.status_code == 400 and named in answer.json()["error"]


def test_a_reset_undoes_what_was_added_and_forgotten(client):
    library = lambda: client.get("/api/about").json()["library"]  # noqa: E731
    before = library()
    assert client.post("/api/add", json={"name": "a", "text": "The harbour moved."}).status_code == 200
    assert client.post("/api/forget", json={"document": 0}).status_code == 200
    assert library() != before
    assert client.post("/api/reset", json={}).json()["library"] == before == library()


def test_a_body_has_an_end_and_is_json(client):
    for content, named in ((b"{" * 100_000, "JSON"), (b"x", "JSON"), (b'"' + b"a" * (5 << 20) + b'"', "MB")):
        answer = client.post("/api/add", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400 and named in answer.json()["error"]


def test_nothing_outside_the_page_is_served(client):
    for path in ("/page/../app.py", "/page/%2e%2e/app.py", "/page/", "/api/answer", "/api/_library"):
        assert client.get(path).status_code in (404, 405), path


def test_the_command_serves_what_it_prints(tmp_path):
    """As a process: it listens only on the address that it prints. A title contains no control characters."""
    import subprocess
    import sys
    import urllib.request

    folders.retro(tmp_path)
    manifest = json.loads((tmp_path / "model.json").read_text())
    (tmp_path / "model.json").write_text(json.dumps(manifest | {"title": "a\x1b[2Jtitle"}))
    process = subprocess.Popen(
        [sys.executable, "-m", "retro_reader", "serve", str(tmp_path), "--port", "0", "--no-browser"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},  # the package need not be installed
    )
    try:
        title, address = process.stdout.readline().split(": ")
        assert title == "a\u241b[2Jtitle"
        address = address.split()[0]
        with urllib.request.urlopen(f"{address}/api/about", timeout=60) as answer:
            assert json.loads(answer.read())["kind"] == "retro"
        others = [
            a[4][0]
            for a in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
            if not a[4][0].startswith("127.")
        ]
        for other in others:
            with pytest.raises(OSError):
                socket.create_connection((other, int(address.rpartition(":")[2])), timeout=2).close()
    finally:
        process.terminate()
        process.wait(20)


def test_the_garbage_collector_leaves_out_what_is_loaded_before_the_first_request(tmp_path, monkeypatch):
    import uvicorn

    frozen = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_, **__: frozen.append(gc.get_freeze_count()))
    folders.retro(tmp_path)
    try:
        command.main([str(tmp_path), "--port", "0", "--no-browser"])
    finally:
        gc.unfreeze()
    assert frozen[0] > 10_000


def test_what_is_no_model_folder_or_device_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit, match=r"retro-reader serve: .* expected a model folder"):
        command.main([str(tmp_path), "--no-browser"])
    with pytest.raises(SystemExit, match="device: expected one that torch can use here; got 'foo'"):
        command.main([str(folders.retro(tmp_path / "retro")), "--no-browser", "--device", "foo"])


@pytest.mark.parametrize("ticket, kept", [("a" * 64, True), ("a" * 65, False), ("", False), (7, False), (None, False)])
def test_a_ticket_is_a_short_name(ticket, kept):
    """Without a ticket the place in the queue is unknown."""
    assert serving_app._ticket({"ticket": ticket}) == (ticket if kept else None)
