"""The server under load: a bounded queue with places, time limits of answers, files that wait for nothing."""

import asyncio
import itertools
import json
import threading
import types

import pytest
import torch

from retro_model.folders import documents as library
from retro_model.folders.reader import LONGEST_TEXT, Options, open_folder
from retro_reader.desk import Desk, Full, Stopped
from tests.model.folders import made as folders

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    return open_folder(folders.retro(tmp_path_factory.mktemp("retro")))


class Client:
    """One request to an ASGI application; `leave` simulates a closed connection."""

    def __init__(self, app, path: str, asked=None, *, whole: bool = True) -> None:
        self.sent, self.messages, self.left = asyncio.Event(), [], asyncio.Event()
        body = b"" if asked is None else json.dumps(asked).encode()
        self.body = [{"type": "http.request", "body": body, "more_body": not whole}]
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "method": "GET" if asked is None else "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(b"host", b"127.0.0.1:8765"), (b"content-type", b"application/json")],
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self):
        if self.body:
            return self.body.pop()
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message) -> None:
        self.messages.append(message)

    def leave(self) -> None:
        self.left.set()

    async def answer(self):
        """Return (status, JSON or bytes)."""
        await asyncio.wait_for(self.task, 30)
        body = b"".join(m.get("body", b"") for m in self.messages)
        is_json = b"application/json" in dict(self.messages[0]["headers"])[b"content-type"]
        return self.messages[0]["status"], json.loads(body) if is_json else body


class Held:
    """Keeps the desk's thread busy until released; `entered` is set when the thread starts."""

    def __init__(self) -> None:
        self.entered, self.released = threading.Event(), threading.Event()

    def __call__(self, *_) -> dict:
        self.entered.set()
        assert self.released.wait(30)
        return {}


async def until(condition) -> None:
    async def wait():
        while not condition():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(wait(), 30)


@pytest.fixture
def make(reader, monkeypatch):
    """Return app, desk, held: reading keeps the model busy."""
    from retro_reader import app as serving

    def made(most: int = 4):
        desk, held = Desk(reader.model, most=most), Held()
        monkeypatch.setattr(serving.Service, "read", held)
        return serving.make_app(reader, desk), desk, held

    return made


def test_files_and_facts_never_wait_for_the_model(make):
    async def run():
        app, desk, held = make(most=64)
        busy = [Client(app, "/api/read", {"passage": 0}) for _ in range(60)]
        await until(held.entered.is_set)
        for path in ("/", "/page/main.js", "/page/page.css", "/api/about", "/api/queue?ticket=a"):
            status, _ = await Client(app, path).answer()
            assert status == 200, path
        assert len(desk.line) == 60 and not any(client.messages for client in busy)
        held.released.set()
        assert [await client.answer() for client in busy] == [(200, {})] * 60

    threads = threading.active_count()
    asyncio.run(run())
    assert threading.active_count() <= threads + 1  # the desk's own


def test_the_queue_has_a_bound_and_everybody_a_place(make):
    async def run():
        app, desk, held = make(most=4)
        waiting = [Client(app, "/api/read", {"passage": 0, "ticket": f"t{n}"}) for n in range(4)]
        await until(held.entered.is_set)
        await until(lambda: len(desk.line) == 4)
        for n in range(4):
            status, found = await Client(app, f"/api/queue?ticket=t{n}").answer()
            assert status == 200 and found["place"] == n and found["waiting"] == 4
        client = Client(app, "/api/read", {"passage": 0, "ticket": "t4"})
        status, found = await client.answer()
        assert status == 503 and found["place"] == 4 and "4 questions are waiting" in found["error"]
        assert int(dict(client.messages[0]["headers"])[b"retry-after"]) >= 1
        assert (await Client(app, "/api/queue?ticket=t4").answer())[1]["place"] is None
        held.released.set()
        assert [await c.answer() for c in waiting] == [(200, {})] * 4
        assert (await Client(app, "/api/read", {"passage": 0}).answer())[0] == 200  # a place is free again

    asyncio.run(run())


def test_what_clients_that_left_asked_is_not_computed(make, monkeypatch):
    from retro_reader import app as serving

    calls = []
    monkeypatch.setattr(serving.Service, "write", lambda self, asked: calls.append(asked["text"]) or {})

    async def run():
        app, desk, held = make()
        first = Client(app, "/api/read", {"passage": 0})
        await until(held.entered.is_set)
        left, stays = (Client(app, "/api/write", {"text": text}) for text in ("left", "stays"))
        await until(lambda: len(desk.line) == 3)
        left.leave()
        await until(lambda: len(desk.line) == 2)
        held.released.set()
        assert (await stays.answer())[0] == (await first.answer())[0] == 200

    asyncio.run(run())
    assert calls == ["stays"]


def test_an_answer_that_is_being_computed_stops_when_its_client_leaves(reader):
    """Between two modules of the model, not at its end."""
    linear = torch.nn.Linear(1, 1)
    entered, go_on, ended = threading.Event(), threading.Event(), []

    def work():
        try:
            for _ in range(1000):
                linear(torch.zeros(1, 1))
                entered.set()
                go_on.wait(30)
            ended.append("whole")
        except Stopped:
            ended.append("stopped")
            raise

    async def run():
        desk = Desk(linear)
        task = asyncio.ensure_future(desk.ask(work))
        await until(entered.is_set)
        task.cancel()
        await asyncio.wait([task])
        go_on.set()
        assert await desk.ask(lambda: 1) == 1  # the next one is served

    asyncio.run(run())
    assert ended == ["stopped"]


def test_a_wait_is_told_by_the_time_that_answers_took(monkeypatch):
    from retro_reader import desk

    monkeypatch.setattr(desk, "time", types.SimpleNamespace(monotonic=itertools.count(step=3.0).__next__))

    async def run():
        held = Desk()
        for _ in range(40):  # a clock that is read at the start, by the check and at the end
            await held.ask(lambda: 1)
        assert held.wait(0) == 0 and held.wait(2) == pytest.approx(2 * 6.0, rel=0.01)

    asyncio.run(run())


def test_an_answer_has_a_longest_time(reader):
    async def run():
        desk = Desk(reader.model, seconds=0.0)
        with pytest.raises(Stopped, match="stopped after 0 s"):
            await desk.ask(lambda: reader.score(reader.passage(0), Options()))
        desk.seconds = 60.0
        assert (await desk.ask(lambda: reader.score(reader.passage(0), Options()))).per_byte is not None
        full = Desk(most=0)
        with pytest.raises(Full):
            await full.ask(lambda: 1)

    asyncio.run(run())


def test_a_body_that_never_ends_is_given_up(make, monkeypatch):
    from retro_reader import app as serving

    monkeypatch.setattr(serving, "BODY_SECONDS", 0.01)

    async def run():
        app, desk, _ = make()
        client = Client(app, "/api/add", {"name": "a"}, whole=False)
        status, found = await client.answer()
        assert status == 408 and "whole request" in found["error"] and not desk.line
        assert dict(client.messages[0]["headers"])[b"connection"] == b"close"

    asyncio.run(run())


def test_a_text_and_an_added_file_have_a_longest_length(reader, monkeypatch):
    monkeypatch.setattr(type(reader.tokenizer), "encode", lambda *_: pytest.fail("tokenised before it was measured"))
    with pytest.raises(ValueError, match=r"text: expected at most 65,536 characters; got 65,537"):
        reader.encode("a" * (LONGEST_TEXT + 1))
    with pytest.raises(ValueError, match="text: expected a file of at most 256 KB; got 257"):
        reader.library.add("a", "ä" * ((library.LARGEST_FILE + 1024) // 2))
    assert reader.library_state()["added"] == []


def test_what_is_added_has_a_bound_in_all(reader, monkeypatch):
    monkeypatch.setattr(library, "MOST_ADDED", 3000)
    reader.library.add("a", "harbour " * 250)
    before = reader.library_state()
    with pytest.raises(ValueError, match="at most 2 KB added in all; got 2 KB beside 2: reset"):
        reader.library.add("b", "harbour " * 250)
    assert reader.library_state() == before
    reader.library.reset()


def test_an_addition_that_fails_changes_nothing(reader, monkeypatch):
    before = reader.library_state()
    monkeypatch.setattr(reader.library, "embedder", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
    with pytest.raises(MemoryError):
        reader.library.add("b", "harbour " * 20)
    monkeypatch.undo()
    assert reader.library_state() == before and len(reader.library.added) == len(reader.library.added_keys) == 0
    assert reader.score(reader.passage(0), Options()).cards


def test_the_page_states_the_limits(reader):
    from retro_reader.app import Service

    limits = Service(reader, Desk()).said["limits"]
    assert limits == {"text": LONGEST_TEXT, "file": 256 << 10, "added": 1 << 20, "waiting": 32, "seconds": 120.0}
