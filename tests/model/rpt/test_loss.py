"""LambdaRank against its definition and its worked example."""

import numpy as np
import pytest
import torch

from retro_model.rpt import lambda_rank
from tests.model.rpt import naive


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


def test_refuses():
    with pytest.raises(ValueError, match=r"target_scores: expected the scores' shape .* \[4\]; got \[3\]"):
        lambda_rank(torch.zeros(4), torch.zeros(3), 1.0)
