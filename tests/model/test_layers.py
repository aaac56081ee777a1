"""The layers alone, as in a model of a user; weights that copy from the first step, and the sizes they need."""

import math

import pytest
import torch
from torch import nn

from retro_kernels.ops import rms_norm
from retro_kernels.testing import relative_error, tolerances
from retro_model import layers
from retro_model.layers import (
    ChunkedCrossAttention,
    FeedForward,
    RelativeAttention,
    RelativePositions,
    copying,
    encode_displacements,
)
from retro_model.retro import Retro
from retro_model.retro.config import RetroConfig
from retro_model.retro.encoder import NeighbourEncoder
from tests.model import tiny
from tests.refusals import refused

DOUBLE = {"dtype": torch.float64}
EXACT = tolerances.FLOOR[torch.float64]


def randomised(module: nn.Module) -> nn.Module:
    """Every parameter random, biases and u and v included."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)
    return module


def test_encodings_in_half_precision_are_rounded_once():
    """bfloat16 cannot hold angles up to a sequence's length: the encoding is computed wider and rounded."""
    got = encode_displacements(0, 2048, 64, dtype=torch.bfloat16)
    assert (got.double() - encode_displacements(0, 2048, 64, **DOUBLE)).abs().max() < torch.finfo(torch.bfloat16).eps


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
    x, encoded = torch.randn(2, 9, 8, **DOUBLE), torch.randn(2, 2, 2, 5, 8, **DOUBLE)
    for kind, options, args in (
        (RelativeAttention, {"causal": True}, (x,)),
        (ChunkedCrossAttention, {"chunk_len": 4}, (x, encoded)),
    ):
        options |= {"bias": True, **DOUBLE}
        grouped = randomised(kind(8, 4, 16, num_kv_heads=2, **options))
        state = grouped.state_dict()
        for name in ("key", "value"):
            for part in ("weight", "bias"):
                heads = state[f"{name}.{part}"].unflatten(0, (2, 16))
                state[f"{name}.{part}"] = heads.repeat_interleave(2, 0).flatten(0, 1)
        full = kind(8, 4, 16, **options)
        full.load_state_dict(state)
        assert relative_error(grouped(*args), full(*args)) < EXACT


def test_causal_attention_continues_from_a_context():
    torch.manual_seed(4)
    layer = randomised(RelativeAttention(8, 2, 16, causal=True, **DOUBLE))
    x = torch.randn(2, 9, 8, **DOUBLE)
    whole = layer(x)
    assert relative_error(layer(x[:, 6:], x), whole[:, 6:]) < EXACT
    assert relative_error(layer(x[:, 4:6], x[:, :7], query_offset=4), whole[:, 4:6]) < EXACT


def test_feed_forward_by_hand():
    torch.manual_seed(6)
    layer = randomised(FeedForward(2, 3, bias=True, **DOUBLE))
    x = torch.randn(2, **DOUBLE)
    inner = layer.inner.weight @ x + layer.inner.bias
    gelu = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
    assert relative_error(layer(x), layer.output.weight @ gelu + layer.output.bias) < EXACT


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
    refused(message, REFUSED[message])


def test_the_encoder_refuses():
    encoder = NeighbourEncoder(tiny.config(), nn.Embedding(tiny.VOCAB, 20))
    neighbours, chunks = torch.zeros(2, 3, 2, 6, dtype=torch.int64), torch.zeros(2, 3, 4, 24)
    refused(r"chunks: expected \[B,L,M,d\] with d=24", encoder, neighbours, chunks[..., :20])
    refused(r"chunks: expected \[B,L,M,d\] with L=3; got L=2", encoder, neighbours, chunks[:, :2])
    with pytest.raises(TypeError, match=r"neighbour_mask: expected torch\.bool"):
        encoder(neighbours, chunks, neighbour_mask=torch.ones(2, 3, 2))
    message = f"neighbours: expected token ids from 0 to V-1 = {tiny.VOCAB - 1}; got {tiny.VOCAB}"
    refused(message, encoder, torch.full_like(neighbours, tiny.VOCAB), chunks)
    with pytest.raises(TypeError, match=r"neighbours: expected torch\.int64 token ids; got torch\.float32"):
        encoder(neighbours.float(), chunks)
    with pytest.raises(ValueError, match="embedding: expected one of width encoder_d_model=20; got 8"):
        NeighbourEncoder(encoder.config, torch.nn.Embedding(tiny.VOCAB, 8))


def test_the_norm_is_torchs_module():
    ours, theirs = layers.RMSNorm(128), torch.nn.RMSNorm(128)
    assert isinstance(ours, type(theirs)) and list(ours.state_dict()) == list(theirs.state_dict())
    assert torch.equal(ours.weight, theirs.weight) and repr(ours) == repr(theirs)
    x = torch.randn(4, 256, 128)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), theirs(x), rtol=1e-5, atol=1e-5)


def test_norms_that_only_torch_serves(monkeypatch):
    monkeypatch.setattr(rms_norm, "RMSNorm", None)
    x = torch.randn(100, 384)
    assert layers.RMSNorm((4, 96), eps=1e-6)(x.view(100, 4, 96)).shape == (100, 4, 96)
    assert layers.RMSNorm(384, elementwise_affine=False)(x).shape == x.shape


def test_a_module_of_another_width_says_so():
    refused(r"input: expected \[\.\.\.,D\] with D=96; got \[100, 384\]", layers.RMSNorm(96), torch.randn(100, 384))


COPYING = RetroConfig.small(300, 64, 128, num_heads=2, num_layers=3, chunk_len=8, share_embeddings=True, max_len=64)


def ranks(model: Retro) -> tuple[float, float]:
    """Return mean ranks, with and without retrieval, of the token that follows the current one in the neighbour."""
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, 300, (16, 16), generator=g)
    neighbours = torch.randint(2, 300, (16, 2, 1, 16), generator=g)
    neighbours[:, 0, 0, 3:11] = tokens[:, 8:]  # chunk 0's neighbour contains chunk 1, shifted
    target = tokens[:, 9:]

    def rank(logits):
        logits = logits[:, 8:15]
        return (logits > logits.gather(-1, target[..., None])).sum(-1).float().mean().item()

    with torch.no_grad():
        return rank(model(tokens, neighbours)), rank(model(tokens))


def repeated_rank(model: Retro) -> float:
    """Return the mean rank of the token that followed the current one earlier in the context."""
    tokens = torch.randint(2, 300, (16, 8), generator=torch.Generator().manual_seed(1)).repeat(1, 2)
    with torch.no_grad():
        logits = model(tokens)[:, 8:15]
    return (logits > logits.gather(-1, tokens[:, 9:, None])).sum(-1).float().mean().item()


def test_retro_copies_from_neighbours_before_it_has_learned_anything():
    torch.manual_seed(0)
    model = Retro(COPYING)
    unprepared = ranks(model)
    copying.start_copying(model)
    on, off = ranks(model)
    assert on < 40 and off > 100  # of 300 tokens; chance is 149.5
    assert min(unprepared) > 100


@pytest.mark.parametrize("config", [COPYING, COPYING.baseline()], ids=["retro", "baseline"])
def test_both_copy_from_their_own_context(config):
    torch.manual_seed(0)
    model = Retro(config)
    unprepared = repeated_rank(model)
    copying.start_copying(model)
    assert repeated_rank(model) < 30 and unprepared > 100


def test_retro_and_its_baseline_begin_with_the_same_circuit():
    models = [Retro(COPYING), Retro(COPYING.baseline())]
    for model in models:
        copying.start_copying(model, 5)
    a, b = (dict(model.named_parameters()) for model in models)
    for name in (
        "embedding.weight",
        "readout.weight",
        "layers.0.attention.output.weight",
        "layers.1.attention.key.weight",
    ):
        assert torch.equal(a[name], b[name])


@pytest.mark.parametrize("change", [{"share_embeddings": False}, {"num_heads": 4}, {"cca_layers": (1,)}])
def test_sizes_that_do_not_fit_are_refused(change):
    refused("share_embeddings", copying.start_copying, Retro(COPYING.replace(**change)))
