"""Hugging Face decoders in `evaluation`: alone, with passages in context, under kNN-LM, with random neighbours.

The definitions are written out here, token by token.
"""

import math

import numpy as np
import pytest
import torch

from retro_model import evaluation
from retro_model.evaluation.knn_lm import TokenDatastore, score_knn
from retro_model.retrofit import retrofit
from tests.model import decoders, toys

transformers = pytest.importorskip("transformers")
V, M = 23, 4
ENCODER = dict(encoder_layers=1, encoder_d_model=16, encoder_d_ff=16, encoder_heads=1, encoder_head_dim=16)


def llama(seed=0):
    torch.manual_seed(seed)
    return decoders.llama(V, 2, d_ff=24).double().train()


def gpt2(seed=0):
    torch.manual_seed(seed)
    return decoders.gpt2(V, 2).double()


def texts():
    g = np.random.default_rng(3)
    store = toys.store([g.integers(2, V, n).tolist() for n in (18, 7, 11, 4)], M)
    others = toys.store([g.integers(2, V, n).tolist() for n in (13, 22)], M)
    neighbours = g.integers(-1, len(others.lengths), (len(store.lengths), 3))
    return store, toys.Database(others), neighbours


def nats(model, context, token):
    """Return -log p(token | context) by the decoder itself."""
    training = model.training
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor([context])).logits[0, -1]
    model.train(training)
    return -float(torch.log_softmax(logits, -1)[token])


def real(store, row):
    return [int(t) for t in store.tokens[row][: store.lengths[row]]]


def definition(model, store, before):
    """Return the nats of each chunk, token by token; before(rows, tokens, at): what precedes a document's token."""
    costs = np.zeros(len(store.lengths))
    for document in range(4):
        rows = np.flatnonzero(store.chunk_doc == document)
        tokens = [t for row in rows for t in real(store, row)]
        for at, token in enumerate(tokens):
            costs[rows[at // M]] += nats(model, before(rows, tokens, at), token) if at else math.log(V)
    return costs


@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_decoder_alone_is_scored_as_it_predicts(make):
    store, _, _ = texts()
    model = make()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    mode = model.training
    got = evaluation.score(model, store, window=8, stride=4, batch_size=3)
    assert model.training is mode and all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    # windows of two chunks, every chunk
    want = definition(model, store, lambda rows, tokens, at: tokens[max(0, at // M - 1) * M : at])
    np.testing.assert_allclose(got.nats, want, rtol=1e-9)
    assert got.tokens.tolist() == store.lengths.tolist()


def test_a_decoder_whose_readout_is_capped_is_scored_by_its_own_logits():
    """Its logits are not a product of its last states."""
    store, _, _ = texts()

    class Capped(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits.mul(50).tanh()
            return out

    model = Capped(llama().config).double()
    got = evaluation.score(model, store, window=32, stride=16, documents=[3])
    tokens = real(store, -1)
    want = math.log(V) + sum(nats(model, tokens[:at], tokens[at]) for at in range(1, 4))
    assert got.nats.sum() == pytest.approx(want, rel=1e-9)
    with pytest.raises(ValueError, match="model: expected a decoder whose logits are a product"):
        TokenDatastore.build(model, store, window=8, stride=4)


def test_neighbours_are_refused_by_a_decoder_that_takes_none():
    store, database, neighbours = texts()
    with pytest.raises(ValueError, match="neighbours: expected None for a decoder without retrieval"):
        evaluation.score(llama(), store, neighbours, database, window=8, stride=4)


@pytest.mark.parametrize("k,stride", [(1, 4), (2, 4), (2, 8)])
def test_in_context_retrieval_is_its_definition(k, stride):
    """Before every `stride` tokens: the neighbours of the preceding chunk, then the last `window` tokens."""
    store, database, neighbours = texts()
    model, window = llama(), 12
    got = evaluation.score_in_context(
        model, store, neighbours, database, window=window, stride=stride, k=k, batch_size=3
    )
    assert (got.nats > 0).all() and (neighbours[:, :k] < 0).any()
    values, mask = database.values(neighbours)

    def before(rows, tokens, at):
        begin = at // stride * stride
        end, row = min(begin + stride, len(rows) * M), rows[begin // M - 1]
        passages = [int(t) for t in values[row, :k][mask[row, :k]]] if begin else []
        return passages + tokens[max(0, end - window) : at]

    np.testing.assert_allclose(got.nats, definition(model, store, before), rtol=1e-9)
    assert got.tokens.tolist() == store.lengths.tolist() and got.bytes.tolist() == store.chunk_bytes.tolist()


def test_in_context_retrieval_without_neighbours_is_the_decoder_alone():
    store, database, neighbours = texts()
    none, model = np.full_like(neighbours, -1), gpt2()
    got = evaluation.score_in_context(model, store, none, database, window=12, stride=4, documents=[0, 2])
    alone = evaluation.score(model, store, window=12, stride=4, documents=[0, 2])
    np.testing.assert_allclose(got.nats, alone.nats, rtol=1e-9)
    assert np.array_equal(got.tokens, alone.tokens) and np.array_equal(got.bytes, alone.bytes)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"k": 0}, "k: expected from 1 to the neighbours' K=3; got 0"),
        ({"k": 4}, "k: expected from 1 to the neighbours' K=3; got 4"),
        ({"stride": 6}, "stride: expected a positive multiple"),
        ({"window": 4}, "stride: expected less than window"),
        ({"window": 60}, "window: expected at most 40 tokens, so that 24 of 3 neighbours fit before it"),
        ({"documents": [4]}, "documents: expected ordinals from 0 to 3"),
    ],
)
def test_in_context_retrieval_names_what_is_wrong(change, message):
    store, database, neighbours = texts()
    options = {"window": 12, "stride": 4, "k": 3} | change
    with pytest.raises(ValueError, match=message):
        evaluation.score_in_context(llama(), store, neighbours, database, **options)
    with pytest.raises(ValueError, match="k: expected from 1 to the neighbours' K=0; got 1"):
        evaluation.score_in_context(llama(), store, None, None, window=12, stride=4, k=1)


def test_random_neighbours_are_chunks_of_the_database_and_nothing_else_changes():
    _, database, neighbours = texts()
    count = len(database)
    got = evaluation.random_neighbours(neighbours, database)
    assert got.shape == neighbours.shape and got.dtype == np.int64
    assert np.array_equal(got < 0, neighbours < 0)  # as many for every chunk
    assert got.max() < count and len(np.unique(got[got >= 0])) > count // 2
    assert np.array_equal(got, evaluation.random_neighbours(neighbours, database, seed=0))
    assert not np.array_equal(got, evaluation.random_neighbours(neighbours, database, seed=1))
    many = evaluation.random_neighbours(np.zeros((4000, 3), np.int64), database)
    counts = np.bincount(many.ravel(), minlength=count)
    assert counts.min() > 0.8 * many.size / count and counts.max() < 1.2 * many.size / count


def test_knn_lm_of_a_decoder_and_of_its_retrofit():
    """Both use the decoder's own last states; the retrofit has retrieval off."""
    store, database, _ = texts()
    model, options = llama(), {"window": 8, "stride": 4}
    datastore = TokenDatastore.build(model, database.rows, **options)
    with torch.no_grad():
        tokens = torch.tensor([real(database.rows, 0) + real(database.rows, 1)])
        states = model.eval().model(tokens).last_hidden_state[0]
    torch.testing.assert_close(datastore.keys[:7].double(), states[:7], rtol=1e-5, atol=1e-6)
    assert datastore.values[:7].tolist() == tokens[0, 1:].tolist()
    got = score_knn(model, datastore, store, mixture=0.3, alpha=0.2, k=4, **options)
    none = score_knn(model, datastore, store, mixture=0.0, k=4, **options)
    np.testing.assert_allclose(none.nats, evaluation.score(model, store, **options).nats, rtol=1e-6)
    whole = retrofit(model, cca_layers=(2,), chunk_len=M, cca_output="fresh", **ENCODER)
    again = score_knn(
        whole, TokenDatastore.build(whole, database.rows, **options), store, mixture=0.3, alpha=0.2, k=4, **options
    )
    np.testing.assert_allclose(again.nats, got.nats, rtol=1e-5)


def test_a_retrofit_of_the_hugging_face_library_is_scored_as_the_one_within():
    from retro_model.integrations.huggingface import RetrofitForCausalLM

    store, database, neighbours = texts()

    whole = RetrofitForCausalLM.from_decoder(
        llama().float(), cca_layers=(2,), chunk_len=M, cca_output="fresh", **ENCODER
    )
    options = {"window": 8, "stride": 4}
    for given in ((), (neighbours, database)):
        got, want = (evaluation.score(m, store, *given, **options).nats for m in (whole, whole.model))
        np.testing.assert_array_equal(got, want)
    alone = evaluation.score(whole.model.decoder, store, **options)
    np.testing.assert_allclose(evaluation.score(whole, store, **options).nats, alone.nats, rtol=1e-5)
