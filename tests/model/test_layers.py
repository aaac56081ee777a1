"""The layers alone, as in a model of a user."""

import math

import pytest
import torch
from torch import nn

from retro_kernels.testing import relative_error, tolerances
from retro_kernels.testing.inputs import generator, randn
from retro_model.layers import (
    ChunkedCrossAttention,
    FeedForward,
    RelativeAttention,
    RelativePositions,
    encode_displacements,
)
from retro_model.retro.encoder import NeighbourEncoder
from tests.model import tiny

DOUBLE = {"dtype": torch.float64}
EXACT = tolerances.FLOOR[torch.float64]


def randomised(module: nn.Module) -> nn.Module:
    """Every parameter random, biases and u and v included."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)
    return module


def test_encodings_by_hand():
    got = encode_displacements(-2, 5, 4, **DOUBLE)
    want = [[math.sin(d), math.sin(d / 100), math.cos(d), math.cos(d / 100)] for d in range(-2, 3)]
    assert relative_error(got, torch.tensor(want, **DOUBLE)) < EXACT


def test_encodings_in_half_precision_are_rounded_once():
    """bfloat16 cannot hold angles up to a sequence's length: the encoding is computed wider and rounded."""
    got = encode_displacements(0, 2048, 64, dtype=torch.bfloat16)
    assert (got.double() - encode_displacements(0, 2048, 64, **DOUBLE)).abs().max() < torch.finfo(torch.bfloat16).eps


def test_rows_of_relative_keys():
    positions = RelativePositions(8, 2, 16, **DOUBLE)
    rel_key = positions(-3, 6)
    assert rel_key.shape == (2, 6, 16)
    assert relative_error(rel_key[:, 4], positions(1, 1)[:, 0]) < EXACT
    by_hand = positions.projection.weight @ encode_displacements(1, 1, 8, **DOUBLE)[0]
    assert relative_error(rel_key[:, 4].reshape(-1), by_hand) < EXACT
    assert [name for name, _ in positions.named_parameters()] == ["projection.weight"]


@pytest.mark.parametrize("bias", [False, True])
def test_tokens_that_attend_nothing_get_exactly_nothing(bias):
    torch.manual_seed(1)
    layer = randomised(ChunkedCrossAttention(8, 2, 16, chunk_len=4, context_dim=6, bias=bias))
    x, encoded = torch.randn(2, 15, 8), torch.randn(2, 3, 2, 5, 6)
    mask = torch.ones(2, 3, 2, dtype=torch.bool)
    mask[1, 1] = False  # chunk 1 of row 1 has no neighbours: tokens 7 to 10 attend nothing
    nothing = torch.zeros(2, 15, dtype=torch.bool)
    nothing[:, :3] = nothing[1, 7:11] = True
    update = layer(x, encoded, neighbour_mask=mask)
    assert torch.equal((update == 0).all(-1), nothing) and torch.equal((update == 0).any(-1), nothing)
    update.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    if bias:
        assert torch.equal(layer.output.bias.grad, torch.full((8,), float((~nothing).sum())))


@pytest.mark.parametrize("R", [3, 8, 11])
def test_cross_attention_continues_at_any_position(R):
    torch.manual_seed(2)
    layer = randomised(ChunkedCrossAttention(8, 2, 16, chunk_len=4, context_dim=6, bias=True, **DOUBLE))
    x, encoded = torch.randn(1, 15, 8, **DOUBLE), torch.randn(1, 3, 2, R, 6, **DOUBLE)
    whole = layer(x, encoded)
    for start in range(15):
        assert relative_error(layer(x[:, start:], encoded, query_start=start), whole[:, start:]) < EXACT


def test_grouped_queries_are_repeated_key_heads():
    torch.manual_seed(3)
    for make, args in (
        (
            lambda **kw: RelativeAttention(8, 4, 16, causal=True, bias=True, **kw, **DOUBLE),
            (torch.randn(2, 6, 8, **DOUBLE),),
        ),
        (
            lambda **kw: ChunkedCrossAttention(8, 4, 16, chunk_len=4, bias=True, **kw, **DOUBLE),
            (torch.randn(2, 9, 8, **DOUBLE), torch.randn(2, 2, 2, 5, 8, **DOUBLE)),
        ),
    ):
        grouped = randomised(make(num_kv_heads=2))
        state = grouped.state_dict()
        for name in ("key", "value"):
            for part in ("weight", "bias"):
                state[f"{name}.{part}"] = (
                    state[f"{name}.{part}"].unflatten(0, (2, 16)).repeat_interleave(2, 0).flatten(0, 1)
                )
        full = make()
        full.load_state_dict(state)
        assert relative_error(grouped(*args), full(*args)) < EXACT


def test_causal_attention_continues_from_a_context():
    torch.manual_seed(4)
    layer = randomised(RelativeAttention(8, 2, 16, causal=True, **DOUBLE))
    x = torch.randn(2, 9, 8, **DOUBLE)
    whole = layer(x)
    assert relative_error(layer(x[:, 6:], x), whole[:, 6:]) < EXACT
    assert relative_error(layer(x[:, 4:6], x[:, :7], query_offset=4), whole[:, 4:6]) < EXACT


def test_bidirectional_attention_depends_on_displacement_alone():
    """Hidden keys before and after shift every position: only the rows move."""
    torch.manual_seed(5)
    layer = randomised(RelativeAttention(8, 2, 16, **DOUBLE))
    x = torch.randn(1, 5, 8, **DOUBLE)
    padded = torch.cat([torch.randn(1, 3, 8, **DOUBLE), x, torch.randn(1, 2, 8, **DOUBLE)], 1)
    mask = torch.zeros(1, 10, dtype=torch.bool)
    mask[:, 3:8] = True
    assert relative_error(layer(padded, key_mask=mask)[:, 3:8], layer(x)) < EXACT
    assert relative_error(layer(x.flip(1)).flip(1), layer(x)) > 1e-3  # direction matters


def test_feed_forward_by_hand():
    torch.manual_seed(6)
    layer = randomised(FeedForward(2, 3, bias=True, **DOUBLE))
    x = torch.randn(2, **DOUBLE)
    inner = layer.inner.weight @ x + layer.inner.bias
    gelu = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
    assert relative_error(layer(x), layer.output.weight @ gelu + layer.output.bias) < EXACT


def encoder_inputs():
    config = tiny.config(encoder_cross_layers=(1, 2))
    torch.manual_seed(7)
    encoder = randomised(NeighbourEncoder(config, nn.Embedding(tiny.VOCAB, 20, **DOUBLE), **DOUBLE)).eval()
    g = generator(0)
    return encoder, torch.randint(0, tiny.VOCAB, (2, 3, 2, 6), generator=g), randn(g, 2, 3, 4, 24, dtype=torch.float64)


def test_neighbours_are_encoded_independently():
    encoder, neighbours, chunks = encoder_inputs()
    base = encoder(neighbours, chunks)
    changed = neighbours.clone()
    changed[1, 2, 0, 3] = (changed[1, 2, 0, 3] + 1) % tiny.VOCAB
    differs = (encoder(changed, chunks) != base).any(-1)
    # every token of that neighbour: attention is bidirectional
    assert differs[1, 2, 0].all() and differs.sum() == 6
    altered = chunks.clone()
    altered[0, 1, 3] += 1
    differs = (encoder(neighbours, altered) != base).any(-1)
    assert differs[0, 1].all() and differs.sum() == 12  # both neighbours of that chunk


def test_a_neighbour_cut_short_is_encoded_as_the_shorter_one():
    encoder, neighbours, chunks = encoder_inputs()
    mask = torch.arange(6) < torch.tensor([4, 4]).view(2, 1)
    got = encoder(neighbours, chunks, neighbour_mask=mask.expand(2, 3, 2, 6))
    assert relative_error(got[..., :4, :], encoder(neighbours[..., :4], chunks)) < EXACT


def test_missing_neighbours_are_encoded_without_nan():
    encoder, neighbours, chunks = encoder_inputs()
    got = encoder(neighbours, chunks, neighbour_mask=torch.zeros(2, 3, 2, dtype=torch.bool))
    assert got.isfinite().all()


def cca(chunks, **options):
    """Chunked cross-attention of 8 tokens to the neighbours of some chunks."""
    layer = ChunkedCrossAttention(8, 2, 16, **{"chunk_len": 4} | options)
    return layer(torch.zeros(1, 8, 8), torch.zeros(1, chunks, 2, 5, 8))


x = torch.zeros(2, 3, 8)
REFUSED = {
    "d_model: expected an even width": lambda: RelativePositions(7, 2, 16),
    "num_kv_heads: expected a divisor of num_heads=3; got 2": lambda: RelativeAttention(8, 3, 16, num_kv_heads=2),
    r"x: expected \[B,N,d_model\] with d_model=8": lambda: RelativeAttention(8, 2, 16)(x[..., :6]),
    "context: expected": lambda: RelativeAttention(8, 2, 16, context_dim=4)(x, x),
    "head_dim: expected a multiple of 8 from 16 to 256; got 12": lambda: RelativeAttention(8, 2, 12),
    "num_heads: expected an int >= 1; got 0": lambda: RelativeAttention(8, 0, 16),
    "num_kv_heads: expected an int >= 1; got 0": lambda: RelativeAttention(8, 2, 16, num_kv_heads=0),
    r"dropout: expected a probability in \[0, 1\); got 1.0": lambda: RelativeAttention(8, 2, 16, dropout=1.0),
    "chunk_len: expected an int >= 1; got 0": lambda: cca(2, chunk_len=0),
    "backend: expected None or one of": lambda: RelativeAttention(8, 2, 16, backend="numpy")(x),
    r"L >= 2 chunks for N=8, chunk_len=4; got L=1": lambda: cca(1),
    r"encoded: expected \[B,L,K,R,context_dim\] with context_dim=6; got context_dim=8": lambda: cca(2, context_dim=6),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refuses(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


def test_the_encoder_refuses():
    encoder, neighbours, chunks = encoder_inputs()
    with pytest.raises(ValueError, match=r"chunks: expected \[B,L,M,d\] with d=24"):
        encoder(neighbours, chunks[..., :20])
    with pytest.raises(ValueError, match=r"chunks: expected \[B,L,M,d\] with L=3; got L=2"):
        encoder(neighbours, chunks[:, :2])
    with pytest.raises(TypeError, match=r"neighbour_mask: expected torch\.bool"):
        encoder(neighbours, chunks, neighbour_mask=torch.ones(2, 3, 2))
    with pytest.raises(
        ValueError, match=f"neighbours: expected token ids from 0 to V-1 = {tiny.VOCAB - 1}; got {tiny.VOCAB}"
    ):
        encoder(torch.full_like(neighbours, tiny.VOCAB), chunks)
    with pytest.raises(TypeError, match=r"neighbours: expected torch\.int64 token ids; got torch\.float32"):
        encoder(neighbours.float(), chunks)
    with pytest.raises(ValueError, match="embedding: expected one of width encoder_d_model=20; got 8"):
        NeighbourEncoder(encoder.config, torch.nn.Embedding(tiny.VOCAB, 8))
