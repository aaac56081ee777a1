"""RPT against the equations: logits, index, gates, prefixes, gradients, every option."""

import numpy as np
import pytest
import torch

from retro_kernels.testing import assert_passes, relative_error, tolerances
from retro_model import RPT, RPTConfig
from retro_model.rpt import OWN
from tests.model.rpt import tiny
from tests.refusals import refused

EXACT = tolerances.FLOOR[torch.float64]

#: the ablations of Table 4, and the options
SWITCHES = {
    "plain": {},
    "sliding": {"window": "sliding"},
    "gated": {"gated_ffn": True},
    "null slot": {"null_slot": True},
    "scaled score": {"score_scale": 0.25},
    "norms": {"query_norm": True, "key_norm": True},
    "no gate": {"gate_floor": 1.0},
    "open floor": {"gate_floor": 0.0},
    "one cca": {"cca_layers": (4,)},
    "three neighbours": {"num_neighbours": 3},
    "next chunk": {"excluded_chunks": 1},
    "odd sizes": {"num_layers": 5, "cca_layers": (3, 5), "segment": 6, "chunk_len": 5},
}


def check(got, retrieved, want, want_retrieved):
    scores, index, gates = want_retrieved
    assert relative_error(got, torch.from_numpy(want)) < EXACT
    if scores is not None:
        assert relative_error(retrieved.scores, torch.from_numpy(scores)) < EXACT
    assert retrieved.index.tolist() == np.asarray(index).tolist()
    for row, ours in zip(gates, retrieved.gate.tolist()):
        assert [abs(a - b) < 1e-12 for a, b in zip(row, ours) if a is not None].count(False) == 0


@pytest.mark.parametrize("changes", SWITCHES.values(), ids=SWITCHES)
def test_equals_the_equations(changes):
    model = tiny.model(**changes)
    tokens = tiny.tokens(31)
    got, retrieved = model(tokens, return_retrieved=True)
    naive = tiny.naive(model)
    for b in range(2):
        want, want_retrieved = naive.logits(tokens[b].tolist())
        check(got[b], type(retrieved)(*(t[b] for t in retrieved)), want, want_retrieved)
    if model.config.gate_floor < 1:
        assert retrieved.gate.min() < 0.4 < 0.6 < retrieved.gate.max()  # the gate is not constant


@pytest.mark.parametrize("changes", [{}, {"null_slot": True}, {"retriever": False}], ids=str)
def test_given_neighbours_and_none(changes):
    model = tiny.model(**changes)
    tokens, naive = tiny.tokens(23, batch=1), tiny.naive(model)
    index = torch.tensor([[[-1, -1], [0, -1], [-1, 0], [2, 1], [1, 1]]])
    got, retrieved = model(tokens, index=index, return_retrieved=True)
    want, want_retrieved = naive.logits(tokens[0].tolist(), index[0].tolist())
    check(got[0], type(retrieved)(None, *(t[0] for t in retrieved[1:])), want, (None, *want_retrieved[1:]))
    off = naive.logits(tokens[0].tolist(), retrieval=False)[0]
    assert relative_error(model(tokens, retrieval=False)[0], torch.from_numpy(off)) < EXACT
    assert relative_error(got[0], torch.from_numpy(off)) > 1e-3
    if changes == {}:  # without neighbours CCA adds nothing
        assert relative_error(model(tokens, index=torch.full_like(index, -1))[0], torch.from_numpy(off)) < EXACT


def test_rows_may_mix_given_and_own_neighbours():
    model, tokens = tiny.model(), tiny.tokens(31)
    index = torch.randint(0, 1, (2, 7, 2))
    index[:, 0] = -1
    index[1] = OWN
    got = model(tokens, index=index)
    assert torch.equal(got[1], model(tokens)[1]) and not torch.equal(got[0], model(tokens)[0])


def test_the_plain_decoder():
    model = tiny.model(cca_layers=(), retriever=False)
    tokens = tiny.tokens(23)
    assert model.neighbours is None and model.gate is None and model.retriever is None
    want = tiny.naive(model).logits(tokens[0].tolist())[0]
    assert relative_error(model(tokens)[0], torch.from_numpy(want)) < EXACT


def test_more_neighbours_than_in_training():
    model, tokens = tiny.model(), tiny.tokens(31)
    want, want_retrieved = tiny.naive(model).logits(tokens[0].tolist(), k=4)
    got, retrieved = model(tokens, num_neighbours=4, return_retrieved=True)
    check(got[0], type(retrieved)(*(t[0] for t in retrieved)), want, want_retrieved)


@pytest.mark.parametrize("changes", [{}, {"null_slot": True, "window": "sliding"}, {"excluded_chunks": 1}], ids=str)
def test_prefixes_do_not_change(changes):
    model, tokens = tiny.model(**changes), tiny.tokens(43)
    whole, index = model(tokens), model.retrieve(tokens)[1]
    for n in (1, 3, 4, 7, 8, 11, 16, 19, 24, 31, 42):
        assert relative_error(model(tokens[:, :n]), whole[:, :n]) < EXACT, n
        assert torch.equal(model.retrieve(tokens[:, :n])[1], index[:, : n // 4])


def test_sizes_of_table_2():
    for name, expected in (("rpt", 242_324_480), ("retro-bm25", 236_033_024), ("transformer-xl", 202_478_592)):
        config = RPTConfig.preset(name)
        built = RPT(config, device="meta")
        matrices = [p for p in built.parameters() if p.dim() >= 2]
        assert sum(p.numel() for p in matrices) == config.num_parameters() == expected
        assert RPTConfig.from_dict(config.to_dict()) == config
    gated = RPT(tiny.config(gated_ffn=True), device="meta")
    assert sum(p.numel() for p in gated.parameters() if p.dim() >= 2) == gated.config.num_parameters()


def test_gradients_reach_every_weight():
    model, tokens = tiny.model(dtype=torch.float64, null_slot=True), tiny.tokens(43)
    logits, retrieved = model(tokens, return_retrieved=True)
    loss = logits.square().mean() + retrieved.scores[retrieved.scores.isfinite()].square().mean()
    loss.backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]


def test_gradients_equal_differences():
    """In a random direction of each part, with a fixed index; float64."""
    model, tokens = tiny.model(gate_floor=0.0), tiny.tokens(31)
    index = model.retrieve(tokens)[1]
    g = torch.Generator().manual_seed(1)
    weight = torch.randn(2, 31, tiny.VOCAB, dtype=torch.float64, generator=g)

    def value():
        logits, retrieved = model(tokens, index=index, return_retrieved=True)
        scores = retrieved.scores
        return (logits * weight).sum() + scores[scores.isfinite()].sin().sum()

    value().backward()
    names = (
        "embedding",
        "layers.1.attention.key",
        "retriever.attention.value",
        "retriever.key",
        "neighbours.attention.query",
        "neighbours.cross.key",
        "gate.attention.value",
        "gate.weight",
        "layers.3.cca.value",
        "norm",
    )
    for name in names:
        p = dict(model.named_parameters()).get(name, dict(model.named_parameters()).get(f"{name}.weight"))
        direction = torch.randn(p.shape, dtype=p.dtype, generator=g)
        with torch.no_grad():
            ends = []
            for step in (1e-5, -1e-5):
                p.add_(direction, alpha=step)
                ends.append(value())
                p.add_(direction, alpha=-step)
        assert float((ends[0] - ends[1]) / 2e-5) == pytest.approx(float((p.grad * direction).sum()), rel=1e-5), name


def test_the_retrieval_loss_reaches_the_trunk_in_the_share_asked_for():
    model, tokens = tiny.model(), tiny.tokens(31)
    grads = {}
    for share in (1.0, 0.25, 0.0):
        model.zero_grad()
        scores = model(tokens, trunk_share=share, return_retrieved=True)[1].scores
        scores[scores.isfinite()].square().sum().backward()
        grads[share] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert torch.equal(grads[0.0]["retriever.query.weight"], grads[1.0]["retriever.query.weight"])
    assert set(grads[0.0]) == {"retriever.query.weight", "retriever.key.weight"}
    torch.testing.assert_close(grads[0.25]["embedding.weight"], grads[1.0]["embedding.weight"] / 4)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_float32_and_autocast(backend):
    want = tiny.model()(tiny.tokens())
    index = tiny.model().retrieve(tiny.tokens())[1]
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            got = tiny.model(dtype=torch.float32, backend=backend)(tiny.tokens(), index=index)
            eager = tiny.model(dtype=torch.float32, backend="reference")(tiny.tokens(), index=index)
        assert_passes("logits", got, want, eager, dtype)


def test_checkpointing_and_dropout():
    """Recomputed activations give the same gradients; dropout acts in training alone and repeats with the seed."""
    grads = []
    for checkpoint in (False, True):
        model = tiny.model(checkpoint=checkpoint, dropout=0.2).train()
        torch.manual_seed(3)
        model(tiny.tokens()).square().mean().backward()
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(grads[0]) == len(grads[1]) and all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(*grads))
    assert torch.equal(model.eval()(tiny.tokens()), tiny.model()(tiny.tokens()))


def test_refuses():
    model, tokens = tiny.model(), tiny.tokens(23)
    refused(r"tokens: expected token ids from 0 to V-1 = 30; got 31", model, tokens + 1 + (30 - tokens.max()))
    with pytest.raises(ValueError, match=r"index: expected \[B,L,K\] with L = 5 chunks of 4 .*; got L=4"):
        model(tokens, index=torch.full((2, 4, 2), -1))
    with pytest.raises(ValueError, match=r"index: expected chunks before the retrieving one .*got 1 at \[0, 1, 0\]"):
        model(tokens, index=torch.ones(2, 5, 2, dtype=torch.int64).index_fill(1, torch.tensor([0]), -1))
    with pytest.raises(TypeError, match=r"index: expected torch\.int64"):
        model(tokens, index=torch.full((2, 5, 2), -1, dtype=torch.int32))
    with pytest.raises(ValueError, match="index: expected None with retrieval=False"):
        model(tokens, index=torch.full((2, 5, 2), -1), retrieval=False)
    refused(r"index: expected .* no retriever", tiny.model(retriever=False), tokens)
    refused("retrieve: expected a model with a retriever", tiny.model(retriever=False).retrieve, tokens)
    for call in (model, model.retrieve, lambda tokens, **options: model.make_cache(2, **options)):
        refused("num_neighbours: expected an int >= 1; got 0", call, tokens, num_neighbours=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cca_layers": (2, 3)}, "cca_layers: expected ascending layers of the upper half, from 3 to num_layers=4"),
        ({"cca_layers": 3}, "cca_layers: expected a tuple"),
        ({"num_heads": 3}, "num_heads: expected a divisor of d_model=32"),
        ({"window": "ring"}, "window: expected one of"),
        ({"gate_floor": 1.5}, "gate_floor: expected a number in"),
        ({"dropout": 1.0}, "dropout: expected a"),
        ({"excluded_chunks": 0}, "excluded_chunks: expected an int >= 1"),
        ({"null_slot": 1}, "null_slot: expected a bool"),
    ],
)
def test_configurations_that_cannot_be(changes, message):
    refused(message, tiny.config, **changes, error=(TypeError, ValueError))


@pytest.mark.nightly
def test_compiles_in_one_graph():
    """Forward and backward, the search included."""
    model = tiny.model(dtype=torch.float32, num_layers=2, cca_layers=(2,))
    tokens, grads = tiny.tokens(31), []
    for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        call(tokens).square().mean().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(grads[0]) == len(grads[1]) and all(torch.allclose(a, b, rtol=1e-3, atol=1e-7) for a, b in zip(*grads))
