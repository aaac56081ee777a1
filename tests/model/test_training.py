"""Schedule, parameter groups, data order, the training step and its progress bar."""

import contextlib
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from retro_model import training
from retro_model.base import progress
from retro_model.retro import Retro
from retro_model.retro.config import RetroConfig
from retro_model.training import step
from tests.model import toys
from tests.refusals import refused

SETTINGS = training.Settings(steps=20, warmup_steps=2, max_lr=1e-2)


def stream(store, **changes):
    return training.batches(store, **({"window": 8, "batch_size": 2, "seed": 5} | changes))


def take(n, iterator):
    return list(itertools.islice(iterator, n))


def test_learning_rate_is_the_papers():
    s = training.Settings(steps=10_000)
    assert training.learning_rate(0, s) == 1e-7
    assert training.learning_rate(375, s) == pytest.approx((1e-7 + 2e-4) / 2)
    assert training.learning_rate(750, s) == pytest.approx(2e-4)
    assert training.learning_rate(750 + 9250 // 2, s) == pytest.approx(0.55 * 2e-4)
    assert training.learning_rate(10_000, s) == training.learning_rate(20_000, s) == pytest.approx(2e-5)
    with pytest.raises(ValueError, match="step: expected an int >= 0; got -1"):
        training.learning_rate(-1, s)


REFUSED = {
    "steps": (0, 20.5, 20.0, True, math.inf),
    "warmup_steps": (21, -1, 0.5),
    "autocast": ("int8",),
    "clip": (0, math.inf),
    "max_lr": (math.nan, -1.0, "1e-4"),
    "min_lr_ratio": (2, math.nan),
    "eps": (math.inf, 0.0),
    "weight_decay": (math.nan, -0.1),
    "warmup_from": (math.inf, -1e-7),
    "betas": ((0.9, 1.0), (-0.1, 0.9), (math.nan, 0.9), (0.9,), 0.9, (0.9, True)),
}


@pytest.mark.parametrize("name, value", [(name, value) for name, values in REFUSED.items() for value in values])
def test_settings_refuse(name, value):
    with pytest.raises((ValueError, TypeError), match=f"^{name}: expected"):
        training.Settings(**({"steps": 20, "warmup_steps": 2} | {name: value}))


def test_settings_of_the_borders():
    training.Settings(steps=1, warmup_steps=1, min_lr_ratio=0, weight_decay=0, warmup_from=0, betas=(0.0, 0.0))
    training.Settings(steps=1, warmup_steps=0, min_lr_ratio=1, max_lr=1)


def test_only_matrices_of_linear_maps_decay():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.inner, self.norm = nn.Embedding(5, 4), nn.Linear(4, 4), nn.RMSNorm(4)
            self.u, self.out = nn.Parameter(torch.zeros(2, 2)), nn.Linear(4, 5, bias=False)
            self.frozen = nn.Linear(2, 2)
            self.out.weight = self.embed.weight
            self.frozen.requires_grad_(False)

    net = Net()
    decayed, others = training.parameter_groups(net, 0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert [id(p) for p in decayed["params"]] == [id(net.inner.weight)]
    free = (net.embed.weight, net.inner.bias, net.norm.weight, net.u)
    assert {id(p) for p in others["params"]} == {id(p) for p in free}


def test_batches_are_a_function_of_the_position():
    store = toys.random_store(41)
    whole = take(25, stream(store))
    for start in (1, 7, 12, 24):
        assert torch.equal(take(1, stream(store, start=start))[0].tokens, whole[start].tokens)
    assert not torch.equal(take(1, stream(store, seed=6))[0].tokens, whole[0].tokens)
    halves = [take(25, stream(store, rank=r, world_size=2)) for r in range(2)]
    for both, a, b in zip(whole, *halves):
        assert torch.equal(both.tokens, torch.cat([a.tokens, b.tokens]))


def test_an_epoch_visits_each_window_once():
    store = toys.random_store(41)
    store.tokens = np.arange(41 * 4).reshape(41, 4)
    store.lengths = np.full(41, 4)
    per_epoch = (41 // 2 - 1) // 2
    epochs = take(2 * per_epoch, stream(store))
    orders = []
    for epoch in (epochs[:per_epoch], epochs[per_epoch:]):
        rows = [int(w[0]) // 4 for batch in epoch for w in batch.tokens]
        assert len(set(rows)) == len(rows) and len({r % 2 for r in rows}) == 1
        assert all(torch.equal(w, torch.arange(int(w[0]), int(w[0]) + 8)) for batch in epoch for w in batch.tokens)
        orders.append(rows)
    assert orders[0] != orders[1]


def test_batches_from_chosen_windows():
    starts = np.array([3, 10, 21, 30])
    for epoch in range(2):
        batches = take(2, stream(toys.random_store(41), starts=starts, start=2 * epoch))
        seen = {tuple(w.tolist()) for batch in batches for w in batch.tokens}
        assert seen == {tuple(toys.random_store(41).tokens[s : s + 2].reshape(-1).tolist()) for s in starts}


def test_a_batch_holds_each_chunks_neighbours():
    store, database = toys.random_store(41), toys.Database(toys.random_store(30, seed=1))
    neighbours = np.random.default_rng(0).integers(-1, 30, (41, 3))
    batch = next(stream(store, neighbours=neighbours, database=database))
    assert batch.neighbours.shape == (2, 2, 3, 8)
    for b, u in itertools.product(range(2), range(2)):
        row = next(r for r in range(41) if batch.tokens[b, 4 * u : 4 * u + 4].tolist() == store.tokens[r].tolist())
        tokens, mask = map(torch.from_numpy, database.values(neighbours[row]))
        assert torch.equal(batch.neighbours[b, u], tokens) and torch.equal(batch.neighbour_mask[b, u], mask)
        assert batch.real[b, 4 * u : 4 * u + 4].tolist() == [i < store.lengths[row] for i in range(4)]


def windows_of(store, neighbours, database, **options):
    """Return (row, ids that were read) of each window of two epochs."""
    seen, real = [], database.values
    database.values = lambda ids: (seen.append(ids), real(ids))[1]
    index = {row.tobytes(): i for i, row in enumerate(np.asarray(store.tokens, np.int64))}
    per_epoch = (len(store) // 4 - 1) // 2
    batches = take(2 * per_epoch, stream(store, window=32, neighbours=neighbours, database=database, **options))
    del database.values
    rows = [[index[row.numpy().tobytes()] for row in window.view(4, 8)] for batch in batches for window in batch.tokens]
    return list(zip(rows, np.concatenate(seen)))


@pytest.mark.parametrize("same_store", [True, False])
def test_no_window_is_shown_its_own_documents(tmp_path, same_store):
    """Documents of one to three chunks, where the nearest of every chunk is in the document before or after its own."""
    from retro_model.data.database import ChunkDatabase
    from retro_model.data.embed import HashedTfidf
    from retro_model.data.neighbours import precompute_neighbours
    from retro_model.data.store import build_store
    from tests.model.data import Given

    rng, marks = np.random.default_rng(0), iter(range(150, 400))
    documents = []
    for pair in range(20):
        text = rng.integers(2, 150, (rng.integers(1, 4), 8))
        for side in "ab":
            text[:, 3] = [next(marks) for _ in text]  # so that each row is unique
            documents.append((f"{pair}{side}", "g", text.reshape(-1).copy()))
    store = database_store = build_store(tmp_path / "train", documents, Given(400), chunk_len=8)
    if not same_store:  # the same documents in another order and other cuts, and some that are not in the training
        shifted = [(name, group, np.r_[399, tokens]) for name, group, tokens in documents[::-1]]
        others = [(f"{i}other", "g", rng.integers(2, 150, 20)) for i in range(20)]
        database_store = build_store(tmp_path / "all", [*others[:7], *shifted, *others[7:]], Given(400), chunk_len=8)
    database = ChunkDatabase.build(tmp_path / "d", database_store, HashedTfidf(64).fit(database_store))
    neighbours = np.array(precompute_neighbours(tmp_path / "n", store, database, 6))
    names = lambda which, rows: {which.documents[d].name for d in which.chunk_doc[rows]}  # noqa: E731
    exposed = 0
    for rows, ids in windows_of(store, neighbours, database):
        own = names(store, rows)
        assert not own & names(database_store, ids[ids >= 0])
        raw = neighbours[rows]
        exposed += bool(own & names(database_store, raw.reshape(-1)))
        whose = np.array([entry.name for entry in database_store.documents])[database_store.chunk_doc[raw]]
        kept = ~np.isin(whose, [*own])
        assert np.array_equal(ids, np.where(kept, raw, -1))  # no other neighbour is dropped
    assert exposed > 10  # else the test shows nothing
    for rows, ids in windows_of(store, neighbours, database, k=2):
        own = names(store, rows)
        for row, got in zip(neighbours[rows], ids):
            want = [i for i in row if database_store.documents[database_store.chunk_doc[i]].name not in own][:2]
            assert got.tolist() == want  # 2 of the 6 remain everywhere, in order


def test_padding_rows_and_missing_neighbours_stay_missing():
    store = toys.random_store(12)
    ids = training.visible(store, np.array([[0, 1, -1], [6, -1, -1]]), np.array([[5, -1]] * 12), toys.Database(store))
    assert ids.tolist() == [[[5, -1], [5, -1], [-1, -1]], [[5, -1], [-1, -1], [-1, -1]]]
    seen = training.visible(store, np.array([[3, 4]]), np.array([[5, 0]] * 12), toys.Database(store))
    assert (seen[..., 0] == -1).all()


@pytest.mark.parametrize(
    "change,name",
    [
        ({"k": 1}, "k"),
        ({"k": 3, "neighbours": np.zeros((41, 2), int), "database": object()}, "k"),
        ({"window": 7}, "window"),
        ({"batch_size": 3, "world_size": 2}, "batch_size"),
        ({"batch_size": 99}, "store"),
        ({"starts": np.array([40])}, "starts"),
        ({"neighbours": np.zeros((41, 1), int)}, "neighbours"),
        ({"rank": 2, "world_size": 2}, "rank"),
        ({"neighbours": np.zeros((40, 1), int), "database": object()}, "neighbours"),
    ],
)
def test_batches_refuse(change, name):
    refused(name, stream, toys.random_store(41), **change)


def test_loss_is_the_mean_over_real_tokens():
    tokens = torch.tensor([[1, 2, 3, 0]])
    real = torch.tensor([[True, True, True, False]])
    logits = torch.randn(1, 4, 5, generator=torch.Generator().manual_seed(0))
    logp = logits.log_softmax(-1)
    want = -(logp[0, 0, 2] + logp[0, 1, 3]) / 2
    assert training.loss(logits, training.Batch(tokens, real)).item() == pytest.approx(want.item(), rel=1e-6)


def step_of(parts, **changes):
    """Return parameters after one plain gradient step in float64."""
    model = toys.Bigram().double()
    settings = training.Settings(**({"steps": 20, "warmup_steps": 0, "max_lr": 0.5, "clip": 1e9} | changes))
    results = training.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), parts, settings, 0)
    return model, results


def test_a_step_is_the_gradient_of_the_mean_over_all_parts():
    parts = take(3, stream(toys.random_store(41)))
    accumulated, results = step_of(parts)
    whole = training.Batch(torch.cat([p.tokens for p in parts]), torch.cat([p.real for p in parts]))
    assert len({int(p.real.sum()) for p in parts}) > 1  # parts of unequal weight, else the test shows nothing
    reference = toys.Bigram().double()
    value = training.loss(reference(whole.tokens), whole)
    value.backward()
    assert results["loss"] == pytest.approx(value.item(), rel=1e-5)
    assert results["tokens"] == int(whole.real[:, 1:].sum())
    for p, q in zip(accumulated.parameters(), reference.parameters()):
        torch.testing.assert_close(p, q - 0.5 * q.grad, rtol=1e-6, atol=1e-7)


def test_a_gradient_that_is_not_finite_changes_nothing():
    model = toys.Bigram()
    with torch.no_grad():
        model.table.weight[3, 3] = math.inf
    before = {n: p.clone() for n, p in model.named_parameters()}
    optimizer = training.make_optimizer(model, SETTINGS)
    batch = training.Batch(torch.full((1, 8), 3), torch.ones(1, 8, dtype=torch.bool))
    refused("step 4", training.train_step, model, optimizer, [batch], SETTINGS, 4, error=FloatingPointError)
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in model.named_parameters())


def test_bfloat16_keeps_float32_parameters():
    settings = training.Settings(steps=20, warmup_steps=2, autocast="bfloat16")
    model = toys.Bigram()
    optimizer = training.make_optimizer(model, settings)
    types = []
    model.scale.register_forward_hook(lambda _m, _i, out: types.append(out.dtype))
    results = training.train(model, optimizer, stream(toys.random_store(41)), settings, stop=3)
    assert types == [torch.bfloat16] * 3 and all(p.dtype == torch.float32 for p in model.parameters())
    assert all(math.isfinite(r["loss"]) for r in results)


def test_training_lowers_the_loss():
    model, settings, seen = toys.Bigram(), training.Settings(steps=60, warmup_steps=5, max_lr=0.1), []
    optimizer, batches = training.make_optimizer(model, settings), stream(toys.random_store(41))
    with training.progress("test", 60) as show:
        report = lambda step, results: (show(step, results), seen.append(step))  # noqa: E731
        history = training.train(model, optimizer, batches, settings, report=report)
    assert seen == list(range(60))
    assert sum(h["loss"] for h in history[-10:]) < 0.7 * sum(h["loss"] for h in history[:10])


def test_a_stream_that_ends_is_named():
    model, settings = toys.Bigram(), training.Settings(steps=2, warmup_steps=1)
    batch = next(stream(toys.random_store(41)))
    with pytest.raises(ValueError, match="stream: expected 2 batches for step 1; it ended after 1"):
        training.train(model, training.make_optimizer(model, settings), [batch] * 3, settings, accumulate=2)


def retro(layers=2):
    sizes = dict(num_heads=1, num_layers=layers, cca_layers=(layers,), chunk_len=4, max_len=16)
    torch.manual_seed(0)
    return Retro(RetroConfig.small(17, 16, 32, **sizes))


def test_u_v_norms_and_embeddings_of_retro_do_not_decay():
    model = retro()
    decayed = {id(p) for p in training.parameter_groups(model, 0.1)[0]["params"]}
    for name, p in model.named_parameters():
        free = "norm" in name or "embedding" in name or name.endswith(("content_bias", "position_bias"))
        assert (id(p) in decayed) != free, name


def test_the_papers_settings():
    """Table 10 and appendix C.1: 419,430,400,000 tokens in windows of 2048, batches of 256 or 1024."""
    rates = {"172m": (2e-4, 800_000), "425m": (2e-4, 800_000), "1.5b": (2e-4, 800_000), "7.5b": (1e-4, 200_000)}
    for name, (max_lr, steps) in rates.items():
        s = training.Settings.preset(name)
        assert (s.max_lr, s.steps, s.warmup_steps, s.weight_decay) == (max_lr, steps, 750, 0.1)
        assert training.learning_rate(steps, s) == pytest.approx(max_lr / 10)
    assert training.Settings.preset("7.5b", batch_size=256).steps == 800_000
    wikitext = training.Settings.preset("wikitext103")
    rates = [training.learning_rate(step, wikitext) for step in (0, 4000, 100_000)]
    assert rates == pytest.approx([1e-7, 2.5e-4, 2e-5])
    refused("name: expected one of 172m", training.Settings.preset, "1b")


@pytest.mark.parametrize("times", [0.999, 1.0, 1.0005, 1.005, 1.5, 100.0])
def test_a_gradient_is_clipped_from_the_limit_on(times):
    from retro_model.training.step import clipped_step

    model = torch.nn.Linear(5, 3).double()
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    whole = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    wanted = [p.detach() - p.grad / max(1.0, times) for p in model.parameters()]
    norm = clipped_step(model, torch.optim.SGD(model.parameters(), lr=1.0), float(whole) / times)
    assert float(norm) == pytest.approx(float(whole))
    for p, want in zip(model.parameters(), wanted):
        torch.testing.assert_close(p.detach(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["FSDP2", "DDP"])
def test_gradients_are_synchronised_in_the_last_part_alone(kind):
    """By a model as FSDP2 and DDP wrap one, which records when its gradients are synchronised."""
    now = [True]

    @contextlib.contextmanager
    def no_sync():
        now[0] = False
        yield
        now[0] = True

    model = SimpleNamespace(no_sync=no_sync)
    if kind == "FSDP2":
        model = SimpleNamespace(set_requires_gradient_sync=lambda on: now.__setitem__(0, on))
    noted = []
    for last in (False, False, True):
        with step._synchronise(model, last):
            noted.append(now[0])
    assert noted == [False, False, True]


def test_training_says_how_far_it_is(capsys):
    with progress.training("RETRO", 100) as report:
        for step in range(100):
            report(step, {"loss": 2.0, "tokens": 10, "waiting": 0.5})
    bars = capsys.readouterr().err.split("\r")
    assert len(bars) < 5 and "RETRO: 100%" in bars[-1] and "100/100" in bars[-1]  # a file gets a bar every 10 seconds
    assert "loss 2.000" in bars[-1] and "tokens/s" in bars[-1] and "50% waiting for data" in bars[-1]


def test_scoring_says_so_too(capsys):
    with progress.counting("scoring") as report:
        report(3, 7)
        report(7, 7)
    assert "scoring: 100%" in (said := capsys.readouterr().err) and "7/7" in said
