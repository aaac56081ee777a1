"""Embedders: rows depend on their chunk alone, padding is ignored, TF-IDF's cosine is estimated, BERT is averaged."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from retro_model.data.embed import EncoderEmbedder, HashedTfidf, retokenized
from tests.model.data import random_documents, store_of
from tests.refusals import refused


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return store_of(tmp_path_factory.mktemp("store"), random_documents(40))


@pytest.fixture(scope="module")
def bert():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(vocab_size=200, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    return transformers.BertModel(transformers.BertConfig(**sizes), add_pooling_layer=False).eval()


def embedders(store, bert):
    return [HashedTfidf(64).fit(store), EncoderEmbedder(bert, batch=16)]


@pytest.mark.parametrize("which", range(2))
def test_a_row_depends_on_its_chunk_alone(store, bert, which):
    embedder = embedders(store, bert)[which]
    chunks, lengths = store.chunks(np.arange(30)), np.asarray(store.lengths[:30])
    whole = embedder(chunks, lengths)
    assert whole.dtype == np.float32 and whole.shape == (30, embedder.dim)
    one = np.concatenate([embedder(chunks[i : i + 1], lengths[i : i + 1]) for i in range(30)])
    most = np.abs(whole).max()  # a GEMM may change the order of summation
    np.testing.assert_allclose(one, whole, rtol=0, atol=1e-6 * most)
    assert not np.array_equal(whole[0], whole[1])
    noise = np.where(np.arange(8) < lengths[:, None], chunks, 77)
    assert (lengths < 8).any()
    np.testing.assert_array_equal(embedder(noise, lengths), whole)
    assert embedder(chunks[:0], lengths[:0]).shape == (0, embedder.dim)


def test_hashing_estimates_the_cosine_of_tfidf(store):
    """Against TF-IDF in dictionaries, over many pairs: no bias, deviation dim**-0.5."""
    embedder = HashedTfidf(dim=1024).fit(store)
    chunks, lengths = store.chunks(np.arange(len(store))), np.asarray(store.lengths)

    def grams(row):
        return [(int(a),) for a in row] + [(int(a), int(b)) for a, b in pairwise(row)]

    sets = [grams(row[:length]) for row, length in zip(chunks, lengths)]
    frequency = {}
    for s in sets:
        for g in set(s):
            frequency[g] = frequency.get(g, 0) + 1
    vocabulary = {g: i for i, g in enumerate(frequency)}
    exact = np.zeros((len(sets), len(vocabulary)))
    for i, s in enumerate(sets):
        for g in set(s):
            idf = np.log1p((len(sets) - frequency[g] + 0.5) / (frequency[g] + 0.5))
            exact[i, vocabulary[g]] = idf * s.count(g) / (s.count(g) + 1)
    exact /= np.linalg.norm(exact, axis=1, keepdims=True)
    made = embedder(chunks, lengths)
    error = (made @ made.T - exact @ exact.T)[np.triu_indices(len(sets), 1)]
    assert abs(error.mean()) < 0.005 and error.std() < 1.2 * 1024**-0.5
    np.testing.assert_allclose(np.linalg.norm(made, axis=1), 1, rtol=1e-5)


def test_repeated_tokens_saturate():
    """tf/(tf + 1) of 5 and 3 occurrences, equal idf: the exact cosine with the first token alone."""
    made = HashedTfidf(dim=4096)(np.array([[5, 5, 6, 5, 6, 5, 6, 5], [5] * 8]), np.array([8, 8]))
    assert [(row != 0).sum() for row in made] == [5, 2]  # no collision: tokens 5, 6 and pairs 55, 56, 65; 5 and 55
    first = np.array([5 / 6, 3 / 4, 1 / 2, 3 / 4, 3 / 4])
    second = np.array([8 / 9, 7 / 8])
    want = (first[0] * second[0] + first[2] * second[1]) / np.linalg.norm(first) / np.linalg.norm(second)
    np.testing.assert_allclose(made[0] @ made[1], want, rtol=1e-6)


def test_names_tell_embedders_apart(store, bert):
    names = {e.name for e in embedders(store, bert)} | {HashedTfidf(64).name, HashedTfidf(65).fit(store).name}
    torch.manual_seed(1)
    with torch.no_grad():
        other = type(bert)(bert.config, add_pooling_layer=False)
    assert len(names | {EncoderEmbedder(other).name}) == 5
    assert EncoderEmbedder(bert, batch=4).name == EncoderEmbedder(bert).name


def test_hashed_tfidf_is_saved(store, tmp_path):
    embedder = HashedTfidf(64).fit(store)
    embedder.save(tmp_path / "e.npz")
    loaded = HashedTfidf.load(tmp_path / "e.npz")
    assert loaded.name == embedder.name
    np.testing.assert_array_equal(loaded(store.tokens, store.lengths), embedder(store.tokens, store.lengths))
    refused("other", HashedTfidf.load, tmp_path / "other.npz", error=FileNotFoundError)
    good = (tmp_path / "e.npz").read_bytes()
    damaged = [good[:-100], good[:100], b"", good[:300] + bytes([good[300] ^ 255]) + good[301:], b"text"]
    with np.load(tmp_path / "e.npz") as saved:
        parts = dict(saved)
    counts = [dict(frequency=np.zeros(7, np.int64)), dict(frequency=np.array([object()] * 3))]
    contradictions = [*counts, *(dict(settings=s) for s in ([0, 0, 5, 1, 2], [64, 1, 5, 1, 2], [64]))]
    for foreign in ({"other": np.zeros(3)}, *(parts | change for change in contradictions)):
        np.savez(tmp_path / "foreign.npz", **foreign)
        damaged.append((tmp_path / "foreign.npz").read_bytes())
    for data in damaged:
        (tmp_path / "e.npz").write_bytes(data)
        refused(r"e\.npz: truncated, corrupt or no hashed TF-IDF", HashedTfidf.load, tmp_path / "e.npz")


def test_the_mean_is_over_real_tokens(bert):
    chunk = np.array([[5, 9, 7, 0]])
    got = EncoderEmbedder(bert)(chunk, np.array([3]))
    with torch.no_grad():
        want = bert(input_ids=torch.tensor([[5, 9, 7]])).last_hidden_state[0].mean(0)
    np.testing.assert_allclose(got[0], want.numpy(), rtol=0, atol=1e-5)
    assert all(p.requires_grad for p in bert.parameters())


def test_retokenized_goes_through_text(bert):
    seen = []

    def tokenizer(texts, **options):
        seen.extend(texts)
        return dict.fromkeys(("input_ids", "attention_mask"), torch.ones(len(texts), 3, dtype=torch.int64))

    embedder = EncoderEmbedder(bert, prepare=retokenized(lambda ids: "-".join(map(str, ids)), tokenizer))
    embedder(np.array([[4, 5, 0]]), np.array([2]))
    assert seen == ["4-5"]


def test_bad_input_is_named(store):
    embedder = HashedTfidf(64).fit(store)
    refused("chunks: expected integer", embedder, np.zeros((2, 3)), np.ones(2, int), error=TypeError)
    refused("lengths: expected", embedder, np.zeros((2, 3), int), np.array([1, 4]))
    refused("dim: expected an int; got str", HashedTfidf, "64", error=TypeError)
