"""The demonstrations: each command at smoke size, and the code below their numbers."""

import argparse
import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch

from retro_kernels.testing import relative_error, tolerances
from retro_model.__main__ import main
from retro_model.apps.demo.corpus import VALIDATION
from retro_model.apps.mosaics import automata, command, corpora, moons, regbench, text
from retro_model.apps.mosaics.transformer import Transformer, TransformerConfig
from retro_model.memory_mosaics import MemoryMosaics, MosaicsConfig
from tests.model.memory_mosaics.naive import kernel_smoothing

SMOKE = command.PLANS["regbench"]["smoke"]
PICTURES = {"moons": ["errors.png", "weights.png"], "regbench": ["regbench.png"], "text": ["text.png", "memories.png"]}


@pytest.mark.parametrize("name", command.EXPERIMENTS)
def test_a_command_leaves_tables_numbers_and_pictures(name, tmp_path):
    main(["mosaics", name, "--plan", "smoke", "--out", str(tmp_path), "--quiet"])
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["seconds"] > 0 and results["plan"]["steps"] == command.PLANS[name]["smoke"].steps
    assert len((tmp_path / "report.txt").read_text().splitlines()) > 10
    for picture in PICTURES[name]:
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_an_option_changes_a_plan_and_a_wrong_one_is_refused(tmp_path, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(regbench, "run", lambda folder, plan, **_: seen.append(plan))
    command.main(["regbench", "--out", str(tmp_path), "--rates", "0.001", "0.002", "--seeds", "2"])
    assert seen[0] == regbench.Plan(rates=(0.001, 0.002), seeds=2)
    with pytest.raises(SystemExit):
        command.main(["regbench", "--moons", "3"])
    assert "--moons" in capsys.readouterr().err


def test_a_stopped_experiment_goes_on_after_its_last_whole_part(tmp_path, monkeypatch):
    trained, fit = [], regbench.fit
    monkeypatch.setattr(
        regbench,
        "fit",
        lambda name, plan, rate, seed, *rest: trained.append((name, rate, seed)) or fit(name, plan, rate, seed, *rest),
    )
    with pytest.raises(SystemExit, match="before Memory Mosaics"):
        regbench.run(tmp_path, SMOKE, quiet=True, minutes=0)
    first = regbench.run(tmp_path, SMOKE, quiet=True)
    assert trained == [(name, 2e-3, 0) for name in regbench.MODELS]
    for part in (tmp_path / "parts").glob("*.pt"):  # pretend that each took that long
        torch.save(torch.load(part, weights_only=True) | {"seconds": 1000.0}, part)
    more = dataclasses.replace(SMOKE, seeds=2)
    second = regbench.run(tmp_path, more, quiet=True)
    assert trained[2:] == [(name, 2e-3, 1) for name in regbench.MODELS]
    assert second["seconds"] > 1000 * len(regbench.MODELS) > first["seconds"]
    assert second["runs"]["transformer"][0] == first["runs"]["transformer"][0]
    regbench.run(tmp_path, dataclasses.replace(SMOKE, steps=5), quiet=True)
    assert len(trained) == 6  # another plan's parts are not taken


def test_the_last_quarter_of_a_curve():
    curve = [{"step": 10 * i, "tv": 1.0 if i < 7 else 1.0 - 0.1 * (i - 6)} for i in range(1, 9)]
    assert regbench.last_quarter(curve, "tv") == pytest.approx(-0.2)  # points 6, 7 and 8


def test_the_identity_tracks_each_moon_after_its_period_and_one_head_after_the_joint_one():
    contexts = [11, 20, 40, 59, 61, 80]
    errors = moons.analytic(contexts)
    assert max(errors[3][1:]) < 2e-5
    assert min(errors[1][:3]) > 0.3 and max(errors[1][-2:]) < 1e-12


def test_free_running_predictions_are_the_equations():
    """Against loops over pairs; each prediction becomes the next observation."""
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
        assert (
            relative_error(torch.view_as_real(whole[:, t - 1 : t]), torch.view_as_real(model.run_on(x[:, :t], 1)))
            < 1e-12
        )


def test_moons_return_after_their_joint_period():
    for triple in (*moons.TRAINED, moons.HELD_OUT):
        got = moons.periods(triple, 360)
        x = moons.observe(got, 360, torch.zeros(1, dtype=torch.float64))
        torch.testing.assert_close(x[:, :120], x[:, 120:240])  # 360 / JOINT_PERIODS
        assert min(abs(x[0, t] - x[0, 0]).max() for t in range(2, 119)) > 1e-3
    shares = {tuple(np.array(t) / max(t)) for t in (*moons.TRAINED, moons.HELD_OUT)}
    assert len(shares) == 9  # no period is a multiple of another, so the held-out ones are new


@pytest.fixture(scope="module")
def languages():
    return automata.sequences(12, 0, 9)


def test_sequences_are_of_their_automaton(languages):
    for row in languages:
        symbols = row.tokens[1:] >= automata.FIRST_SYMBOL
        assert row.allowed[:-1][symbols, row.tokens[1:][symbols] - automata.FIRST_SYMBOL].all()
        assert (row.allowed.sum(1) >= 1).all() and (row.allowed.sum(1) <= 3).all()
        assert 10 <= row.word[-1] + 1 <= 19 and (np.diff(row.word) >= 0).all()
        starts = row.allowed[row.tokens == automata.SEPARATOR]
        assert (starts == starts[0]).all()  # every word starts in one state


def test_scores_of_known_predictions(languages):
    truth = [row.allowed / row.allowed.sum(1, keepdims=True) for row in languages]
    assert automata.score(languages, truth) == {"accuracy": 1.0, "tv": pytest.approx(0, abs=1e-12)}
    wrong = [~row.allowed / (~row.allowed).sum(1, keepdims=True) for row in languages]
    assert automata.score(languages, wrong) == {"accuracy": 0.0, "tv": pytest.approx(1)}
    later = [p.copy() for p in truth]
    for p, row in zip(later, languages):
        p[row.word == 0] = 0  # the first word is not scored
    assert automata.score(languages, later)["accuracy"] == 1.0


def test_ngrams_count_what_came_before():
    a, b = automata.FIRST_SYMBOL, automata.FIRST_SYMBOL + 1
    row = automata.Sequence(np.array([a, b, a, a, b]), np.ones((5, 18), bool), np.zeros(5, int))
    one, two = automata.ngram(row, 1), automata.ngram(row, 2)
    np.testing.assert_allclose(one[2][:2], [2 / 3, 1 / 3])
    np.testing.assert_allclose(two[2][:2], [0, 1])  # after a came b
    np.testing.assert_allclose(two[3][:2], [0.5, 0.5])  # after a: b, a
    np.testing.assert_allclose(two[0][:2], [1, 0])  # nothing followed a so far: back off to the 1-gram


@pytest.mark.parametrize("d_model", [64, 128])
def test_the_baseline_is_of_equal_size(d_model):
    sizes = {"vocab_size": 20, "d_model": d_model, "num_heads": 4, "num_layers": 2}
    mosaics = MemoryMosaics(MosaicsConfig(**sizes, persistent_slots=7 * d_model // 2))
    transformer = Transformer(TransformerConfig(**sizes))
    count = [sum(p.numel() for p in m.parameters()) for m in (mosaics, transformer)]
    assert count[0] - count[1] == 2 * 7 * 4  # the scalars


def test_the_baseline_is_causal_and_its_rotary_positions_are_relative():
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(13, 32, 2, 2)).double().eval()
    tokens = torch.randint(0, 13, (1, 12))
    base = model(tokens)
    changed = tokens.clone()
    changed[0, 5] = (tokens[0, 5] + 1) % 13
    assert (model(changed) != base).any(-1)[0].nonzero().flatten().tolist() == list(range(5, 12))
    from retro_model.apps.mosaics.transformer import rotated

    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64).expand(2, 1, 12, 1, 16)
    products = torch.einsum("bnhd,bmhd->nm", rotated(q), rotated(k))
    for lag in range(3):
        torch.testing.assert_close(products.diagonal(lag), products[0, lag].expand(12 - lag))


def test_learned_positions_end():
    model = Transformer(TransformerConfig(13, 32, 2, 1, positions="learned", max_len=8))
    with pytest.raises(ValueError, match=r"tokens: expected N <= max_len = 8.*; got N=9"):
        model(torch.zeros(1, 9, dtype=torch.int64))


def test_a_bounded_memory_that_forgets_nothing_loses_nothing():
    plan = text.Plan(context=16, longest=48, d_model=32, num_heads=2, num_layers=1)
    model, tokens = text.make(text.MOSAICS, plan, 40).double(), torch.randint(0, 40, (2, 48))
    whole = text.losses(model, tokens)[:, plan.context - 1 :].mean()
    for capacity, evict in ((None, "oldest"), (47, "least_read")):
        losses = text.bounded(model, tokens, plan, capacity, evict)
        assert losses["nats"] == pytest.approx(float(whole), rel=tolerances.FLOOR[torch.float64] * 100)
    assert text.bounded(model, tokens, plan, 4, "oldest")["nats"] != pytest.approx(float(whole), rel=1e-6)


def test_books_are_told_apart_and_some_are_held_out(monkeypatch):
    books = ["Ge", *corpora.HELD_OUT_BOOKS, "2Jn"]
    printed = "".join(
        f"{book}{chapter}:{verse} {book} says {verse}.\n" for book in books for chapter in (1, 12) for verse in (1, 2)
    )
    monkeypatch.setattr(corpora.shutil, "which", lambda name: name)
    monkeypatch.setattr(corpora.subprocess, "run", lambda *args, **options: argparse.Namespace(stdout=printed))
    documents, held_out = corpora.kjv()
    assert documents == [f"{book} says 1.\n{book} says 2.\n" * 2 for book in ("Ge", "2Jn")]
    assert len(held_out) == 6 and held_out[-1].startswith("1Jn says 1.")
    monkeypatch.setattr(corpora.shutil, "which", lambda name: None)
    with pytest.raises(FileNotFoundError, match="apt-get install bible-kjv"):
        corpora.kjv()


def test_modules_of_the_standard_library_are_held_out_by_package():
    documents, held_out = corpora.stdlib()
    assert len(held_out) == len(VALIDATION) and not set(held_out) & set(documents)
