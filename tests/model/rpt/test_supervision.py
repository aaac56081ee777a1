"""LambdaRank and BM25 against their formulas, target scores against a language model, stored builds, schedules."""

import functools
import math

import numpy as np
import pytest
import torch

from retro_model.data.text import bm25_scores
from retro_model.rpt import OWN, lambda_rank, supervision
from retro_model.rpt.supervision import Supervision, bm25_index, build_supervision, reference_scores, supervise
from retro_model.training import Settings
from retro_model.training import rpt as training
from retro_model.training.adabelief import AdaBelief
from tests.model.rpt import naive, tiny
from tests.refusals import refused


def brute_bm25(chunks, queries, k1=1.5, b=0.75):
    n, mean = len(chunks), np.mean([len(c) for c in chunks])
    holders = {t: sum(t in c for c in chunks) for c in chunks for t in c}
    idf = {t: math.log((n - f + 0.5) / (f + 0.5)) for t, f in holders.items()}
    low = 0.25 * np.mean(list(idf.values()))
    idf = {t: v if v >= 0 else low for t, v in idf.items()}
    scores = np.zeros((len(queries), n))
    for q, query in enumerate(queries):
        for c, chunk in enumerate(chunks):
            for token in query:
                tf = chunk.count(token)
                scores[q, c] += idf.get(token, 0) * tf * (k1 + 1) / (tf + k1 * (1 - b + b * len(chunk) / mean))
    return scores


@pytest.mark.parametrize("vocabulary", [6, 60, 5000])
def test_bm25_equals_its_formula(vocabulary):
    random = np.random.default_rng(0)
    chunks, queries = random.integers(0, vocabulary, (40, 9)), random.integers(0, vocabulary, (33, 14))
    lengths, sizes = random.integers(1, 10, 40), random.integers(0, 15, 33)
    want = brute_bm25(
        [c[:n].tolist() for c, n in zip(chunks, lengths)], [q[:n].tolist() for q, n in zip(queries, sizes)]
    )
    got = bm25_scores(chunks, queries, lengths=lengths, query_lengths=sizes)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    got, want = bm25_scores(chunks, queries, k1=0.9, b=0.4), brute_bm25(chunks.tolist(), queries.tolist(), 0.9, 0.4)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_bm25_refuses_and_takes_nothing():
    assert bm25_scores(np.zeros((0, 4), int), [[1, 2]]).shape == (1, 0)
    refused("query_lengths: expected", bm25_scores, [[1, 2]], [[1, 2]], query_lengths=[3])
    refused("queries: expected integers", bm25_scores, [[1, 2]], [[1.5, 2]], error=TypeError)


def test_supervision_refuses_what_would_be_empty_or_show_the_future():
    options = {"chunk_len": 4, "excluded_chunks": 1, "candidates": 2}
    refused(r"tokens: expected \[N\]", supervise, tiny.tokens(20), None, **options)
    for name in options:
        refused(f"{name}: expected an int >= 1; got 0", supervise, tiny.tokens(20)[0], None, **options | {name: 0})


@pytest.mark.parametrize("with_target", [True, False])
def test_candidates_are_the_best_of_the_retrievable(with_target):
    chunks = np.random.default_rng(1).integers(0, 12, (30, 5))
    index, scores = bm25_index(chunks, 4, excluded_chunks=3, with_target=with_target)
    rows = chunks.tolist()
    queries = [rows[i] + (rows[i + 1] if with_target and i < 29 else []) for i in range(30)]
    want = brute_bm25(rows, queries)
    for i in range(30):
        there = max(0, i - 2)
        assert (index[i] >= 0).sum() == min(4, there) and (index[i] < there).all()
        best = np.sort(want[i, :there])[::-1][:4]
        np.testing.assert_allclose(scores[i, : len(best)], best, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(want[i, index[i, : len(best)]], best, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["ours", "transformers"])
def test_target_scores_are_differences_of_mean_log_likelihoods(kind):
    """By real models, called on one context at a time; the library's own loss for its model."""
    if kind == "ours":
        lm = tiny.model(cca_layers=(), retriever=False)
    else:
        lm = pytest.importorskip("tests.model.decoders").gpt2(tiny.VOCAB, 1).eval()
    chunks = tiny.tokens(44, batch=1)[0].view(11, 4)
    candidates = torch.tensor(bm25_index(chunks.numpy(), 3, excluded_chunks=1, with_target=True)[0])
    got = reference_scores(lm, chunks, candidates, batch_size=7)
    lessons = supervise(chunks.flatten(), lm, chunk_len=4, excluded_chunks=1, candidates=3)
    assert torch.equal(lessons.candidates, candidates) and torch.allclose(lessons.scores.to(got.dtype), got)

    def likelihood(*rows):
        tokens = torch.cat([chunks[r] for r in rows])[None]
        if kind == "transformers":
            return -lm(tokens, labels=tokens.index_fill(1, torch.arange(tokens.shape[1] - 4), -100)).loss.item()
        logs = lm(tokens)[0].log_softmax(-1)
        return torch.stack([logs[-5 + t, tokens[0, -4 + t]] for t in range(4)]).mean().item()

    for i in range(11):
        for at, j in enumerate(candidates[i].tolist()):
            if j < 0 or i == 10:
                assert got[i, at] == -torch.inf
            else:
                near = likelihood(*range(max(0, i - 2), i + 2))
                assert got[i, at].item() == pytest.approx(likelihood(j, j + 1, i, i + 1) - near, abs=1e-5)


def test_the_retriever_has_a_learning_rate_of_its_own():
    model = tiny.model()
    lessons = training.Lessons(10, retriever_lr=0.5)
    optimizer = training.make_optimizer(model, Settings(10, warmup_steps=0), lessons)
    scale = {id(p): group["lr_scale"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        own = name.startswith(("retriever.query", "retriever.key"))
        assert scale.pop(id(parameter)) == (0.5 if own else 1.0), name
    assert not scale


def test_dense_and_teacher():
    candidates = torch.tensor([[[-1, -1, -1], [0, -1, -1], [1, 0, -1], [2, 0, 1]]])
    scores = torch.tensor(
        [[[-torch.inf] * 3, [-0.5, -torch.inf, -torch.inf], [0.1, 0.4, -torch.inf], [0.3, -0.2, 0.7]]]
    )
    lessons = Supervision(candidates, scores)
    dense = lessons.dense()[0]
    assert dense.shape == (4, 4) and dense[3].tolist() == pytest.approx([-0.2, 0.7, 0.3, -math.inf])
    assert dense[0].tolist() == [-math.inf] * 4
    assert lessons.teacher(2)[0].tolist() == [[-1, -1], [-1, -1], [0, 1], [1, 2]]
    assert lessons.teacher(4)[0, 3].tolist() == [1, 2, -1, -1]
    for parts in ([], [lessons, Supervision(candidates[:, :3], scores[:, :3])]):
        refused(r"parts: expected supervisions of one shape \[L,C\]; got ", supervision.stack, parts)


def test_lessons_from_bm25_alone():
    lessons = supervise(tiny.tokens(60, batch=1)[0], None, chunk_len=4, excluded_chunks=2, candidates=5)
    there = lessons.scores > -torch.inf
    assert (lessons.scores[there] > 0).all() and lessons.scores[there].max() == 1 and not there[-1].any()
    assert (lessons.candidates[there] >= 0).all()


def test_a_stored_build_continues_where_it_was_killed(tmp_path):
    sequences = [np.arange(n) % 23 for n in (40, 25, 60)]
    sizes = {"chunk_len": 4, "excluded_chunks": 2, "candidates": 3}
    lm, asked = tiny.model(cca_layers=(), retriever=False), []

    def counted(tokens):
        asked.append(len(tokens))
        return lm(tokens)

    want = build_supervision(tmp_path / "whole", sequences, counted, name="tiny", **sizes)
    assert [len(s.candidates) for s in want] == [10, 6, 15]
    calls, asked[:] = len(asked), []

    def dies(tokens):
        if len(asked) == calls // 2:
            raise KeyboardInterrupt
        return counted(tokens)

    with pytest.raises(KeyboardInterrupt):
        build_supervision(tmp_path / "killed", sequences, dies, name="tiny", **sizes)
    got = build_supervision(tmp_path / "killed", sequences, counted, name="tiny", **sizes)
    for a, b, sequence in zip(got, want, sequences):
        direct = supervise(torch.from_numpy(sequence), lm, **sizes)
        for x, y, z in zip(a, b, direct):
            assert torch.equal(x, y) and torch.allclose(x.double(), z.double())
    before = len(asked)
    build_supervision(tmp_path / "killed", sequences, counted, name="tiny", **sizes)
    assert len(asked) == before  # nothing is scored again
    with pytest.raises(ValueError, match="built with name='tiny'; now name='other'"):
        build_supervision(tmp_path / "killed", sequences, counted, name="other", **sizes)
    file = tmp_path / "killed" / supervision.SCORE_FILE
    file.write_bytes(file.read_bytes()[:-1])
    refused("truncated or corrupt", build_supervision, tmp_path / "killed", sequences, counted, name="tiny", **sizes)


def test_schedules():
    refused("steps: expected an int; got float", training.Lessons, 2.5, error=TypeError)
    lessons = training.Lessons(steps=1000, alpha_ret=1e-9, alpha_steps=100, tau=4.0)
    assert [lessons.weight(s) for s in (0, 50, 100, 500)] == [0, 5e-10, 1e-9, 1e-9]
    assert lessons.margin(0) == 1 and lessons.margin(999) == 4
    assert [lessons.teacher_share(s) for s in (0, 450, 900)] == pytest.approx([1, 0.5, 0])
    for teacher, share in {"always": 1, "never": 0}.items():
        assert [training.Lessons(10, teacher=teacher).teacher_share(s) for s in (0, 9)] == [share, share]
    knobs = training.Lessons(10, alpha_ret=0.25, retriever_alpha=1.0, alpha_steps=0)
    assert knobs.weight(0) == 1.0 and knobs.trunk_share == 0.25
    with pytest.raises(ValueError, match="alpha_ret: expected a weight from 0 to retriever_alpha"):
        training.Lessons(10, alpha_ret=2.0, retriever_alpha=1.0)
    refused("teacher: expected one of", training.Lessons, 10, teacher="sometimes")
    for name in ("tau", "tau_first", "retriever_lr"):
        for value in (-1.0, math.nan, math.inf):
            refused(f"^{name}: expected", training.Lessons, 10, **{name: value})


def test_the_teacher_gets_whole_sequences():
    lessons = Supervision(torch.zeros(200, 3, 4, dtype=torch.int64), torch.ones(200, 3, 4))
    index = training.neighbours_for(lessons, 2, 0.3, torch.Generator().manual_seed(0))
    own = (index == OWN).flatten(1)
    assert (own.all(1) == own.any(1)).all() and 0.6 < own[:, 0].double().mean() < 0.8


def test_adabelief_by_hand():
    p = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = AdaBelief([p], lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
    m, s, value = np.zeros(2), np.zeros(2), np.array([1.0, -2.0])
    for t, g in enumerate(([0.3, 1e-9], [-0.1, 1e-9], [0.2, 1e-9]), 1):
        p.grad = torch.tensor(g, dtype=torch.float64)
        optimizer.step()
        m = 0.9 * m + 0.1 * np.array(g)
        s = 0.99 * s + 0.01 * (np.array(g) - m) ** 2 + 1e-16
        value = value * (1 - 0.1 * 0.5) - 0.1 * (m / (1 - 0.9**t)) / (np.sqrt(s / (1 - 0.99**t)) + 1e-16)
        np.testing.assert_allclose(p.detach().numpy(), value, rtol=1e-12)


def lessons_for(tokens, model):
    lm = tiny.model(seed=5, cca_layers=(), retriever=False)
    sizes = {"chunk_len": 4, "excluded_chunks": 2, "candidates": 20}
    return supervision.stack([supervise(t, lm, **sizes) for t in tokens])


def test_wq_and_wk_move_at_the_papers_alpha():
    """At 1e-9 with AdaBelief, gradients below epsilon move them like SGD of rate lr * alpha / 1e-7, here at the paper's
    5e-3; the rest of the model moves as without the retrieval loss.
    """
    tokens = tiny.tokens(60, batch=4)
    moved = {}
    for alpha in (1e-9, 0.0):
        model = tiny.model(dtype=torch.float32)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        settings = Settings(12, max_lr=5e-3, warmup_steps=0, weight_decay=1e-8, betas=(0.9, 0.99))
        lessons = training.Lessons(12, alpha_ret=alpha, alpha_steps=0, teacher="always")
        optimizer, taught = training.make_optimizer(model, settings, lessons), lessons_for(tokens, model)
        for step in range(12):
            report = training.train_step(model, optimizer, tokens, taught, settings, lessons, step)
        assert report["pairs"] > 100
        moved[alpha] = {n: (p.detach() - before[n]).norm() / before[n].norm() for n, p in model.named_parameters()}
    for name in ("retriever.query.weight", "retriever.key.weight"):
        assert moved[1e-9][name] > 1e-6 > 1e3 * moved[0.0][name], (name, moved[1e-9][name], moved[0.0][name])
    trunk = [n for n in moved[0.0] if not n.startswith("retriever.")]
    assert all(abs(moved[1e-9][n] - moved[0.0][n]) < 0.05 * moved[0.0][n] for n in trunk)


@pytest.mark.parametrize("kind", training.OPTIMIZERS)
def test_both_losses_fall(kind):
    tokens = tiny.tokens(60, batch=4)
    model = tiny.model(dtype=torch.float32, score_scale=0.2)
    settings = Settings(20, max_lr=5e-3, warmup_steps=2, betas=(0.9, 0.99))
    lessons = training.Lessons(20, alpha_ret=1.0, alpha_steps=0, tau=1.0, retriever_lr=0.5)
    optimizer, taught = training.make_optimizer(model, settings, lessons, kind), lessons_for(tokens, model)
    rates = {g["lr_scale"] for g in optimizer.param_groups}
    assert rates == {0.5, 1.0}
    reports = [training.train_step(model, optimizer, tokens, taught, settings, lessons, step) for step in range(20)]
    step = functools.partial(training.train_step, model, optimizer, tokens, taught, settings, lessons)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="loss_mask: expected at least one token behind"):
        step(19, loss_mask=torch.zeros_like(tokens, dtype=torch.bool))
    for number, expected in ((-1, ">= 0"), (20, "<= 19")):
        refused(f"step: expected an int {expected}; got {number}", step, number)
    assert all(map(torch.equal, before, model.parameters()))
    assert reports[-1]["loss"] < 0.95 * reports[0]["loss"]
    assert reports[-1]["retrieval_loss"] < 0.8 * reports[0]["retrieval_loss"]


def test_the_worked_example():
    scores = torch.tensor([2, 1, 0.5, -1], dtype=torch.float64, requires_grad=True)
    total, pairs = lambda_rank(scores, torch.tensor([-0.2, 0.5, -torch.inf, 1], dtype=torch.float64), 1.0)
    total.backward()
    assert pairs.item() == 5 and total.item() == pytest.approx(2.485757, abs=1e-6)
    assert scores.grad.tolist() == pytest.approx([0.57256, -0.07119, 0.09796, -0.59933], abs=1e-5)


@pytest.mark.parametrize("positives", [None, 6])
def test_equals_the_definition(positives):
    random = np.random.default_rng(0)
    scores, targets = random.normal(0, 2, (3, 9, 14)), random.normal(0.05, 0.5, (3, 9, 14))
    scores[random.random(scores.shape) < 0.3] = -np.inf
    targets[random.random(targets.shape) < 0.5] = -np.inf
    scores[0, 0] = -np.inf  # a chunk with nothing to retrieve
    targets[1, 1] = -np.inf  # one without a target
    targets[2, 2, :6] = 1.0  # equal targets make no pair
    rows = [naive.lambda_rank(s, t, 1.5) for s, t in zip(scores.reshape(-1, 14), targets.reshape(-1, 14))]
    most = max(int(((t > 0) & (s > -np.inf)).sum()) for s, t in zip(scores.reshape(-1, 14), targets.reshape(-1, 14)))
    total, pairs = lambda_rank(
        torch.tensor(scores), torch.tensor(targets), 1.5, positives=positives and max(positives, most)
    )
    assert pairs.item() == sum(p for _, p in rows) > 100
    assert total.item() == pytest.approx(sum(v for v, _ in rows), rel=1e-12)


def test_scored_chunks_alone():
    scores, targets = torch.tensor([2.0, 1, 0.5, -1]), torch.tensor([-0.2, 0.5, -torch.inf, 1])
    assert lambda_rank(scores, targets, 1.0, scored_only=True)[1].item() == 3  # (1,0), (3,0), (3,1)


def test_gradients_are_finite_where_scores_are_not():
    scores = torch.full((4, 4), -torch.inf).tril(-1) + torch.randn(4, 4).triu(0)
    scores = scores.masked_fill(torch.ones(4, 4).triu().bool(), -torch.inf).requires_grad_()
    total, pairs = lambda_rank(scores, torch.full((4, 4), 0.5), 1.0)
    total.backward()
    assert pairs.item() == 0 and scores.grad.isfinite().all()


def test_lambda_rank_refuses():
    with pytest.raises(ValueError, match=r"target_scores: expected the scores' shape .* \[4\]; got \[3\]"):
        lambda_rank(torch.zeros(4), torch.zeros(3), 1.0)
