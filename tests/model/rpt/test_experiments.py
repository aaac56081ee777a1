"""The demonstrations run, and their claims about their data hold."""

import itertools
import json

import numpy as np
import torch

from retro_model.apps.rpt import command
from retro_model.apps.rpt.cards import Documents, Plan
from retro_model.apps.rpt.deck import Copyist, Deck
from retro_model.apps.rpt.options import VARIANTS


def test_the_smallest_run(tmp_path):
    command.main(["cards", "--out", str(tmp_path), "--smoke", "--only", "RPT", "RETRO-BM25"])
    command.main(
        ["cards", "--out", str(tmp_path), "--smoke", "--only", "RPT-Lex", "window alone", "RPT, detached, own readout"]
    )
    results = json.loads((tmp_path / "cards.json").read_text())
    assert list(results["variants"]) == ["RPT", "RETRO-BM25", "RPT-Lex", "window alone", "RPT, detached, own readout"]
    assert all(h[-1]["step"] == 4 and np.isfinite(h[-1]["off"]) for h in results["variants"].values())
    assert results["variants"]["RETRO-BM25"][-1]["recall"] == 1.0
    assert (tmp_path / "cards.png").stat().st_size > 10_000


def test_cards_in_parts_are_the_uninterrupted_run(tmp_path):
    results = {}
    for name, calls in (("whole", [[]]), ("parts", [["--minutes", "0"], ["--minutes", "0"], []])):
        for more in calls:
            command.main(["cards", "--out", str(tmp_path / name), "--smoke", "--reworded", "--only", "RPT", *more])
        results[name] = json.loads((tmp_path / name / "cards-reworded.json").read_text())
        assert list(results[name]["share of retrieval"]) == ["forward", "step", "decode"]
        for row in results[name]["variants"]["RPT"]:
            del row["seconds"]
    assert results["parts"]["variants"] == results["whole"]["variants"]


def test_a_card_returns_as_it_was():
    for forms in (1, 8):
        deck = Deck(words=32, forms=forms)
        tokens, shown = deck.documents(3, seed=0)
        chunks = tokens.reshape(3, deck.chunks, deck.chunk_len)
        for document, cards in zip(chunks, shown):
            for card in range(deck.cards):
                cues, contents = document[::2][cards[::2] == card], document[1::2][cards[1::2] == card]
                for earlier, later in itertools.pairwise(cues):
                    same_words = (earlier[: deck.names] - deck.contents) // forms == (
                        later[: deck.names] - deck.contents
                    ) // forms
                    assert same_words.all()
                    assert (earlier[: deck.names] == later[: deck.names]).all() == (forms == 1)
                    assert (np.intersect1d(earlier[: deck.names], later[: deck.names]).size == 0) == (forms > 1)
                if len(contents) > 1:
                    assert (contents[0] == contents[1]).mean() > 0.6
    assert tokens.max() < Deck(words=32, forms=8).vocab_size


def test_far_and_right_by_hand():
    deck = Deck(showings=6)
    shown = np.repeat(np.array([[0, 1, 2, 0, 1, 1]]), 2, 1)
    right = deck.right(shown, excluded_chunks=4)[0]
    assert np.argwhere(right).tolist() == [[6, 0], [8, 2], [10, 2]]
    assert deck.far(shown, excluded_chunks=4)[0].nonzero()[0].tolist() == [6, 8]  # chunk 10's card stood at chunk 8


def test_the_lessons_say_which_card_it_is():
    """The teacher's neighbours of a far cue include an earlier showing of its card; BM25 fails on reworded cues."""
    shares = {}
    for forms in (1, 8):
        plan = Plan(Deck(words=32, forms=forms))
        documents = Documents.draw(plan, 6, seed=3)
        taught = documents.lessons.teacher(2)
        hit = (documents.right.gather(2, taught.clamp(min=0)) & (taught >= 0)).any(-1)[documents.far]
        assert hit.double().mean() > 0.8 and len(hit) > 20
        lexical = documents.right.gather(2, documents.without.clamp(min=0)).any(-1)[documents.far]
        shares[forms] = lexical.double().mean().item()
    assert shares[1] == 1.0 and shares[8] < 0.35


def test_the_reader_is_right_about_every_reworded_card():
    """Its lessons are positive for exactly the earlier showings of a card."""
    plan = command.REWORDED
    documents = Documents.draw(plan, 6, seed=3)
    positive = documents.lessons.dense() > 0
    assert torch.equal(positive[:, :-1], (documents.right & positive)[:, :-1])
    assert positive[documents.far].any(-1).all() and positive[documents.right].double().mean() > 0.8
    found = documents.right.gather(2, documents.without.clamp(min=0)).any(-1)[documents.far]
    assert found.double().mean() < 0.35  # BM25 by the cue, where chance has 0.31


def test_the_copyist_expects_what_stood_two_chunks_before():
    deck = Deck(chunk_len=4)
    tokens = torch.randint(0, deck.vocab_size, (2, 16))
    p = Copyist(deck, doubt=0.1)(tokens).softmax(-1)
    torch.testing.assert_close(p.sum(-1), torch.ones(2, 16))
    for t in range(7, 15):  # position t predicts token t + 1, a copy of token t - 7
        assert torch.equal(p[:, t].argmax(-1), tokens[:, t - 7])
    assert torch.allclose(p[:, :7], torch.tensor(1 / deck.vocab_size), rtol=1e-3)
    assert set(VARIANTS) >= {"RPT", "RPT, detached", "RETRO-BM25", "RPT-Lex", "window alone"}
