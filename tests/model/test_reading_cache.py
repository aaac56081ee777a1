"""Scoring reads the neighbours of overlapping windows once. A copy of a model has an empty cache."""

import contextlib
import copy

import numpy as np
import pytest
import torch

from retro_model import evaluation
from tests.model import toys
from tests.model.test_own_attention import batch, count_reads, own


def test_scores_are_the_same_and_the_neighbours_of_overlapping_windows_are_read_once():
    _, model = own("Llama")
    found = np.random.default_rng(0).integers(0, 30, (12, 2))
    store, database = toys.random_store(12, 4), toys.Database(toys.random_store(31, 4, seed=1))
    sizes, reads = {"window": 12, "stride": 4, "batch_size": 1}, count_reads(model)
    scores = evaluation.score(model, store, found, database, **sizes)
    once = sum(reads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "keeping", lambda _: contextlib.nullcontext())
        apart = evaluation.score(model, store, found, database, **sizes)
    np.testing.assert_allclose(scores.nats, apart.nats, rtol=1e-12)
    assert once <= len(np.unique(found)) < sum(reads) - once
    assert not model.keeps


@torch.no_grad()
def test_a_copy_has_a_cache_of_its_own():
    _, model = own("Llama")
    tokens, neighbours, mask = batch()
    with model.keeping() as kept:
        want = model(tokens, neighbours, neighbour_mask=mask)
        copied = copy.deepcopy(model)
        assert len(kept) and not len(copied._kept)
        assert torch.equal(copied(tokens, neighbours, neighbour_mask=mask), want)
