"""Decoding with a cache equals the whole forward pass, for any blocks."""

import pytest
import torch

from retro_kernels.testing import assert_passes, relative_error, tolerances
from retro_model.retro.cache import RetroCache
from tests.model import tiny

M = 4
EXACT = tolerances.FLOOR[torch.float64]


def decoded(model, cache, tokens, neighbours, mask, blocks, first=0):
    """Return logits of `tokens` from `first` on, fed block by block with the neighbours that each block completes."""
    outs = []
    for count in blocks:
        chunks = slice(first // M, (first + count) // M)
        inputs = {}
        if neighbours is not None and chunks.stop > chunks.start:
            inputs = {"neighbours": neighbours[:, chunks], "neighbour_mask": None if mask is None else mask[:, chunks]}
        assert cache.completes(count) == chunks.stop - chunks.start
        outs.append(model(tokens[:, first : first + count], cache=cache, **inputs))
        first += count
    return torch.cat(outs, 1)


@pytest.mark.parametrize(
    "blocks", [[1] * 23, [23], [3, 1, 4, 6, 9], [4, 4, 8, 7], [5, *[1] * 18], [2, 2, 3, 16]], ids=str
)
@pytest.mark.parametrize("mask", [None, "neighbour", "token"])
def test_blocks_equal_the_whole(blocks, mask):
    model = tiny.model(dtype=torch.float64)
    tokens, neighbours, mask = tiny.inputs(N=23, mask=mask)
    want = model(tokens, neighbours, neighbour_mask=mask)
    got = decoded(model, RetroCache(model.config, 2, 23), tokens, neighbours, mask, blocks)
    assert relative_error(got, want) < EXACT


@pytest.mark.parametrize(
    "changes", [{"cca_layers": (1, 5)}, {"encoder_cross_layers": ()}, {"share_embeddings": True, "encoder_d_model": 24}]
)
def test_other_shapes(changes):
    model = tiny.model(dtype=torch.float64, **changes)
    tokens, neighbours, mask = tiny.inputs(N=15, K=3)
    want = model(tokens, neighbours, neighbour_mask=mask)
    assert (
        relative_error(decoded(model, RetroCache(model.config, 2), tokens, neighbours, mask, [6, *[1] * 9]), want)
        < EXACT
    )


@pytest.mark.parametrize("changes", [{}, {"cca_layers": ()}])
def test_retrieval_off_and_the_baseline(changes):
    model = tiny.model(dtype=torch.float64, **changes)
    tokens = tiny.inputs(N=15)[0]
    assert (
        relative_error(decoded(model, RetroCache(model.config, 2), tokens, None, None, [6, *[1] * 9]), model(tokens))
        < EXACT
    )


def test_chunks_without_neighbours_among_chunks_with():
    """neighbours=None where a chunk completes means no neighbours, like a mask of False in the whole pass."""
    model = tiny.model(dtype=torch.float64)
    tokens, neighbours, _ = tiny.inputs(N=23, mask=None)
    for present in ([False, True, False, True, True], [True, False, True, False, False]):
        mask = torch.tensor(present).view(1, 5, 1).repeat(2, 1, 2)
        want = model(tokens, neighbours, neighbour_mask=mask)
        cache, outs = RetroCache(model.config, 2), []
        for t in range(23):
            new = neighbours[:, t // M : t // M + 1] if (t + 1) % M == 0 and present[t // M] else None
            outs.append(model(tokens[:, t : t + 1], new, cache=cache))
        assert relative_error(torch.cat(outs, 1), want) < EXACT


def test_float32_and_autocast():
    tokens, neighbours, mask = tiny.inputs(N=15)
    want = tiny.model(dtype=torch.float64)(tokens, neighbours, neighbour_mask=mask)
    model = tiny.model()
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            whole = model(tokens, neighbours, neighbour_mask=mask)
            cache = RetroCache(model.config, 2)
            got = decoded(model, cache, tokens, neighbours, mask, [6, *[1] * 9])
        assert cache.layers[0].keys.dtype == dtype
        assert_passes("logits", got, want, whole, dtype)


def test_what_is_kept_does_not_grow_with_chunks():
    model = tiny.model()
    tokens, neighbours, mask = tiny.inputs(N=23)
    cache = RetroCache(model.config, 2, 23)
    decoded(model, cache, tokens[:, :4], neighbours, mask, [4])
    before = cache.nbytes
    decoded(model, cache, tokens, neighbours, mask, [19], first=4)
    assert cache.nbytes == before
    # by hand, 4 bytes a number, H=2, D=16: keys and values, relative keys, the chunk, keys and values of neighbours,
    # tables, mask
    by_layer = 2 * (2 * 23 * 2 * 16) + 2 * 23 * 16
    by_cca = 2 * (2 * 2 * 6 * 2 * 16) + 2 * (4 + 6 - 1) * 16
    assert before == 4 * (5 * by_layer + 2 * by_cca + 2 * 4 * 24) + 2 * 2 * 6


def test_refuses():
    model = tiny.model()
    tokens, neighbours, _ = tiny.inputs(N=15)
    cache = RetroCache(model.config, 2, 12)
    with pytest.raises(ValueError, match=r"tokens: expected N <= 12 \(capacity = 12\); got N=15"):
        model(tokens, cache=cache)
    model(tokens[:, :6], neighbours[:, :1], cache=cache)
    with pytest.raises(ValueError, match=r"tokens: expected N <= 6 \(capacity = 12 after the 6 held\); got N=9"):
        model(tokens[:, 6:], cache=cache)
    with pytest.raises(
        ValueError,
        match=r"neighbours: expected \[B,L,K,R\] with L = 1 chunks that complete within these N=2 tokens.*got L=2",
    ):
        model(tokens[:, 6:8], neighbours[:, :2], cache=cache)
    with pytest.raises(ValueError, match=r"neighbours: expected \[B,L,K,R\] with K=2; got K=1"):
        model(tokens[:, 6:8], neighbours[:, 1:2, :1], cache=cache)
    with pytest.raises(ValueError, match=r"tokens: expected \[B,N\] with B=2; got B=1"):
        model(tokens[:1, 6:8], cache=cache)
    with pytest.raises(ValueError, match="cache: expected one of this model's configuration"):
        tiny.model(max_len=32)(tokens[:, :1], cache=cache)
    assert cache.positions == [6, 6]  # none of these changed the cache
    with pytest.raises(ValueError, match="capacity: expected at most max_len = 64"):
        RetroCache(model.config, 1, 65)
    with pytest.raises(TypeError, match="batch: expected an int; got float"):
        RetroCache(model.config, 1.0)
