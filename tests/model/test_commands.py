"""The commands `neighbours` and `scaling`: tiny runs, held against what they are made of."""

import json

import numpy as np
import pytest
import torch

from retro_model import evaluation, training
from retro_model.apps.evaluate import ablations, knn_lm, neighbours, scaling
from retro_model.data.database import ChunkDatabase
from retro_model.data.embed import EncoderEmbedder, HashedTfidf, retokenized
from retro_model.data.neighbours import open_neighbours
from retro_model.data.store import TokenStore
from retro_model.data.subset import subset_neighbours, subset_rows
from retro_model.data.tokens import Tokenizer
from tests.model.data import random_documents, store_of

TEXTS = [" ".join(f"word{(i * j) % 7} and" for j in range(12)) for i in range(1, 9)]


def bert(folder):
    """A frozen encoder and its tokenizer, as `from_pretrained` finds them."""
    transformers = pytest.importorskip("transformers")
    import tokenizers

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "and", *(f"word{i}" for i in range(7))]
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=model, unk_token="[UNK]", pad_token="[PAD]")
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    encoder = transformers.BertModel(transformers.BertConfig(**sizes, max_position_embeddings=64))
    for part in (fast, encoder):
        part.save_pretrained(folder)
    return encoder, fast


@pytest.mark.parametrize("encoder", ["bert", "tfidf"])
def test_neighbours_by_a_frozen_encoder(tmp_path, capsys, encoder):
    documents = tmp_path / "corpus.jsonl"
    documents.write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    made = bert(tmp_path / "bert") if encoder == "bert" else None
    name = str(tmp_path / "bert") if made else "tfidf"
    options = [
        "--documents",
        str(documents),
        "--text-field",
        "body",
        "--tokenizer",
        "train:270",
        "--chunk-len",
        "8",
        "--encoder",
        name,
    ]
    arguments = [str(tmp_path / "run"), *options, "-k", "3", "--window", "32"]
    for _ in range(2):  # the second time it finds everything made
        neighbours.main(arguments)
    store = TokenStore(tmp_path / "run" / "store")
    tokenizer = Tokenizer.load(tmp_path / "run" / "tokenizer.json")
    embedder = (
        EncoderEmbedder(made[0], prepare=retokenized(tokenizer.decode, made[1])) if made else HashedTfidf().fit(store)
    )
    database = ChunkDatabase.open(tmp_path / "run" / "keys", store, embedder)
    ids = open_neighbours(tmp_path / "run" / "neighbours", store, database)
    want = database.search(store.chunks(np.arange(len(store))), 3, lengths=store.lengths, exclude_doc=store.chunk_doc)
    assert np.array_equal(ids, want) and len(store.documents) == len(TEXTS)
    said = capsys.readouterr().out
    assert f"keys: {embedder.name}" in said
    assert (
        "of what a training window is shown: 0.0% of the windows of 32 tokens hold a neighbour from one of their own "
        "documents" in said
    )


def test_other_documents(tmp_path):
    for name, text in (("b.py", "x = 1"), ("a/c.py", "y = 2"), ("skip/d.py", "z"), ("e.py", "  ")):
        path = tmp_path / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "src" / "f.py").write_bytes(b"\xff\xfe")
    documents = list(neighbours.read_documents([str(tmp_path / "src" / "**" / "*.py")], "text", ["skip"]))
    assert [d.content for d in documents] == ["y = 2", "x = 1"]
    with pytest.raises(FileNotFoundError, match="documents: expected files"):
        list(neighbours.read_documents([str(tmp_path / "nothing*")], "text", []))


def test_windows_see_their_future_only_unfiltered(tmp_path):
    """Two short documents in each window, each a neighbour of the other: counted by hand."""
    # documents of chunks 0-1, 2-3, 4-5, 6-7
    store = store_of(tmp_path / "s", [[5] * 8, [6] * 8, [7] * 8, [8] * 8], chunk_len=4)
    database = ChunkDatabase.build(tmp_path / "k", store, HashedTfidf(8).fit(store))
    ids = np.full((8, 1), -1)
    ids[0] = 3  # window 0: ahead
    ids[7] = 4  # window 1: its own, behind
    leaks = evaluation.window_leaks(store, ids, database, window=16, filtered=False)
    assert leaks == (1.0, 0.5)
    assert evaluation.window_leaks(store, ids, database, window=16) == (0.0, 0.0)
    assert evaluation.window_leaks(store, ids, database, window=8, filtered=False) == (0.0, 0.0)  # a document a window
    ids[:] = -1
    ids[2] = 2  # a chunk is no neighbour of itself, but what follows it here is ahead
    assert evaluation.window_leaks(store, ids, database, window=16, filtered=False) == (0.5, 0.5)
    assert training.visible(store, np.arange(8).reshape(2, 4), ids, database).max() == -1


def test_a_smaller_database_is_searched_exactly(tmp_path):
    store = store_of(tmp_path / "s", random_documents(20))
    other = store_of(tmp_path / "o", random_documents(4, seed=3))
    database = ChunkDatabase.build(tmp_path / "k", store, HashedTfidf(32).fit(store))
    rows = [subset_rows(database, share) for share in (0.2, 0.5, 1.0)]
    assert set(rows[0]) < set(rows[1]) < set(rows[2]) == set(range(len(store)))
    assert all(len({*store.chunk_doc[r]}) == sum(d in {*store.chunk_doc[r]} for d in range(20)) for r in rows)
    kept = np.isin(store.chunk_doc, store.chunk_doc[rows[0]])
    assert np.array_equal(np.flatnonzero(kept), rows[0])  # whole documents
    everything = np.arange(len(other))
    want = database.search(
        other.chunks(everything), 3, lengths=other.lengths, exclude_doc=database.documents_of(other)[other.chunk_doc]
    )
    assert np.array_equal(subset_neighbours(database, other, 3, rows[2]), want)
    ids = subset_neighbours(database, other, 3, rows[0])
    assert np.isin(ids, rows[0]).all()
    keys = np.asarray(database.searcher.keys)[rows[0]]
    queries = database.searcher.embedder(other.chunks(everything), other.lengths)
    away = ((queries[:, None] - keys) ** 2).sum(-1) + 1e9 * (
        store.chunk_doc[rows[0]] == database.documents_of(other)[other.chunk_doc][:, None]
    )
    np.testing.assert_allclose(
        np.take_along_axis(away, np.searchsorted(rows[0], ids), 1), np.sort(away, 1)[:, :3], atol=1e-5
    )
    with pytest.raises(ValueError, match="share: expected a number above 0"):
        subset_rows(database, 0.0)


def test_what_goes_on_from_a_demonstration(tmp_path, capsys, monkeypatch):
    """On what a smoke run of the demonstration leaves: at its own settings all go through its own numbers."""
    pytest.importorskip("matplotlib")
    import dataclasses

    from retro_model.apps.demo import command
    from retro_model.apps.demo.plan import SMOKE

    monkeypatch.setattr(command, "draw_sample", lambda *_: None)

    plan = dataclasses.replace(SMOKE, steps=1, warmup_steps=0, database_bytes=100_000, train_bytes=60_000)
    results = command.run(tmp_path, plan, quiet=True)
    scaling.main([str(tmp_path), "--shares", "0.3", "1", "--neighbours", "1", "2", "5"])
    saved = json.loads((tmp_path / "scaling.json").read_text())
    bpb = results["bits_per_byte"]
    assert saved["off"] == pytest.approx(bpb["RETRO off"]) and saved["baseline"] == pytest.approx(bpb["baseline"])
    assert (
        dict(saved["neighbours"])[2]
        == pytest.approx(bpb["RETRO on, 2 neighbours"])
        == pytest.approx(saved["database"][1][2])
    )
    assert saved["random"] == pytest.approx(bpb[command.RANDOM]) and saved["gain"] in results["verdicts"]
    assert len({b for _, b in saved["neighbours"]}) == 3 and saved["database"][0][1] < saved["database"][1][1]
    assert (tmp_path / "scaling.png").read_bytes()[:4] == b"\x89PNG"
    for _ in range(2):  # the second time every variant's scores are there
        scaling.main([str(tmp_path), "--ablations", "1"])
        monkeypatch.setattr(ablations, "fit", lambda *_, **__: pytest.fail("trained again"))
    parts = json.loads((tmp_path / "ablations.json").read_text())
    found = {name: part["bits_per_byte"] for name, part in parts.items()}
    assert len(set(found.values())) == 4 and "N alone" in capsys.readouterr().out
    assert found["RETRO"] == pytest.approx(bpb["RETRO on, 2 neighbours"])  # the same batches, the same steps
    gap = parts["N alone"]["minus RETRO"][0]
    assert gap == pytest.approx(found["N alone"] - found["RETRO"])
    monkeypatch.setattr(evaluation.knn_lm, "SHARPNESS", (1.0,))
    knn_lm.main([str(tmp_path), "--documents", "4", "-k", "3"])
    beside = json.loads((tmp_path / "knn-lm.json").read_text())
    assert len(beside) == 7 and beside["baseline"]["bits_per_byte"] == pytest.approx(bpb["baseline"])
    assert beside["RETRO on, 2 neighbours"]["bits_per_byte"] == pytest.approx(found["RETRO"])
    assert beside[command.RANDOM]["bits_per_byte"] == pytest.approx(bpb[command.RANDOM])
    assert beside["RETRO on, 2 neighbours"]["gain"] in results["verdicts"]  # of what is found, minus its control
    assert "random neighbours" in beside[knn_lm.TUNED]["gain"]
    assert beside[knn_lm.SHUFFLED]["bits_per_byte"] > beside[knn_lm.TUNED]["bits_per_byte"] + 0.05
