"""`retro-model compare` and `retrofit` on a tiny decoder, and their parts."""

import contextlib
import io
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from retro_model import evaluation, training
from retro_model.commands.compare import command as compare
from retro_model.commands.compare import contenders
from retro_model.commands.compare import results as record
from retro_model.commands.options import CONTENDERS, Sizes
from retro_model.commands.retrofit import command as retrofit
from retro_model.commands.retrofit import copying, prefix, texts
from retro_model.commands.retrofit.fitting import fit
from retro_model.commands.retrofit.prepared import Searched, prepare, spread
from retro_model.data.database import ChunkDatabase
from retro_model.data.embed import HashedTfidf
from retro_model.data.neighbours import precompute_neighbours
from retro_model.data.store import Document
from retro_model.folders.documents import Documents
from retro_model.folders.reader import Options, open_folder
from retro_model.folders.retrofit import RetrofitReader
from retro_model.retrofit import own_copy
from retro_model.retrofit import retrofit as make_retrofit
from retro_model.training import gather
from tests.model import toys
from tests.model.data import random_documents, store_of
from tests.model.folders import made as folders
from tests.refusals import refused

transformers = pytest.importorskip("transformers")


def test_what_is_held_out_is_not_in_the_library():
    documents = [Document(f"{i}.txt", "", f"{i} " * (600 + i)) for i in range(40)]
    library, held = texts.divide(documents, 6, 1200, 20_000)
    assert len(held) == 6 and {d.name for d in held}.isdisjoint(d.name for d in library)
    assert all(len(d.content) == 1200 for d in held)
    assert 15_000 < sum(len(d.content) for d in library) <= 20_000
    said = []
    assert len(texts.divide(documents[:10], 6, 1200, 20_000, said.append)[1]) == 2  # a fifth at most
    assert not said and texts.divide(documents, 6, 1200, 20_000, said.append)
    left = 40 - 6 - len(library)
    assert said == [f"{left} documents are left out of the library, beyond its 20,000 characters (--database-bytes)"]
    refused("texts: expected at least five files", texts.divide, documents[:4], 6, 1200, 20_000)
    with pytest.raises(ValueError, match="window: expected a positive multiple"):
        prepare(texts.Path("out"), texts.Path("decoder"), library, held, Sizes(window=100))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--texts", "nowhere"], "nowhere: expected a folder of text files; there is none"),
        (["--chunk-len", "0"], "chunk_len: expected an int >= 1; got 0"),
    ],
)
@pytest.mark.parametrize("command", [retrofit, compare])
def test_a_wrong_option_is_named_before_a_decoder_is_fetched(monkeypatch, tmp_path, command, wrong, said):
    monkeypatch.setattr(command, "decoder_folder", None)
    refused(said, command.main, [*wrong, "--out", str(tmp_path)], error=SystemExit)


def test_an_excerpt_begins_a_line_anywhere_in_its_document():
    lines = [f"line {i}" for i in range(100)]
    firsts = set()
    for i in range(200):
        got = texts.excerpt(Document(f"{i}.txt", "", "\n".join(lines)), 200)
        assert len(got) == 200 and got in "\n".join(lines)
        firsts.add(lines.index(got.split("\n")[0]))
    assert min(firsts) < 5 and max(firsts) > 65 and len(firsts) > 50
    assert texts.excerpt(Document("a", "", "short"), 200) == "short"


def test_the_gain_of_retrieval_is_said_against_random_neighbours():
    store = toys.store([[1] * 8] * 12, 4)
    ones, bytes_ = np.ones(24), np.full(24, 8)
    on, random = (evaluation.Scores(cost * ones, ones.astype(int), bytes_) for cost in (1.0, 3.0))
    gap = 2 / 8 / math.log(2)
    assert evaluation.gain_of_retrieval(on, random, store) == (
        f"Retrieval helps by {gap:.3f} bits per byte (95% over documents: {gap:.3f} to {gap:.3f}): neighbours against "
        "random neighbours, 12 documents."
    )
    assert evaluation.gain_of_retrieval(random, on, store).startswith("Retrieval hurts by")
    assert evaluation.gain_of_retrieval(on, random, store, "others'").endswith(" against others', 12 documents.")
    kept = np.asarray(store.chunk_doc) < 9
    few = evaluation.Scores(random.nats * kept, random.tokens * kept, random.bytes * kept)
    said = evaluation.gain_of_retrieval(
        evaluation.Scores(on.nats * kept, on.tokens * kept, on.bytes * kept), few, store
    )
    assert said.startswith("Too few to say: -0.361 bits per byte") and "9 documents; expected at least 10" in said


def test_neighbours_for_training_are_those_that_were_computed_before(tmp_path):
    store = store_of(tmp_path / "store", random_documents(6))
    database = ChunkDatabase.build(tmp_path / "keys", store, HashedTfidf(16).fit(store))
    want = precompute_neighbours(tmp_path / "near", store, database, 3)
    got = Searched(database, 3)
    rows = np.array([[0, 5], [len(store) - 1, 2]])
    assert np.array_equal(got[rows], want[rows]) and len(got) == len(want) and got.shape == want.shape
    options = {"window": 16, "batch_size": 2, "seed": 0, "database": database, "k": 2}
    batch, other = (next(training.batches(store, neighbours=n, **options)) for n in (got, want))
    assert torch.equal(batch.neighbours, other.neighbours) and torch.equal(batch.neighbour_mask, other.neighbour_mask)


def half_frozen():
    """Return a model with a frozen part."""
    model = toys.Bigram()
    model.scale.requires_grad_(False)
    return model


def test_a_stopped_training_continues_to_the_same_weights(tmp_path):
    store = toys.random_store(60, 4)

    def stream(start):
        return training.batches(store, window=8, batch_size=2, seed=3, start=start)

    of, said = {"seed": 0}, []
    whole = half_frozen()
    facts = fit(whole, stream, 25, of, tmp_path / "whole", said.append)
    assert facts["steps"] == 25 and len(facts["losses"]) == 25 and facts["tokens"] > 0 and len(said) == 6
    assert np.mean(facts["losses"][-5:]) < np.mean(facts["losses"][:5])

    class Stopped(Exception):
        pass

    def stop(line):
        raise Stopped

    with pytest.raises(Stopped):
        fit(half_frozen(), stream, 25, of, tmp_path / "stopped", stop)
    again = half_frozen()
    facts = fit(again, stream, 25, of, tmp_path / "stopped", said.append)
    assert torch.equal(again.table.weight, whole.table.weight) and len(facts["losses"]) == 25
    assert said[6] == "  continues after step 1 of 25"
    other = fit(half_frozen(), stream, 6, of, tmp_path / "stopped", said.append)
    assert other["steps"] == len(other["losses"]) == 6  # other settings start from the beginning
    (kept,) = (tmp_path / "stopped").glob("shards-*/*.safetensors")
    # without the frozen part
    assert {name for name in load_file(kept) if name.startswith("model.")} == {"model.added.0"}
    untrained = half_frozen()
    assert fit(untrained, stream, 0, of, tmp_path / "none", said.append)["steps"] == 0
    assert len(fit(half_frozen(), stream, 1, of, tmp_path / "one", said.append)["losses"]) == 1
    assert torch.equal(untrained.table.weight, half_frozen().table.weight)


def test_the_prefix_is_text_of_the_library_and_the_best_of_its_places(monkeypatch, tmp_path):
    store = store_of(tmp_path, np.random.default_rng(0).integers(4, 200, (40, 150)), chunk_len=8)
    decoder = SimpleNamespace(config=SimpleNamespace(bos_token_id=3))
    seen, losses = [], iter([*range(prefix.PLACES, 0, -1), 2.0, 0.5, 3.0, 4.0])

    def loss(decoder, tokens, prefix):
        seen.append((tokens, prefix))
        return next(losses)

    monkeypatch.setattr(prefix, "_loss", loss)
    chosen = prefix.choose(decoder, store, window=32, seed=1)
    # the last three places are the best by few tokens; the second of them is the best by whole windows
    assert chosen.tokens == seen[-3][1] == seen[prefix.PLACES - 2][1] and chosen.nats == (2.0, 0.5, 3.0, 4.0)
    assert len(seen) == prefix.PLACES + 4 and seen[-1][1] == ()
    few, whole = seen[0][0], seen[-1][0]
    assert few[:, 1:].numel() <= prefix.FEW < whole.numel() and torch.equal(few[::2], whole[:, : few.shape[1]])
    owner = [d.name for d in store.documents].index(chosen.document)
    text = np.asarray(store.tokens)[np.asarray(store.chunk_doc) == owner].reshape(-1)[chosen.first :]
    assert chosen.tokens == (3, *text[: prefix.LENGTH - 1].tolist())
    windows = {tuple(row.tolist()) for row in np.asarray(store.tokens)[np.asarray(store.chunk_doc) == owner]}
    judged = {tuple(part.tolist()) for row in whole for part in row.split(8)}
    assert len(whole) > 3 and not judged & windows  # of other documents
    monkeypatch.setattr(prefix, "_loss", lambda decoder, tokens, prefix: len(prefix))
    none = prefix.choose(decoder, store, window=32)
    assert none.tokens == () and "no prefix: with the best place the loss is 64.000" in none.said()
    assert f"from {chosen.document}, at token {chosen.first}: 0.500 nats per token" in chosen.said()


class Near:
    """Neighbours for the chunks of `reads` alone."""

    def __init__(self, reads):
        self.reads = reads

    def __getitem__(self, rows):
        return np.where(np.isin(rows, self.reads), 0, -1)[..., None]


def test_training_windows_that_recur_lie_anywhere_in_documents_and_have_something_to_read():
    store = toys.store([[1] * 8, [2] * 12, [3] * 20, [4] * 16, [5] * 12], 4)
    within = [{2}, {5, 6, 7}, {10, 11}, {14}]  # rows where a window of twelve tokens can begin
    every = Near(range(100))
    drawn = [spread(store, every, 12, 2, seed).tolist() for seed in range(40)]
    assert {row for rows in drawn for row in rows} == set().union(*within)
    assert all(len(rows) == 2 and sum(not rows_of.isdisjoint(rows) for rows_of in within) == 2 for rows in drawn)
    assert spread(store, every, 12, 9, 0) is None
    # no token reads the neighbours of a window's last chunk
    near = [spread(store, Near([6, 14, 16]), 12, 2, seed) for seed in range(40)]
    assert {row for rows in near for row in rows.tolist()} == {5, 6, 14}


def test_passages_that_resemble_their_chunk_too_little_are_not_read(tmp_path):
    store = store_of(tmp_path / "store", random_documents(6))
    database = ChunkDatabase.build(tmp_path / "keys", store, HashedTfidf(16).fit(store))
    rows = np.arange(len(store))
    ids = Searched(database, 3)[rows]
    keys = np.asarray(database.searcher.keys)
    cosine = (keys[rows][:, None] * keys[ids]).sum(-1)
    got = database.similarity(store, rows, ids)
    assert np.allclose(got, cosine, atol=1e-5) and (database.similarity(store, rows, ids * 0 - 1) == -np.inf).all()
    least = float(np.median(got))
    assert np.array_equal(Searched(database, 3, least)[rows], np.where(got < least, -1, ids))
    parts = store, keys, database.searcher.embedder, SimpleNamespace(decode_bytes=lambda ids: b"x")
    page = Documents(*parts)
    ids, near = page.search(store.chunks(rows), 3)
    page.tokenizer.encode = lambda text: store.tokens[3][:4]
    page.add("copy", "x")
    assert set(page.search(store.chunks(rows), 2)[0][3]) == {3, len(store)}
    shown, _ = Documents(*parts, least_similarity=least).search(store.chunks(rows), 3)
    assert np.array_equal(shown, np.where(near < least, -1, ids)) and (shown < 0).any()


def test_exchanged_neighbours_are_those_of_other_documents():
    store = toys.store([[1] * 8] * 3, 4)  # three documents of two chunks
    near = np.array([[1, 2], [2, -1], [3, 2], [4, 5], [5, 6], [7, 1]])
    lacks = [{3, 4, 5, 6, 7}, {1, 6, 7}, {2, 3, 4}]
    seen = [set(), set(), set()]
    for seed in range(30):
        got = evaluation.exchanged_neighbours(near, store, range(8), seed)
        assert np.array_equal(got < 0, near < 0)
        for document in range(3):
            rows = got[2 * document : 2 * document + 2]
            seen[document] |= set(rows[rows >= 0].tolist())
    assert seen == lacks
    same = np.where(near < 0, -1, 1)  # no other document adds any: the whole database
    drawn = np.concatenate([evaluation.exchanged_neighbours(same, store, range(8), seed) for seed in range(30)])
    assert set(drawn[drawn >= 0].tolist()) == set(range(8))
    nothing = np.full_like(near, -1)
    assert np.array_equal(evaluation.exchanged_neighbours(nothing, store, range(8)), nothing)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Folders of a decoder and of texts."""
    decoder, library = (tmp_path_factory.mktemp(name) for name in ("tiny-llama", "texts"))
    folders.decoder(decoder)
    folders.text_files(library)
    return decoder, library


@pytest.fixture(scope="module")
def compared(parts, tmp_path_factory):
    """Run `compare`; return its folder, its arguments and its output."""
    out = tmp_path_factory.mktemp("out")
    arguments = [*map(str, (parts[0], "--texts", parts[1], "--out", out)), "--chunk-len", "8", "--window", "32"]
    arguments += ["--steps", "2", "--held-out", "4", "--held-bytes", "400", "--least-similarity", "0.8"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        compare.main(arguments)
    return out, arguments, said.getvalue()


def test_every_contender_has_its_difference_its_control_and_its_cost(compared):
    found = json.loads((compared[0] / "compare.json").read_text())
    rows = found["contenders"]
    assert rows.keys() == set(CONTENDERS) == set(contenders.MAKERS)
    assert rows["alone"]["minus_alone"] == rows["in-context"]["minus_in_context"] == [0, 0, 0]
    gap = rows["own"]["minus_alone"][0] - rows["in-context"]["minus_alone"][0]
    assert rows["own"]["minus_in_context"][0] == pytest.approx(gap, abs=2e-4)
    for name, row in rows.items():
        assert row["cpu_seconds"]["true"] > 0 and row["cpu_ms_per_token"] > 0 and row["documents"] == 4
        retrieves = name not in ("alone", "alone+prefix", "longer")
        assert retrieves == ("minus_random" in row) == ("random_minus_alone" in row)
        assert ("steps" in row["made"]) == name.startswith("own-gates")
    assert rows["own-gates+prefix+both"]["made"]["copying"]["tokens"] > 100
    assert found["library"]["held_out_documents"] == 4 and found["command"].startswith("retro-model compare")


def test_the_table_has_a_row_for_each_contender_and_no_interval_over_few_documents(compared):
    found, said = json.loads((compared[0] / "compare.json").read_text()), (compared[0] / "compare.md").read_text()
    assert said in compared[2] and "of the bytes have r(C) <= 0.25" in said
    table = [line.split(" | ") for line in said.splitlines() if line.startswith("| ")]
    assert len(table) == 1 + len(CONTENDERS) and {len(row) for row in table} == {len(record.COLUMNS)}
    assert " to " not in "".join(cell for row in table for cell in row)
    for row in found["contenders"].values():
        row["documents"] = 10
    assert record.markdown(found).count(" to ") > len(CONTENDERS)


def test_the_differences_are_those_of_the_scores(compared):
    found = json.loads((compared[0] / "compare.json").read_text())["contenders"]["in-context"]
    alone, other = (record.Result.load(compared[0] / "scores" / f"{n}-0.npz") for n in ("alone", "in-context"))
    whole = math.log(2) * alone.true.bytes.sum()
    for name, one, two in (
        ("minus_alone", other.true, alone.true),
        ("minus_random", other.true, other.random),
        ("random_minus_alone", other.random, alone.true),
    ):
        assert found[name][0] == pytest.approx((one.nats - two.nats).sum() / whole, abs=1e-4)


def test_what_is_scored_is_not_scored_again(compared, monkeypatch):
    def fail(*_):
        raise AssertionError("scored again")

    before = (compared[0] / "compare.md").read_text()
    for name in CONTENDERS:
        monkeypatch.setitem(contenders.MAKERS, name, fail)
    compare.main(compared[1])
    assert (compared[0] / "compare.md").read_text() == before
    for other in (["--documents", "3"], ["--seed", "1"]):
        refused("scored again", compare.main, [*compared[1], *other], error=AssertionError)


@pytest.mark.parametrize("least", [-1.0, 9.0], ids=["kept", "left out"])
def test_a_retrofit_is_served_with_what_its_options_add(parts, tmp_path, monkeypatch, capfd, least):
    """Copying is kept if it gains on the library's own text. The folder refers to its decoder."""
    sizes = Sizes(chunk_len=8, window=32, stride=16, dim=64, held_out=4, held_bytes=400, passage_chunks=3)
    made, fits, said = copying.fit_copying, [], []

    def fit_copying(copier, gates, library, sizes, seed):
        found = made(copier, gates, library, sizes, seed)
        store, rows = library.database.store, sizes.window // sizes.chunk_len
        firsts = spread(store, Searched(library.database, 6), sizes.window, len(store.documents), seed + 1)
        near = Searched(library.database, 6, sizes.least_similarity)
        batch = gather(store, firsts[:, None] + np.arange(rows), near, library.database, k=2)
        plain = make_retrofit(copier.decoder, **copier.config.to_dict() | {"copying": False})
        plain.load_state_dict(gates, strict=False)
        with torch.no_grad():
            losses = [float(model(**batch.inputs, loss_mask=batch.real).total) for model in (plain, copier)]
        fits.append((found, (losses[0] - losses[1]) / int(batch.real[:, 1:].sum())))
        return found

    monkeypatch.setattr(copying, "LEAST_GAIN", least)
    monkeypatch.setattr(retrofit, "fit_copying", fit_copying)
    monkeypatch.setattr(prefix, "_loss", lambda decoder, tokens, prefix: -len(prefix))
    with monkeypatch.context() as loads:
        loads.setattr(RetrofitReader, "_model", None)  # the page's numbers need no second copy of the model
        options = {"steps": 2, "prefix": True, "copying": True, "folder_of_texts": parts[1]}
        retrofit.run(parts[0], tmp_path, sizes, **options, show=said.append)
    [(found, saved)] = fits
    assert found.gain == pytest.approx(saved, abs=1e-4) and found.tokens > 100
    assert any(line.startswith("  step 2 of 2") for line in said) and said[-3].startswith("Too few to say")
    facts = json.loads((tmp_path / "retrofit.json").read_text())
    assert list(facts["seconds"]) == ["ready", "trained", "scored"]
    assert 0 < facts["seconds"]["ready"] <= facts["seconds"]["trained"] <= facts["seconds"]["scored"]
    assert not list((tmp_path / "model").glob("decoder*"))
    assert sum(p.stat().st_size for p in (tmp_path / "model").rglob("*")) < 60_000
    transformers.utils.logging.enable_progress_bar()
    reader = open_folder(tmp_path)
    assert "Loading" not in capfd.readouterr().err
    assert reader.model.config.neighbour_len == 24 and reader.model.config.copying == (least < 0)
    if least < 0:
        assert reader.model.copying.centre.any()
        assert facts["training"]["copying"]["numbers"] == reader.model.copying.numbers.tolist() != list(own_copy.START)
    assert any("64 tokens from" in line for line in said) and len(reader.model.config.prefix) == prefix.LENGTH
    assert reader.without == "the decoder and the shared prefix"  # retrieval off has it in front too
    got = reader.score(reader.passage(reader.start), Options())
    reader.write(reader.passage(reader.start)[:20], Options(new_tokens=8))
    assert np.abs(got.on - got.off).max() > 1e-4
    shown = [card for cards in got.cards for card in cards]
    assert all(card["found"] <= 8 for card in shown) and max(len(card["texts"]) for card in shown) == 24


def test_the_options_of_the_command_reach_the_retrofit(monkeypatch):
    given = {}
    monkeypatch.setattr(retrofit, "run", lambda *args, **options: given.update(options, sizes=args[2]))
    retrofit.main(["--prefix", "--copy", "--strict", "--text-field", "body", "--window", "64", "--held-out", "3"])
    assert given["prefix"] and given["copying"] and given["strict"] and given["text_field"] == "body"
    assert given["sizes"] == Sizes(window=64, stride=32, held_out=3, held_bytes=600) and given["measures_small"]
    retrofit.main(["--database-bytes", "5", "--steps", "3"])
    assert given["sizes"].database_bytes == 5 and given["sizes"].held_out == Sizes.held_out and given["steps"] == 3
    assert not given["prefix"] and not given["measures_small"] and given["encoder"] is None
