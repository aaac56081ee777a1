"""Whole documents, metrics of retrieval by hand, the share of retrieval."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from retro_model.evaluation import rpt as evaluation
from retro_model.rpt.supervision import stack, supervise
from tests.model.rpt import tiny

NONE = -math.inf


@torch.no_grad()
@pytest.mark.parametrize("block", [5, 16, 100])
def test_a_document_costs_the_same_whatever_the_block(block):
    model, tokens = tiny.model().train(), tiny.tokens(61, batch=1)[0]
    document = evaluation.encode(model, tokens, block=block)
    assert model.training
    logits = model.eval()(tokens[None])[0]
    want = F.cross_entropy(logits[:-1], tokens[1:], reduction="none")
    torch.testing.assert_close(document.nats[1:], want)
    assert torch.equal(document.index, model.retrieve(tokens[None])[1][0])
    assert evaluation.perplexity([document.nats]) == pytest.approx(math.exp(want.mean()))
    index = torch.cat([torch.full((3, 2), -1), torch.zeros(12, 2, dtype=torch.int64)])
    other = evaluation.encode(model, tokens, block=block, index=index)
    assert torch.equal(other.index, index)
    logits = model(tokens[None], index=index[None])[0]
    torch.testing.assert_close(other.nats[1:], F.cross_entropy(logits[:-1], tokens[1:], reduction="none"))
    assert evaluation.encode(model, tokens, block=block, retrieval=False).index is None


def test_random_chunks_are_those_that_the_retriever_might_choose():
    index, excluded = torch.zeros(3, 9, 2, dtype=torch.int64), 2
    drawn = [evaluation.random_chunks(index, excluded, seed) for seed in range(60)]
    for chunk in range(9):
        there = {int(j) for one in drawn for j in one[:, chunk].ravel()}
        assert there - {-1} == set(range(chunk - excluded + 1)) and (-1 in there) == (chunk < excluded + 1)
    assert all((one[..., 0] != one[..., 1])[one[..., 0] >= 0].all() for one in drawn)
    assert torch.equal(evaluation.random_chunks(index, excluded, 7), drawn[7]) and not torch.equal(drawn[0], drawn[1])
    short = evaluation.random_chunks(index[:, :3].expand(3, 3, 2).repeat(1, 1, 3), 1)
    assert short.shape == (3, 3, 6) and short[:, :, 2:].eq(-1).all()
    assert short[:, 2, :2].sort().values.eq(torch.arange(2)).all()


def test_ranking_by_hand():
    scores = torch.tensor([[NONE] * 4, [1.0, NONE, NONE, NONE], [3, 2, 1, NONE], [1, 2, 3, 4]])
    targets = torch.tensor([[NONE] * 4, [-0.5, NONE, NONE, NONE], [0.5, -1, 1.0, NONE], [NONE] * 4])
    got = evaluation.ranking(scores, targets, precision_at=2, recall_at=2, ndcg_at=3)
    gain = [2**0.5 - 1, 0, 1]
    ndcg = (gain[0] + gain[2] / math.log2(4)) / (gain[2] + gain[0] / math.log2(3))
    shares = {"precision@2": 0.25, "recall@2": 0.5, "ndcg@3": pytest.approx(ndcg)}
    assert got == shares | {"queries": 2, "with_positive": 1}


def test_the_right_order_is_best_and_any_other_is_not():
    random = np.random.default_rng(0)
    targets = torch.tensor(random.normal(0, 1, (12, 12))).masked_fill(torch.ones(12, 12).triu().bool(), NONE)
    assert evaluation.ranking(targets, targets)["ndcg@20"] == pytest.approx(1)
    assert evaluation.ranking(-targets.masked_fill(targets == NONE, 9), targets)["ndcg@20"] < 0.95


@pytest.mark.parametrize("taught", [True, False])
def test_the_share_of_retrieval(taught):
    model, tokens = tiny.model().train(), tiny.tokens(48)
    lessons = stack([supervise(t, None, chunk_len=4, excluded_chunks=2) for t in tokens]) if taught else None
    share = evaluation.retrieval_share(model, tokens, lessons, rounds=1)
    assert list(share) == ["forward", "step", "decode"] and all(value < 1 for value in share.values())
    assert model.training and all(p.grad is None for p in model.parameters())
