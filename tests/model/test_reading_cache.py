"""`keeping()` encodes recurring neighbours once: the same encodings and gradients, never of older weights, never with
dropout.
"""

import contextlib
import copy

import numpy as np
import pytest
import torch
from torch import nn

from retro_kernels.testing import relative_error, tolerances
from retro_model import evaluation, training
from retro_model.retro import NeighbourEncoder
from tests.model import tiny, toys

EXACT = tolerances.FLOOR[torch.float64]
VARIANTS = {"first": (1,), "both": (1, 2), "last": (2,), "none": ()}


def recurring(L=3, distinct=4):
    """Return neighbours [2,L,3,6] drawn from few, the last twice in one chunk, with a mask that differs between two
    equal neighbours.
    """
    g = torch.Generator().manual_seed(0)
    some = torch.randint(tiny.VOCAB, (distinct, 6), generator=g)
    neighbours = some[torch.randint(distinct, (2, L, 3), generator=g)]
    neighbours[-1, -1] = some[0]
    mask = torch.ones_like(neighbours, dtype=torch.bool)
    mask[-1, -1, 0, 3:] = False
    return neighbours, mask


def encoder(cross=(1,), **changes):
    config = tiny.config(encoder_cross_layers=cross, **changes)
    torch.manual_seed(0)
    made = NeighbourEncoder(config, nn.Embedding(tiny.VOCAB, 20, dtype=torch.float64), dtype=torch.float64)
    for name, parameter in made.named_parameters():
        if name.endswith("_bias"):
            nn.init.normal_(parameter)
    return made.eval()


def activations():
    return torch.randn(2, 3, 4, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def read(monkeypatch):
    """Record the number of neighbours at the first layer, one entry a call."""
    counts = []
    forward = nn.Embedding.forward

    def counted(self, tokens):
        counts.append(len(tokens))
        return forward(self, tokens)

    monkeypatch.setattr(nn.Embedding, "forward", counted)
    return counts


def ways(encoder):
    """Return context managers: every neighbour is encoded, and recurring ones once."""
    return contextlib.nullcontext, encoder.keeping


def test_without_being_asked_nothing_is_shared(read):
    made = encoder()
    neighbours, _ = recurring()
    for _ in range(2):
        made(neighbours, activations())
    assert read == [18, 18] and not made.keeps
    with made.keeping():
        made(neighbours, activations(), share=False)
    assert read == [18, 18, 18]


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("name", VARIANTS)
def test_encodings_and_gradients_are_those_of_each_neighbour_read_by_itself(name, masked, read):
    made = encoder(VARIANTS[name])
    neighbours, mask = recurring()
    mask = mask if masked else None
    outcomes = []
    for way in ways(made):
        chunks = activations().requires_grad_()
        with way():
            out = made(neighbours, chunks, neighbour_mask=mask)
        weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(2))
        wanted = [*made.parameters(), *([chunks] if VARIANTS[name] else [])]
        outcomes.append([out, *torch.autograd.grad((out * weight).sum(), wanted, allow_unused=True)])
    assert read == [18, 5 if masked else 4]
    for apart, shared in zip(*outcomes):
        assert (apart is None) == (shared is None)
        assert apart is None or relative_error(shared, apart) < EXACT


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_training_step_is_the_same(checkpoint, read):
    tokens = tiny.inputs(B=2, N=19)[0]
    neighbours = recurring(L=4, distinct=3)[0]
    batch = training.Batch(
        tokens, torch.ones_like(tokens, dtype=torch.bool), neighbours, torch.ones_like(neighbours) > 0
    )
    grads = []
    for number in range(2):
        model = tiny.model(dtype=torch.float64, checkpoint=checkpoint)
        with ways(model.encoder)[number]():
            training.batch_loss(model, batch)[0].total.backward()
        grads.append([p.grad for p in model.parameters()])
    assert min(read[1:]) <= 3
    for apart, shared in zip(*grads):
        assert relative_error(shared, apart) < EXACT


def test_what_is_dropped_differs_between_two_of_the_same_tokens(read):
    made = encoder(dropout=0.5).train()
    neighbours, _ = recurring()
    with made.keeping():
        out = made(neighbours, activations())
        assert read == [18]
        assert not torch.equal(out[-1, -1, 0], out[-1, -1, 1])
        made.eval()(neighbours, activations())
    assert read == [18, 4]


def test_compiled_it_reads_every_neighbour():
    """The graph serves tokens that differ from its trace."""
    made, chunks = encoder(encoder_layers=1), activations()
    run = torch.compile(made, fullgraph=True, backend="eager")
    with made.keeping():
        for distinct in (2, 5):
            neighbours = recurring(distinct=distinct)[0]
            assert relative_error(run(neighbours, chunks), made(neighbours, chunks)) < EXACT


class TestKept:
    """Encodings that outlive a call."""

    def test_only_new_neighbours_are_read_and_the_encodings_are_the_same(self, read):
        for name in VARIANTS:
            made, chunks = encoder(VARIANTS[name]), activations()
            first, second = recurring(distinct=4), recurring(distinct=5)
            want = [made(n, chunks, neighbour_mask=m) for n, m in (first, second, first)]
            read.clear()
            with torch.no_grad(), made.keeping() as kept:
                got = [made(n, chunks, neighbour_mask=m) for n, m in (first, second, first)]
            assert sum(read) == kept.read == len(kept) and read[2] == 0
            for a, b in zip(got, want):
                assert relative_error(a, b) < EXACT, name
            assert made._kept is None

    @pytest.mark.parametrize("change", ["sgd", "adamw", "fused", "load", "embedding", "to", "train"])
    def test_a_change_of_weights_forgets(self, change, read):
        made, chunks = encoder(), activations()
        neighbours, _ = recurring()
        with made.keeping() as kept:
            with torch.no_grad():
                made(neighbours, chunks)
            if change in ("sgd", "adamw", "fused"):
                made(neighbours, chunks).square().sum().backward()
                kind = torch.optim.SGD if change == "sgd" else torch.optim.AdamW
                kind(made.parameters(), lr=0.1, **({"fused": True} if change == "fused" else {})).step()
            elif change == "load":
                made.load_state_dict({name: w * 1.1 for name, w in made.state_dict().items()})
            elif change == "embedding":
                with torch.no_grad():
                    made.embedding.weight[neighbours[0, 0, 0, 0]] += 1
            elif change == "train":
                made.train().eval()
            else:
                made.to(torch.float32).to(torch.float64)
            with torch.no_grad():
                got = made(neighbours, chunks)
            assert kept.found == 0
        assert torch.equal(got, made(neighbours, chunks))

    def test_layers_behind_the_readings_may_change(self):
        made, chunks = encoder(), activations()
        neighbours, _ = recurring()
        with made.keeping() as kept, torch.no_grad():
            made(neighbours, chunks)
            made.layers[1].feed_forward.inner.weight.mul_(2)
            got = made(neighbours, chunks)
            assert kept.found == 4
        assert relative_error(got, made(neighbours, chunks, share=False)) < EXACT

    def test_gradients_of_a_reading_are_never_lost(self):
        made, chunks = encoder(), activations()
        neighbours, _ = recurring()
        with made.keeping() as kept:
            with torch.no_grad():
                made(neighbours, chunks)
            made(neighbours, chunks).sum().backward()
            assert kept.found == 0
            assert made.embedding.weight.grad.abs().sum() > 0
            for parameter in made.parameters():  # frozen: nothing to lose
                parameter.requires_grad_(False)
            made(neighbours, chunks.requires_grad_()).sum().backward()
            assert kept.found == 4 and chunks.grad.abs().sum() > 0

    def test_no_more_than_was_said_is_kept(self):
        made, chunks = encoder(), activations()
        one = 6 * 20 * 8
        with torch.no_grad(), made.keeping(3 * one) as kept:
            for distinct in (5, 9, 2):
                neighbours, _ = recurring(distinct=distinct)
                assert relative_error(made(neighbours, chunks), made(neighbours, chunks, share=False)) < EXACT
                assert len(kept) <= 3 and kept.bytes == len(kept) * one
        with torch.no_grad(), made.keeping(one - 1) as kept:
            made(neighbours, chunks)
            assert len(kept) == kept.bytes == 0

    def test_autocast_and_copies_have_their_own(self):
        model = tiny.model()
        tokens, neighbours, _ = tiny.inputs(mask=None)
        with torch.no_grad(), model.encoder.keeping() as kept:
            want = model(tokens, neighbours)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                model(tokens, neighbours)
            assert kept.found == 0
            copied = copy.deepcopy(model)
            assert len(copied.encoder._kept) == 0
            assert torch.equal(copied(tokens, neighbours), want)


def test_scores_are_the_same_and_the_neighbours_of_overlapping_windows_are_read_once(read):
    model, store = tiny.model(dtype=torch.float64), toys.random_store(12, 4)
    found = np.random.default_rng(0).integers(0, 30, (12, 2))
    arguments = (model, store, found, toys.Database(toys.random_store(31, 4, seed=1)))
    scores = evaluation.score(*arguments, window=12, stride=4, batch_size=1)
    once = sum(read)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.encoder), "keeping", lambda _: contextlib.nullcontext())
        apart = evaluation.score(*arguments, window=12, stride=4, batch_size=1)
    np.testing.assert_allclose(scores.nats, apart.nats, rtol=1e-12)
    neighbours, tokens = (
        len(np.unique(found)),
        6,
    )  # neighbours of 8 tokens and windows of 12 are both embedded
    assert once < neighbours + tokens * 12 and sum(read) - once > once
    assert model.encoder._kept is None
