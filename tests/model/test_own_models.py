"""Models of a user's own: the two protocols are checked by name, and the shortest classes that satisfy them work."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import one_hot

from retro_model import evaluation, generate, training
from retro_model.evaluation.scoring import evaluating
from retro_model.training import Batch
from tests.refusals import refused

V, M = 11, 4
TOKENS = torch.arange(16).reshape(2, 8) % V
NEIGHBOURS = torch.zeros(2, 2, 1, 8, dtype=torch.int64)


def batch(neighbours=None):
    mask = None if neighbours is None else torch.ones_like(neighbours, dtype=torch.bool)
    return Batch(TOKENS, torch.ones_like(TOKENS, dtype=torch.bool), neighbours, mask)


class Plain(nn.Module):
    """The shortest model that can be scored."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(V, V)

    def forward(self, tokens):
        return self.table(tokens)


class Reading(Plain):
    def forward(self, tokens, neighbours=None, neighbour_mask=None):
        return self.table(tokens)


class Renamed(Plain):
    def forward(self, idx, targets=None):
        return self.table(idx)


class Pair(Plain):
    def forward(self, tokens):
        return self.table(tokens), None


class Any(Plain):
    def forward(self, *args, **options):
        return self.table(options["tokens"])


@pytest.mark.parametrize(
    "model, neighbours", [(Plain, None), (Reading, None), (Reading, NEIGHBOURS), (Any, NEIGHBOURS)]
)
def test_a_model_that_predicts_has_a_loss(model, neighbours):
    (total, losses), size = training.batch_loss(model(), batch(neighbours))
    assert size == V and losses.shape == (2, 7) and torch.allclose(losses.sum(), total.detach())


@pytest.mark.parametrize(
    "model, neighbours, message",
    [
        (Plain, NEIGHBOURS, "forward(tokens, neighbours, neighbour_mask) -> logits (`Predicts`); got Plain.forward "),
        (Plain, NEIGHBOURS, "without neighbours, neighbour_mask"),
        (Renamed, None, "model: expected forward(tokens) -> logits (`Predicts`); got Renamed.forward without tokens"),
        (Pair, None, "model: expected forward to return logits [B,N,V] with B,N = [2, 8] (`Predicts`); got tuple"),
        (lambda: nn.Sequential(Plain(), nn.Linear(V, 1), nn.Flatten()), None, "got Sequential.forward without tokens"),
    ],
)
def test_another_model_is_refused_by_name(model, neighbours, message):
    refused(re.escape(message), training.batch_loss, model(), batch(neighbours), error=TypeError)


def test_a_wrapped_model_is_checked_within_its_wrapper():
    compiled = torch.compile(Renamed(), backend="eager")
    refused("without tokens", training.batch_loss, compiled, batch(), error=TypeError)
    assert training.batch_loss(torch.compile(Reading(), backend="eager"), batch(NEIGHBOURS))[1] == V


class Decoder(Plain):
    """The shortest model that decodes: it needs no cache."""

    config = SimpleNamespace(vocab_size=V, max_len=None)
    decodes_ragged = False

    def make_cache(self, batch, capacity=None):
        return None

    def forward(self, tokens, *, cache=None):
        return self.table(tokens)

    def last_logits(self, tokens, *, cache=None):
        return self(tokens, cache=cache)[:, -1]


def test_a_model_without_parameters_is_scored_on_the_cpu():
    """A baseline that gives every token the same probability has none."""
    with evaluating(nn.Identity()) as device:
        assert device == torch.device("cpu")


def test_the_shortest_decoder_is_sampled():
    model = Decoder()
    rows = generate(model, [[3], [1, 2]], 3)
    assert rows[0][1] == model.table.weight[3].argmax() and [len(row) for row in rows] == [4, 5]


def changed(**attributes):
    return type("GPT", (Decoder,), attributes)()


CONFIG = dict(vocab_size=V, max_len=None, retrieves=True)


@pytest.mark.parametrize(
    "attributes, message",
    [
        ({"config": SimpleNamespace(vocab_size=V)}, r"\(`Decodes`\); got GPT, without config.max_len$"),
        ({"forward": lambda self, tokens: None}, r"whose calls take tokens, cache; got GPT.* without cache$"),
        ({"last_logits": lambda self, tokens: None}, r"whose calls take tokens, cache; got GPT.* without cache$"),
        ({"config": SimpleNamespace(**CONFIG)}, r"that retrieves; got GPT, without config.chunk_len$"),
        (
            {"config": SimpleNamespace(**CONFIG, chunk_len=M)},
            r"take tokens, cache, neighbours, neighbour_mask; got GPT.last_logits without neighbours, neighbour_mask$",
        ),
    ],
)
def test_what_does_not_decode_is_refused_by_name(attributes, message):
    with pytest.raises(TypeError, match=message):
        generate(changed(**attributes), [[1, 2]], 3, retrieve=lambda chunks: (chunks[:, None], None))


def test_both_protocols_are_public():
    assert training.Predicts.__name__ in training.__all__ and hasattr(evaluation, "score")


class Held:
    """The sum of each row's tokens so far."""

    def __init__(self, batch, capacity):
        self.sums, self.capacity = torch.zeros(batch, dtype=torch.int64), capacity

    @classmethod
    def join(cls, caches, capacity):
        joined = cls(0, capacity)
        joined.sums = torch.cat([c.sums for c in caches])
        return joined


class Counter(nn.Module):
    """The next token is the sum of the tokens so far, plus `shift`; any length."""

    generation_options = ("shift",)

    def __init__(self, ragged: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.config, self.decodes_ragged = SimpleNamespace(vocab_size=V, max_len=None), ragged
        self.capacities = []

    def make_cache(self, batch, capacity=None):
        self.capacities.append(capacity)
        return Held(batch, capacity)

    def forward(self, tokens, *, cache, shift=0):
        sums = cache.sums[:, None] + tokens.cumsum(-1)
        cache.sums = sums[:, -1]
        shift = shift[:, None] if isinstance(shift, torch.Tensor) else shift
        return one_hot((sums + shift) % V, V).double()

    def last_logits(self, tokens, **options):
        return self(tokens, **options)[:, -1]


def continued(prompt, count, shift=0):
    row = list(prompt)
    for _ in range(count):
        row.append((sum(row) + shift) % V)
    return row


ROWS = [[3, 1, 4], [1], [5, 9, 2, 6, 5], [2, 7, 1]]


@pytest.mark.parametrize("ragged", [True, False])
def test_any_length_and_options(ragged):
    model = Counter(ragged)
    assert [r.tolist() for r in generate(model, ROWS, 20)] == [continued(row, 20) for row in ROWS]
    assert [r.tolist() for r in generate(model, ROWS, 6, shift=4)] == [continued(row, 6, 4) for row in ROWS]
    shifts = torch.tensor([1, 2, 3, 5])  # one per prompt, in any order of decoding
    want = [continued(row, 6, int(s)) for row, s in zip(ROWS, shifts)]
    assert [r.tolist() for r in generate(model, ROWS, 6, shift=shifts)] == want


def test_a_cache_is_made_for_what_it_will_hold():
    model = Counter(False)
    generate(model, ROWS, 20)
    assert model.capacities == [21, 23, 25]  # by length


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"shfit": 1}, TypeError, r"shfit: expected an option of Counter's calls \(shift\); got an unknown name"),
        ({"shift": torch.ones(3)}, ValueError, r"shift: expected one entry for each of the 4 prompts; got shape \[3\]"),
        (
            {"retrieve": lambda chunks: chunks},
            ValueError,
            "retrieve: expected None for a model without retrieval from outside",
        ),
    ],
)
def test_wrong_options_are_refused(options, error, message):
    refused(message, generate, Counter(True), ROWS, 3, **options, error=error)


def test_refuses_what_is_no_such_model():
    with pytest.raises(TypeError, match=r"model: expected one that decodes with a cache .* got Linear, without config"):
        generate(nn.Linear(2, 2), ROWS, 3)
