"""Suffixes, answers and kNN-LM against one row at a time and against the definition in NumPy."""

import itertools
import math

import numpy as np
import pytest
import torch

from retro_model import evaluation
from retro_model.evaluation import knn_lm
from retro_model.evaluation.knn_lm import (
    TokenDatastore,
    alpha_of_distances,
    best_of_others,
    score_knn,
    score_knn_settings,
)
from retro_model.evaluation.question_answering import aligned_prompt, passage_neighbours, same_for_every_chunk
from retro_model.evaluation.suffixes import score_suffixes
from tests.model import tiny
from tests.model.data import store_of
from tests.refusals import refused

M, R, V = 4, 6, tiny.VOCAB


def retrieve(chunks):
    """Return two neighbours that depend on the chunk."""
    first = (chunks.sum(1, keepdim=True) + torch.arange(R)) % V
    return torch.stack([first, (first + 7) % V], 1), None


def alone(model, context, suffix, pad=0):
    """Score one row alone, without padding: the definition."""
    row = torch.tensor([[0] * pad + list(context) + list(suffix)])
    neighbours = None
    if chunks := row.shape[1] // M:
        neighbours = retrieve(row[0, : chunks * M].view(chunks, M))[0][None]
    logs = torch.log_softmax(model(row, neighbours)[0], -1)
    at = range(row.shape[1] - len(suffix), row.shape[1])
    nats = -sum(logs[i - 1, row[0, i]].item() for i in at)
    return nats, all(int(logs[i - 1].argmax()) == int(row[0, i]) for i in at)


def prepared():
    g = np.random.default_rng(0)
    contexts = [g.integers(1, V, n).tolist() for n in (1, 9, 4, 17, 2)]
    suffixes = [g.integers(1, V, n).tolist() for n in (3, 1, 5, 2, 6)]
    return contexts, suffixes


@pytest.mark.parametrize("align", [False, True])
def test_each_suffix_costs_what_it_costs_alone(align):
    model = tiny.model(dtype=torch.float64)
    contexts, suffixes = prepared()
    model.train()
    got = score_suffixes(model, contexts, suffixes, retrieve=retrieve, align=align, batch_size=3)
    assert model.training
    model.eval()
    for suffix, c, s in zip(got, contexts, suffixes):
        nats, greedy = alone(model, c, s, -len(c) % M if align else 0)
        assert suffix.nats == pytest.approx(nats, rel=1e-5) and suffix.greedy == greedy and suffix.tokens == len(s)
    off = score_suffixes(model, contexts, suffixes, align=align)
    assert [o.nats for o in off] != pytest.approx([s.nats for s in got])


def test_greedy_is_what_greedy_sampling_gives():
    model = tiny.model()
    context = prepared()[0][3]
    row = torch.tensor([context])
    for _ in range(3):
        row = torch.cat([row, model(row)[:, -1:].argmax(-1)], 1)
    likeliest = row[0, len(context) :].tolist()
    other = [*likeliest[:2], (likeliest[2] + 1) % V]
    assert [s.greedy for s in score_suffixes(model, [context] * 2, [likeliest, other])] == [True, False]


def test_a_long_context_loses_its_beginning():
    model = tiny.model(dtype=torch.float64)
    context, suffix = np.arange(100) % V, [3, 4, 5]
    for align, kept in ((False, 61), (True, 60)):
        [got] = score_suffixes(model, [context], [suffix], retrieve=retrieve, align=align)
        assert got.nats == pytest.approx(alone(model, context[-kept:].tolist(), suffix)[0], rel=1e-5)
    refused("suffixes: expected at most 60 tokens each", score_suffixes, model, [context], [[1] * 61], align=True)
    refused("contexts, suffixes: expected as many of each, none empty", score_suffixes, model, [context], [[]])


def test_passages_become_neighbours():
    """A title and its text, cut and masked; equal for every chunk of a prompt that ends with one."""
    encode = lambda text: [ord(c) % V for c in text]  # noqa: E731
    neighbours, mask = passage_neighbours([("a", "b"), ("long", "x" * 50)], encode, 24, k=3)
    whole = "title: a, source: b"
    assert neighbours[0, : len(whole)].tolist() == encode(whole) and mask.sum(1).tolist() == [len(whole), 24, 0]
    retrieved, there = same_for_every_chunk(neighbours, mask)(torch.zeros(5, M, dtype=torch.int64))
    assert retrieved.shape == (5, 3, 24) and torch.equal(retrieved[4], neighbours) and torch.equal(there[0], mask)
    assert aligned_prompt([5, 6, 7, 8, 9], 4) == [0, 0, 0, 5, 6, 7, 8, 9] and aligned_prompt([1] * 8, 4) == [1] * 8


WINDOWS = {"window": 12, "stride": 4}


@pytest.fixture(scope="module")
def remembered(tmp_path_factory):
    """Return a model, its datastore of four documents, their store, and a store of the same in another order."""
    g, folder, model = np.random.default_rng(0), tmp_path_factory.mktemp("stores"), tiny.model()
    documents = [[1, *g.integers(2, V, n)] for n in (18, 7, 11)] + [g.integers(2, V, 9)]
    train = store_of(folder / "train", documents[::-1], chunk_len=M, vocab_size=V)
    new = store_of(folder / "new", documents, chunk_len=M, vocab_size=V)
    return model, TokenDatastore.build(model, train, **WINDOWS), train, new


def test_knn_lm_is_its_definition(remembered):
    model, datastore, train, new = remembered
    assert len(datastore.keys) == len(datastore.values) == train.num_tokens - 4
    options = WINDOWS | {"batch_size": 2}
    plain = evaluation.score(model, new, **options)
    none = score_knn(model, datastore, new, mixture=0.0, k=3, **options)
    np.testing.assert_allclose(none.nats, plain.nats, rtol=1e-5)
    assert np.array_equal(none.tokens, plain.tokens) and np.array_equal(none.bytes, plain.bytes)
    alpha, mixture, k = 0.1, 0.4, 3
    got = score_knn(model, datastore, new, mixture=mixture, alpha=alpha, k=k, documents=[1], **options)
    tokens = torch.from_numpy(new.document_tokens(1))[None]  # one window holds it
    hidden = model.activations(tokens)[0].detach()
    own = torch.softmax(model.readout(hidden), -1).detach().numpy()
    keys, values, total = datastore.keys.numpy(), datastore.values.numpy(), 0.0
    for t in range(1, tokens.shape[1]):
        away = ((keys - hidden[t - 1].numpy()) ** 2).sum(1)
        nearest = np.argsort(away)[:k]
        weights = np.exp(-alpha * away[nearest])
        p = (weights * (values[nearest] == int(tokens[0, t]))).sum() / weights.sum()
        total -= math.log(mixture * p + (1 - mixture) * own[t - 1, int(tokens[0, t])])
    assert got.nats.sum() == pytest.approx(total, rel=1e-4) and got.tokens.sum() == tokens.shape[1] - 1


def test_each_document_is_scored_by_what_is_best_on_the_others(remembered):
    model, datastore, _, new = remembered
    options, settings = WINDOWS | {"k": 3}, [(0.0, 1.0), (0.2, 0.1), (0.9, 1e4)]
    scores = score_knn_settings(model, datastore, new, settings, **options)
    for (mixture, alpha), got in zip(settings, scores):
        alone = score_knn(model, datastore, new, mixture=mixture, alpha=alpha, **options)
        np.testing.assert_allclose(got.nats, alone.nats)
    scores[1].nats[:] = scores[0].nats + 0.1  # all remembered, so the third is best; but for the last document
    scores[2].nats[new.chunk_doc == 3] += 1e3
    found = best_of_others(scores, new)
    want = np.where(new.chunk_doc == 3, scores[2].nats, scores[0].nats)
    assert np.array_equal(found.nats, want) and np.array_equal(found.tokens, scores[0].tokens)
    alpha = alpha_of_distances(datastore, 3)
    every = list(itertools.product(knn_lm.MIXTURES, (alpha * s for s in knn_lm.SHARPNESS)))
    want = best_of_others(score_knn_settings(model, datastore, new, every, **options), new)
    assert np.array_equal(knn_lm.score_tuned(model, datastore, new, **options).nats, want.nats)


def test_knn_lm_remembers(remembered):
    """For a text in the datastore, each context's nearest is the context itself."""
    model, datastore, _, new = remembered
    options = WINDOWS
    seen = score_knn(model, datastore, new, mixture=0.9, alpha=1e4, k=2, documents=[3], **options)
    keys = torch.tensor([[0.0], [1.0], [2.0], [4.0]])  # squared distances to the 1st and 2nd: 1 4, 1 1, 1 4, 4 9
    assert alpha_of_distances(TokenDatastore(keys, torch.zeros(4)), k=2) == pytest.approx(1 / 3)
    per_token = (seen.nats.sum() - math.log(V)) / (seen.tokens.sum() - 1)  # its first token has no context
    assert per_token < -math.log(0.9) + 0.01
    control = datastore.shuffled()  # the same contexts and tokens, each token elsewhere
    assert control.keys is datastore.keys and not torch.equal(control.values, datastore.values)
    assert torch.equal(control.values.sort().values, datastore.values.sort().values)
    lost = score_knn(model, control, new, mixture=0.9, alpha=1e4, k=2, documents=[3], **options)
    assert lost.nats.sum() > seen.nats.sum() + 10
    refused("mixture: expected a share", score_knn, model, datastore, new, mixture=1.0, **options)
    refused("k: expected from 1 to", score_knn, model, datastore, new, k=10**6, **options)
