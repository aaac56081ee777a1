"""`generate` needs of a model only the protocol `Decodes`, here of a model that only counts."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import one_hot

from retro_model.generation import generate

V = 11


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
def test_refuses(options, error, message):
    with pytest.raises(error, match=message):
        generate(Counter(True), ROWS, 3, **options)


def test_refuses_what_is_no_such_model():
    with pytest.raises(TypeError, match=r"model: expected one that decodes with a cache .* got Linear, without config"):
        generate(nn.Linear(2, 2), ROWS, 3)
