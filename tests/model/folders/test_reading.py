"""Readings for the page: runs and sources against brute force, a library that changes, costs equal
to the model's own.
"""

import json
import os
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from retro_model import evaluation
from retro_model.evaluation.scoring import Scores
from retro_model.folders import folder as folder_module
from retro_model.folders import reading
from retro_model.folders.reader import Options, open_folder
from tests.refusals import refused

from . import made as folders


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return {"retro": folders.retro(tmp_path_factory.mktemp("retro"))}


@pytest.fixture
def reader(paths):
    return open_folder(paths["retro"])


def test_the_longest_run_through_every_pair():
    random = np.random.default_rng(0)
    own, other = random.integers(0, 3, (4, 9)), random.integers(0, 3, (4, 12))

    def through(a, b, i, j):
        if a[i] != b[j]:
            return 0
        back = ahead = 0
        while min(i, j) - back > 0 and a[i - back - 1] == b[j - back - 1]:
            back += 1
        while i + ahead + 1 < len(a) and j + ahead + 1 < len(b) and a[i + ahead + 1] == b[j + ahead + 1]:
            ahead += 1
        return back + ahead + 1

    wanted = [[[through(a, b, i, j) for j in range(12)] for i in range(9)] for a, b in zip(own, other)]
    assert reading.longest_runs(own, other).tolist() == wanted


def test_a_source_is_in_the_longest_run_of_the_chunk_befores_neighbours():
    tokens = np.array([1, 2, 3, 4, 5, 6, 7, 8])  # chunks of four
    neighbours = np.array([[[9, 9, 9, 6, 9, 9, 9, 9], [3, 4, 5, 6, 9, 9, 8, 8]], [[5, 6, 7, 8, 1, 1, 1, 1]] * 2])
    mask = np.ones_like(neighbours, bool)
    mask[0, 1, 7] = False
    sources = reading.sources(tokens, neighbours, mask, np.zeros(8, bool), 4)
    assert sources[:4] == [None] * 4  # no retrieval before the first chunk
    assert sources[4:] == [[1, 2, 0, 4], [1, 3, 0, 4], None, [1, 6, 6, 7]]
    assert reading.sources(tokens, neighbours, mask, tokens == 5, 4)[4] is None  # white space has no source
    longer = np.pad(neighbours, ((0, 0), (0, 0), (0, 4)), constant_values=7)  # passages of three chunks
    longer[0, 1, 8:] = [5, 6, 7, 8]
    assert reading.sources(tokens, longer, np.pad(mask, ((0, 0), (0, 0), (0, 4)), constant_values=True), tokens > 8, 4)[
        4:
    ] == [[1, 2, 0, 4], [1, 3, 0, 4], [1, 10, 8, 12], [1, 11, 8, 12]]


def test_a_character_cut_in_two_belongs_to_the_token_that_ends_it():
    pieces = {0: b"a", 1: "ä".encode()[:1], 2: "ä".encode()[1:], 3: b"\xff"}
    assert reading.token_texts(lambda ids: pieces[ids[0]], [0, 1, 2, 3]) == ["a", "", "ä", "\ufffd"]


def test_the_costs_are_the_models_own(reader):
    ids = reader.passage(0)
    got = reader.score(ids, Options(k=3))
    tokens = torch.from_numpy(ids)[None]
    chunks = ids[: len(ids) // folders.M * folders.M].reshape(-1, folders.M)
    neighbours, mask = reader.library.values(reader.library.search(chunks, 3)[0])
    with torch.no_grad():
        off = F.cross_entropy(reader.model(tokens)[0, :-1], tokens[0, 1:], reduction="none") / np.log(2)
        logits = reader.model(tokens, torch.from_numpy(neighbours)[None], neighbour_mask=torch.from_numpy(mask)[None])
        on = F.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="none") / np.log(2)
    np.testing.assert_allclose(got.off[1:], off, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got.on[1:], on, rtol=1e-4, atol=1e-5)
    text = reader.tokenizer.decode(ids[1:])
    assert "".join(got.texts) == text
    assert got.per_byte(got.off) == pytest.approx(float(off.sum()) / len(text.encode()), rel=1e-5)


def test_the_library_forgets_and_learns(reader):
    library, base = reader.library, {}

    def cost():
        got = reader.score(reader.passage(0), Options())
        return got.per_byte(got.on), {entry["name"] for entry in got.documents()}

    base["cost"], names = cost()
    assert "harbour.txt" in names
    library.forget(0)
    forgotten, names = cost()
    assert forgotten > base["cost"] + 0.05 and "harbour.txt" not in names
    assert library.add("copy.txt", folders.texts()[0][2]) == 5
    learned, names = cost()
    assert learned == pytest.approx(base["cost"], rel=1e-6) and "copy.txt" in names
    library.forget(5)
    assert cost()[0] == pytest.approx(forgotten, rel=1e-6)
    library.remember(0)
    assert cost()[0] == pytest.approx(base["cost"], rel=1e-6)
    for number in range(6):
        library.forget(number)
    got = reader.score(reader.passage(0), Options())
    assert got.cards[0] == [] and got.per_byte(got.on) == pytest.approx(got.per_byte(got.off), rel=1e-5)


def test_what_is_found_is_the_nearest_and_stands_where_it_is_said(reader):
    library = reader.library
    harbour = folders.texts()[0][2]
    chunk = library.store.chunks([5])
    ids, near = library.search(chunk, 3)
    assert ids[0, 0] == 5 and near[0, 0] == pytest.approx(1, abs=1e-4) and (np.diff(near) <= 0).all()
    place = library.place(5)
    before = reader.tokenizer.decode(library.store.tokens[:5].reshape(-1))
    assert harbour.startswith(before) and (place.name, place.line) == ("harbour.txt", 1 + before.count("\n"))


def test_written_text_follows_the_prompt_and_the_seed(reader):
    ids, options = reader.encode("The harbour moved the crane"), Options(new_tokens=20, temperature=0.8, seed=3)
    first, plain = reader.write(ids, options)
    again, same = reader.write(ids, options)
    assert first.texts == again.texts and plain == same and first.extra["prompt_tokens"] == len(ids)
    assert "".join(first.texts).startswith("The harbour moved the crane") and len(first.texts) == len(ids) + 20


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kind": "other"}, "kind"),
        ({"parts": {"model": "../../x"}}, "model"),
        ({"window": 0}, "window"),
        ({"form": 2}, "form"),
        ({"title": 3}, "title"),
        ({"facts": {"bos": 1}}, "bos"),
        ({"facts": {"least_similarity": "x"}}, "least_similarity"),
        ({"facts": {"neighbours": None}}, "neighbours"),
        ({"facts": {"neighbours": 10**9}}, "neighbours"),
        ({"facts": {"passage_chunks": 0}}, "passage_chunks"),
        ({"facts": {"passage_chunks": [1]}}, "passage_chunks"),
    ],
)
def test_a_damaged_manifest_is_named(paths, tmp_path, change, named):
    said = json.loads((paths["retro"] / "model.json").read_text())
    (tmp_path / "model.json").write_text(json.dumps(said | change))
    refused(rf"model\.json.*{named}", folder_module.load, tmp_path)


def test_a_lacking_part_is_named(paths, tmp_path):
    (tmp_path / "model.json").write_text((paths["retro"] / "model.json").read_text())
    refused(r"tokenizer|model", open_folder, tmp_path, error=FileNotFoundError)


def test_gains_are_given_with_intervals_where_enough_bytes_are_kept(tmp_path):
    from .. import toys

    store = toys.store([[1] * 8, [2] * 8, [3] * 8], 4)
    leakage = np.array([0.0, 0.5, 0.5, 0.5, 1.0, 1.0])
    size = np.array([2, 20, 20, 20, 20, 18])
    on, off = (Scores(nats, np.full(6, 4), size) for nats in (size * 0.5 * np.log(2), size * 0.75 * np.log(2)))
    gains = evaluation.gains(on, off, store, leakage, alphas=(0.0, 0.5, 1.0))
    assert [alpha for alpha, *_ in gains] == [0.5, 1.0]  # at 0 are 2 of 100 bytes
    assert all(row[1:4] == pytest.approx((-0.25, -0.25, -0.25)) for row in gains) and gains[0][4] == pytest.approx(0.62)
    evaluation.plot_gains(on, {"off": off}, store, leakage, tmp_path / "gains.png")
    assert (tmp_path / "gains.png").stat().st_size > 10_000


def test_a_reading_has_its_control(paths):
    """The gain is over random passages of the library."""
    reader = open_folder(paths["retro"])
    reading = reader.score(reader.passage(0), Options())
    assert reading.random.shape == reading.on.shape and reading.random[0] == 0
    assert np.array_equal(reading.gain, reading.random - reading.on)
    said = reading.to_dict()
    assert said["bits_per_byte"].keys() == {"on", "off", "random"} and said["controlled"]
    assert reading.per_byte(reading.on) < reading.per_byte(reading.random)  # the circuit copies from the neighbours
    alone = reader.score(reader.passage(0), Options(retrieval=False))
    assert alone.random is None and not alone.gain.any() and not alone.to_dict()["controlled"]


def test_random_passages_are_of_the_library_as_it_is(paths):
    library = open_folder(paths["retro"]).library
    ids = np.array([[0, -1], [3, 4]] * 50)
    drawn = library.drawn(ids)
    assert ((drawn < 0) == (ids < 0)).all() and len(set(drawn.ravel())) > 20
    assert np.array_equal(drawn, library.drawn(ids))
    for number in range(len(library.documents) - 1):
        library.forget(number)
    kept = {library.place(int(i)).document for i in library.drawn(ids).ravel() if i >= 0}
    assert kept == {len(library.documents) - 1}
    new = library.add("new.txt", "The crane moved. " * 30)
    library.forget(new - 1)
    assert {library.place(int(i)).document for i in library.drawn(ids).ravel() if i >= 0} == {new}


def test_passages_that_resemble_the_library_come_first(reader):
    """port.txt is of harbour.txt; a tail comes last, whatever it resembles."""
    shown = [reader.passages[number] for number in reader.order]
    assert [p["id"] for p in reader.about()["passages"]] == reader.order and reader.start == shown[0]["id"]
    assert shown[0]["name"] == "port.txt" and {p["name"] for p in shown} == {"port.txt", "note.html"}
    shown[0]["tokens"] = reader.folder.window // 2 - 1
    assert reader._order() == [*reader.order[1:], reader.order[0]]


def test_its_own_words_are_not_scored(paths):
    reader = open_folder(paths["retro"])
    reading, _ = reader.write(reader.encode("The harbour moved the"), Options(new_tokens=4))
    assert reading.to_dict()["bits_per_byte"] is None and reading.extra["prompt_tokens"] > 1
    refused("question: expected a model that was taught to answer", reader.answer, "What is a harbour?", Options())


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def folder_of_nothing(path):
    path.unlink()
    path.mkdir()


def half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("change", [pipe, link, folder_of_nothing, half])
def test_each_file_of_a_model_folder(tmp_path, change):
    whole = tmp_path / "whole"
    whole.mkdir()
    folders.retro(whole)
    names = [path.relative_to(whole) for path in whole.rglob("*") if path.is_file() and not path.name.endswith(".lock")]
    assert len(names) > 8
    for number, name in enumerate(names):
        changed = shutil.copytree(whole, tmp_path / str(number))
        change(changed / name)
        with pytest.raises((FileNotFoundError, ValueError), match=str(changed)):
            reader = open_folder(changed)
            reader.score(reader.passage(0), Options())
