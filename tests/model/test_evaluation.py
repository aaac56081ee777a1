"""Windows, bits per byte and leakage against cases by hand and brute force."""

import math

import numpy as np
import pytest

from retro_model import evaluation
from retro_model.data.tokens import BOS
from tests.model import toys
from tests.model.test_text import brute_substring


@pytest.mark.parametrize(
    "chunks,window,stride", [(1, 3, 1), (5, 3, 1), (7, 4, 2), (8, 4, 2), (9, 4, 3), (3, 8, 4), (0, 4, 2)]
)
def test_windows_score_each_chunk_once_in_the_first_window_that_holds_it(chunks, window, stride):
    spans = evaluation.windows(chunks, window, stride)
    owner = {c: [w for w, (_, end, scored) in enumerate(spans) if scored <= c < end] for c in range(chunks)}
    assert all(len(w) == 1 for w in owner.values())
    for c, (w,) in owner.items():
        holding = [i for i in range(0, chunks, stride) if i <= c < i + window]
        assert spans[w][0] == min(holding)  # the earliest window gives the most context
        assert spans[w][1] - spans[w][0] <= window


def test_score_gives_each_token_the_most_context():
    """The cost depends only on the offset in the window: document of 11 tokens, M=2, windows of 6, stride 2."""
    documents = [[0] * 11, [0] * 3]
    store = toys.store(documents, 2)
    scores = evaluation.score(toys.ByOffset(), store, window=6, stride=2, batch_size=2)
    cost = toys.ByOffset.cost
    first = [math.log(2) + cost(1), cost(2) + cost(3), cost(4) + cost(5)]
    # each later window scores its last two tokens; the last one is half padding
    later = [cost(4) + cost(5)] * 2 + [cost(4)]
    np.testing.assert_allclose(scores.nats, [*first, *later, math.log(2) + cost(1), cost(2)], rtol=1e-6)
    assert scores.tokens.tolist() == [2, 2, 2, 2, 2, 1, 2, 1]
    assert scores.bytes.tolist() == [4, 4, 4, 4, 4, 2, 4, 2]
    # Longer windows change only the cost of tokens beyond the first window.
    whole = evaluation.score(toys.ByOffset(), store, window=12, stride=6)
    np.testing.assert_allclose(whole.nats[:3], scores.nats[:3], rtol=1e-6)
    np.testing.assert_allclose(whole.nats[5], cost(10), rtol=1e-5)


def test_bos_is_free_and_not_counted():
    """A leading BOS costs nothing; a document without BOS pays log(vocab) for its first token."""
    store = toys.store([[BOS, 0, 0], [0, 0, 0], [0, BOS, 0, BOS, 0]], 2)
    scores = evaluation.score(toys.ByOffset(), store, window=4, stride=2)
    cost = toys.ByOffset.cost
    other = cost(1) + 1  # token 1 at offset 1, whose logit is lower by 1 than token 0's
    np.testing.assert_allclose(
        scores.nats,
        [cost(1), cost(2), math.log(2) + cost(1), cost(2), math.log(2) + other, cost(2) + cost(3) + 3, cost(2)],
        rtol=1e-6,
    )
    assert scores.tokens.tolist() == [1, 1, 2, 1, 2, 2, 1]  # BOS tokens in the middle are ordinary tokens


def test_score_reads_the_right_neighbours_and_leaves_padding_rows_without():
    store = toys.random_store(9, 4)
    neighbours = np.arange(18).reshape(9, 2)
    seen = []

    class Model(toys.Bigram):
        def forward(self, tokens, neighbours=None, *, neighbour_mask=None):
            seen.append((tokens, neighbours, neighbour_mask))
            return super().forward(tokens)

    class Ids(toys.Database):
        def values(self, ids):
            return tuple(np.repeat(part[..., None], 8, -1) for part in (np.maximum(ids, 0), ids >= 0))

    evaluation.score(Model(), store, neighbours, Ids(toys.random_store(18, 4)), window=8, stride=4, batch_size=4)
    for tokens, ids, mask in seen:
        assert ids.shape == (len(tokens), tokens.shape[1] // 4, 2, 8) and mask.shape == ids.shape
        for b in range(len(tokens)):
            for u in range(ids.shape[1]):
                row = [r for r in range(9) if tokens[b, 4 * u : 4 * u + 4].tolist() == store.tokens[r].tolist()]
                if not mask[b, u].any():
                    assert not tokens[b, 4 * u : 4 * u + 4].any()
                else:
                    assert ids[b, u, :, 0].tolist() == neighbours[row[0]].tolist()


@pytest.mark.parametrize(
    "change,name",
    [
        ({"window": 6}, "window"),
        ({"stride": 3}, "stride"),
        ({"stride": 8}, "stride"),
        ({"batch_size": 0}, "batch_size"),
        ({"neighbours": np.zeros((9, 1), int)}, "neighbours"),
        ({"neighbours": np.zeros((8, 1), int), "database": object()}, "neighbours"),
        ({"neighbours": np.zeros((10, 1), int), "database": object()}, "neighbours"),
        ({"autocast": "bf16"}, "autocast"),
        ({"documents": [0, 99]}, "documents"),
        ({"documents": [-1]}, "documents"),
    ],
)
def test_score_refuses(change, name):
    with pytest.raises(ValueError, match=name):
        evaluation.score(toys.Bigram(), toys.random_store(9, 4), **({"window": 8, "stride": 4} | change))


def test_bits_per_byte_is_the_brute_force_filter():
    random = np.random.default_rng(0)
    scores = evaluation.Scores(random.random(50), random.integers(1, 9, 50), random.integers(1, 99, 50))
    r = random.integers(0, 9, 50) / 8
    for alpha in np.linspace(0, 1, 33):
        kept = [i for i in range(50) if r[i] <= alpha]
        want = sum(scores.nats[i] for i in kept) / math.log(2) / sum(scores.bytes[i] for i in kept)
        assert evaluation.bits_per_byte(scores, r, alpha) == pytest.approx(want)
    assert evaluation.bits_per_byte(scores) == evaluation.bits_per_byte(scores, r, 1.0)
    assert math.isnan(evaluation.bits_per_byte(scores, r + 0.1, 0.0))


@pytest.mark.parametrize("arguments", [(None, 0.5), (np.zeros(4), 1.5), (np.zeros(3), 0.5)])
def test_bits_per_byte_refuses(arguments):
    with pytest.raises(ValueError, match=r"leakage|alpha"):
        evaluation.bits_per_byte(evaluation.Scores(np.ones(4), np.ones(4, int), np.ones(4, int)), *arguments)


def test_leakage_is_the_longest_shared_substring_over_the_chunk():
    train, valid = toys.random_store(30, 4, vocab=4, seed=1), toys.random_store(10, 4, vocab=4, seed=2)
    database = toys.Database(train)
    neighbours = np.random.default_rng(3).integers(-1, 30, (10, 12))
    got = evaluation.leakage(valid, neighbours, database, block=3)
    values, mask = database.values(neighbours)
    for row in range(10):
        chunk = valid.tokens[row][: valid.lengths[row]].tolist()
        want = max(brute_substring(chunk, values[row, j][mask[row, j]].tolist())[0] for j in range(10))
        assert got[row] == want / valid.lengths[row], row
    assert got.min() > 0 or (got == 0).any()
    nothing = evaluation.leakage(valid, np.full((10, 10), -1), database)
    assert not nothing.any()
    itself = evaluation.leakage(train, np.arange(30)[:, None], database)
    assert (itself == 1).all()


def test_leakage_looks_at_the_nearest_ten_only():
    store = toys.store([[d] * 4 for d in range(1, 13)], 4)
    ids = np.arange(11, -1, -1)[None]
    for last, want in ((2, 1.0), (1, 0.0)):  # the chunk itself is the tenth; the eleventh
        assert evaluation.leakage(toys.store([[last + 1] * 4], 4), ids, toys.Database(store)) == [want]


def test_leakage_looks_at_the_given_length_only():
    store = toys.store([[1, 2, 3, 4, 5, 6, 7, 8]], 4)
    query = toys.store([[5, 6, 7, 8]], 4)
    ids = np.zeros((1, 1), int)
    assert evaluation.leakage(query, ids, toys.Database(store)) == [1.0]
    assert evaluation.leakage(query, ids, toys.Database(store), length=6) == [0.5]


def test_bootstrap_draws_whole_documents():
    """Each of three documents is drawn three times with a chance of 1/27 > 2.5%: the ends are the extreme documents'
    gaps.
    """
    store = toys.store([[1] * 8, [1] * 4, [1] * 12], 4)
    b = evaluation.Scores(np.ones(6), store.lengths, store.chunk_bytes)
    a = evaluation.Scores(b.nats + [0.1, 0.1, 0.5, -0.2, -0.3, -0.2], store.lengths, store.chunk_bytes)
    gap, low, high = evaluation.bootstrap(a, b, store, samples=4000)
    assert (gap, low, high) == pytest.approx(
        tuple(nats / math.log(2) / count for nats, count in ((0.0, 48), (-0.7, 24), (0.5, 8)))
    )
    # a document without scores does not count
    unscored = evaluation.Scores(*(np.r_[x, 0, 0] for x in (b.nats, b.tokens, b.bytes)))
    other = evaluation.Scores(*(np.r_[x, 0, 0] for x in (a.nats, a.tokens, a.bytes)))
    wider = toys.store([[1] * 8, [1] * 4, [1] * 12, [1] * 4, [1] * 4], 4)
    assert evaluation.bootstrap(other, unscored, wider, samples=4000) == (gap, low, high)


def test_a_vocabulary_that_is_too_small_is_named():
    store = toys.store([[1, 2, 3, 9]], 4)
    with pytest.raises(ValueError, match="model: expected a vocabulary of at least 10 tokens"):
        evaluation.score(toys.Bigram(5), store, window=8, stride=4)
