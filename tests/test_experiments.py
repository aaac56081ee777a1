"""The examples that repeat a paper's small experiments: their claims, and the data that they make."""

import itertools

import numpy as np
import pytest
import torch

from retro_kernels.testing import relative_error
from retro_model.memory_mosaics import MemoryMosaics, MosaicsConfig
from tests.model.memory_mosaics.naive import kernel_smoothing
from tests.test_examples import example

baseline, moons, regbench = (example(name) for name in ("baseline", "moons", "regbench"))
cards, mosaics_text, retro_python = (example(name) for name in ("rpt_cards", "mosaics_text", "retro_python"))


def is_picture(path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def test_one_and_three_memories_are_trained_and_drawn(tmp_path):
    errors = moons.main(["--length", "120", "--steps", "10", "--picture", str(tmp_path / "moons.png")])
    assert all(0 < error < 2 for error in errors) and is_picture(tmp_path / "moons.png")


@pytest.mark.nightly
def test_three_memories_predict_before_the_joint_period():
    one, three = moons.main(["--length", "240", "--steps", "300"])
    assert three < one / 2


def test_a_mosaic_learns_languages_in_context(tmp_path):
    sizes = ["--steps", "12", "--sequences", "60", "--scored", "10", "--points", "1"]
    results = regbench.main([*sizes, "--picture", str(tmp_path / "regbench.png")])
    assert results["Memory Mosaics"][0] > results["rotary transformer"][0] + 0.15
    accuracies = [results[f"{n}-grams"][0] for n in (1, 2, 3)]
    assert accuracies == sorted(accuracies) and is_picture(tmp_path / "regbench.png")


def test_learned_positions_end_at_the_training_length(tmp_path):
    sizes = ["--steps", "3", "--batch", "2", "--context", "32", "--longest", "64", "--windows", "3", "--width", "32"]
    few = ["--layers", "1", "--vocabulary", "300", "--characters", "60000", "--picture", str(tmp_path / "text.png")]
    results = mosaics_text.main([*sizes, *few])
    chance = np.log(300)
    assert all(abs(within - chance) < 1.5 for within, _ in results.values())
    beyond = {name: last for name, (_, last) in results.items()}
    assert np.isnan(beyond.pop(mosaics_text.LEARNED)) and np.isfinite([*beyond.values()]).all()
    assert is_picture(tmp_path / "text.png")


def test_an_rpt_is_scored_with_its_control():
    results = cards.main(["--steps", "4", "--documents", "8", "--scored", "4", "--every", "2", "--showings", "8"])
    assert list(results) == ["own", "teacher", "random", "off", "recall"]
    assert 0 <= results.pop("recall") <= 1 and all(3 < nats < 6 for nats in results.values())


@pytest.mark.nightly
@pytest.mark.parametrize("options", [[], ["--reworded", "--steps", "450"]], ids=["cards", "reworded"])
def test_an_rpt_retrieves_what_returns(options):
    results = cards.main(options)
    assert results["own"] < results["random"] - 1.5 and results["recall"] > 0.8


def test_a_retro_is_scored_with_its_control(tmp_path):
    sizes = ["--steps", "2", "--characters", "120000", "--vocabulary", "400", "--window", "128", "--width", "64"]
    results = retro_python.main([str(tmp_path), *sizes, "--picture", str(tmp_path / "gains.png")])
    assert list(results) == ["on", "random", "off", "baseline"] and all(0 < bits < 9 for bits in results.values())
    assert is_picture(tmp_path / "gains.png")


def test_held_out_modules_are_in_no_training_text():
    groups = {document.group for document in retro_python.sources()}
    assert set(retro_python.HELD_OUT) <= groups
    assert not set(mosaics_text.documents(True, 10**7)) & set(mosaics_text.documents(False, 10**8))


def test_free_running_predictions_are_the_equations():
    """Against loops over pairs. Each prediction becomes the next observation."""
    torch.manual_seed(0)
    x = moons.observe((4.3, 6.1, 10.7), 9, torch.tensor([0.0, 2.5], dtype=torch.float64))
    for heads in (1, 3):
        model = moons.Moons(heads).double()
        phi, psi, out = (torch.view_as_complex(w.detach()).numpy() for w in (model.key, model.value, model.output))
        got = model.run_on(x, 3)
        for row, predicted in zip(x.numpy(), got):
            seen = list(row)
            for z in predicted.numpy():
                y = []
                for share in np.split(np.arange(3), heads):
                    real = lambda v, share=share: np.concatenate([v[share].real, v[share].imag])  # noqa: E731
                    pairs = [(real(phi @ a), real(psi @ b)) for a, b in itertools.pairwise(seen)]
                    read = kernel_smoothing(50 * real(phi @ seen[-1]), pairs)
                    y.append(read[: len(share)] + 1j * read[len(share) :])
                np.testing.assert_allclose(z, out @ np.concatenate(y), rtol=1e-10)
                seen.append(z)


def test_a_prediction_of_the_whole_is_the_first_free_running_one():
    model, x = moons.Moons(3).double(), moons.observe((4.3, 6.1, 10.7), 9, torch.zeros(1, dtype=torch.float64))
    whole = model(x)
    assert whole.shape == (1, 8, 3)
    for t in (1, 2, 8):
        first = torch.view_as_real(model.run_on(x[:, :t], 1))
        assert relative_error(torch.view_as_real(whole[:, t - 1 : t]), first) < 1e-12


def test_moons_return_after_their_joint_period():
    for triple in (*moons.TRAINED, moons.HELD_OUT):
        x = moons.observe(moons.periods(triple, 360), 360, torch.zeros(1, dtype=torch.float64))
        torch.testing.assert_close(x[:, :120], x[:, 120:240])  # 360 / JOINT_PERIODS
        assert min(abs(x[0, t] - x[0, 0]).max() for t in range(2, 119)) > 1e-3
    shares = {tuple(np.array(triple) / max(triple)) for triple in (*moons.TRAINED, moons.HELD_OUT)}
    assert len(shares) == 9  # No triple is a multiple of another, so the held-out periods are new.


@pytest.fixture(scope="module")
def languages():
    return regbench.sequences(12, 0, 9)


def test_sequences_are_of_their_automaton(languages):
    for row in languages:
        symbols = row.tokens[1:] >= regbench.FIRST_SYMBOL
        assert row.allowed[:-1][symbols, row.tokens[1:][symbols] - regbench.FIRST_SYMBOL].all()
        assert (row.allowed.sum(1) >= 1).all() and (row.allowed.sum(1) <= 3).all()
        assert 10 <= row.word[-1] + 1 <= 19 and (np.diff(row.word) >= 0).all()
        starts = row.allowed[row.tokens == regbench.SEPARATOR]
        assert (starts == starts[0]).all()  # Every word starts in one state.


def test_scores_of_known_predictions(languages):
    truth = [row.allowed / row.allowed.sum(1, keepdims=True) for row in languages]
    assert regbench.score(languages, truth) == (1.0, pytest.approx(0, abs=1e-12))
    wrong = [~row.allowed / (~row.allowed).sum(1, keepdims=True) for row in languages]
    assert regbench.score(languages, wrong) == (0.0, pytest.approx(1))
    later = [p.copy() for p in truth]
    for p, row in zip(later, languages):
        p[row.word == 0] = 0  # The first word is not scored.
    assert regbench.score(languages, later)[0] == 1.0


def test_ngrams_count_what_came_before():
    a, b = regbench.FIRST_SYMBOL, regbench.FIRST_SYMBOL + 1
    row = regbench.Sequence(np.array([a, b, a, a, b]), np.ones((5, 18), bool), np.zeros(5, int))
    one, two = regbench.ngram(row, 1), regbench.ngram(row, 2)
    np.testing.assert_allclose(one[2][:2], [2 / 3, 1 / 3])
    np.testing.assert_allclose(two[2][:2], [0, 1])  # b came after a
    np.testing.assert_allclose(two[3][:2], [0.5, 0.5])  # b and a came after a
    np.testing.assert_allclose(two[0][:2], [1, 0])  # Nothing followed a so far: back off to the 1-gram.


@pytest.mark.parametrize("d_model", [64, 128])
def test_the_baseline_has_equal_size(d_model):
    sizes = {"vocab_size": 20, "d_model": d_model, "num_heads": 4, "num_layers": 2}
    mosaics = MemoryMosaics(MosaicsConfig(**sizes, persistent_slots=7 * d_model // 2))
    transformer = baseline.Transformer(baseline.TransformerConfig(**sizes))
    count = [sum(p.numel() for p in m.parameters()) for m in (mosaics, transformer)]
    assert count[0] - count[1] == 2 * 7 * 4  # the scalars


def test_the_baseline_is_causal_and_its_rotary_positions_are_relative():
    torch.manual_seed(0)
    model = baseline.Transformer(baseline.TransformerConfig(13, 32, 2, 2)).double().eval()
    tokens = torch.randint(0, 13, (1, 12))
    changed = tokens.clone()
    changed[0, 5] = (tokens[0, 5] + 1) % 13
    assert (model(changed) != model(tokens)).any(-1)[0].nonzero().flatten().tolist() == list(range(5, 12))
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64).expand(2, 1, 12, 1, 16)
    products = torch.einsum("bnhd,bmhd->nm", baseline.rotated(q), baseline.rotated(k))
    for lag in range(3):
        torch.testing.assert_close(products.diagonal(lag), products[0, lag].expand(12 - lag))


def test_a_card_returns_as_it_was():
    for forms in (1, 8):
        deck = cards.Deck(words=32, forms=forms)
        tokens, shown = deck.documents(3, seed=0)
        for document, numbers in zip(tokens.reshape(3, -1, deck.chunk_len).numpy(), shown):
            for card in range(deck.cards):
                cues, contents = document[::2][numbers[::2] == card], document[1::2][numbers[1::2] == card]
                names = cues[:, : deck.names] - deck.contents
                for earlier, later in itertools.pairwise(names):
                    assert (earlier // forms == later // forms).all()
                    assert (earlier == later).all() == (forms == 1)
                if len(contents) > 1:
                    assert (contents[0] == contents[1]).mean() > 0.6
        assert tokens.max() < deck.vocab_size


def test_far_and_right_by_hand(monkeypatch):
    deck, shown = cards.Deck(showings=6), np.repeat(np.array([[0, 1, 2, 0, 1, 1]]), 2, 1)
    assert np.argwhere(deck.right(shown, 4)[0]).tolist() == [[6, 0], [8, 2], [10, 2]]
    monkeypatch.setattr(cards, "EXCLUDED", 4)
    assert deck.far(shown)[0].nonzero()[0].tolist() == [6, 8]  # The card of chunk 10 is in chunk 8.


def test_the_reference_prefers_earlier_showings_of_the_card():
    for forms in (1, 8):
        deck = cards.Deck(words=32, forms=forms)
        tokens, shown = deck.documents(6, seed=3)
        right, far = (torch.from_numpy(x) for x in (deck.right(shown, cards.EXCLUDED), deck.far(shown)))
        positive = cards.lessons(deck, tokens, 40).dense() > 0
        assert torch.equal(positive[:, :-1], (right & positive)[:, :-1])
        assert positive[far].any(-1).all() and positive[right].double().mean() > 0.8
