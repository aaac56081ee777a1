"""Decoding with a cache equals the whole forward pass, for any blocks; padded rows equal each row alone."""

import pytest
import torch

from retro_kernels.testing import assert_passes, relative_error, tolerances
from retro_model.retro.cache import RetroCache
from tests.model import tiny, toys
from tests.refusals import refused

M = 4
EXACT = tolerances.FLOOR[torch.float64]


def decoded(model, cache, tokens, neighbours, mask, blocks, first=0):
    """Return logits of `tokens` from `first` on, block by block."""
    given = {"neighbours": neighbours, "neighbour_mask": mask}
    given = {name: t for name, t in given.items() if t is not None}
    return toys.in_blocks(model, cache, tokens, blocks, first=first, given=given)


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
    got = decoded(model, RetroCache(model.config, 2), tokens, neighbours, mask, [6, *[1] * 9])
    assert relative_error(got, want) < EXACT


@pytest.mark.parametrize("changes", [{}, {"cca_layers": ()}])
def test_retrieval_off_and_the_baseline(changes):
    model = tiny.model(dtype=torch.float64, **changes)
    tokens = tiny.inputs(N=15)[0]
    got = decoded(model, RetroCache(model.config, 2), tokens, None, None, [6, *[1] * 9])
    assert relative_error(got, model(tokens)) < EXACT


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
    refused(r"tokens: expected N <= 12 \(capacity = 12\); got N=15", model, tokens, cache=cache)
    model(tokens[:, :6], neighbours[:, :1], cache=cache)
    refused(r"tokens: expected N <= 6 \(capacity = 12 after the 6 held\); got N=9", model, tokens[:, 6:], cache=cache)
    message = r"neighbours: expected \[B,L,K,R\] with L = 1 chunks that complete within these N=2 tokens.*got L=2"
    refused(message, model, tokens[:, 6:8], neighbours[:, :2], cache=cache)
    with pytest.raises(ValueError, match=r"neighbours: expected \[B,L,K,R\] with K=2; got K=1"):
        model(tokens[:, 6:8], neighbours[:, 1:2, :1], cache=cache)
    refused(r"tokens: expected \[B,N\] with B=2; got B=1", model, tokens[:1, 6:8], cache=cache)
    refused("cache: expected one of this model's configuration", tiny.model(max_len=32), tokens[:, :1], cache=cache)
    assert cache.positions == [6, 6]  # none of these changed the cache
    refused("capacity: expected at most max_len = 64", RetroCache, model.config, 1, 65)
    refused("batch: expected an int; got float", RetroCache, model.config, 1.0, error=TypeError)


LENGTHS = (19, 13, 9, 2)


def padded():
    """Return rows of different lengths, each alone and all right-aligned in one batch."""
    rows = [tiny.inputs(seed=i, B=1, N=n) for i, n in enumerate(LENGTHS)]
    columns = max(LENGTHS)
    tokens, real = torch.zeros(len(rows), columns, dtype=torch.int64), torch.zeros(len(rows), columns, dtype=torch.bool)
    neighbours = torch.zeros(len(rows), columns // M, 2, 6, dtype=torch.int64)
    mask = torch.zeros_like(neighbours, dtype=torch.bool)
    for i, (t, n, k) in enumerate(rows):
        tokens[i, columns - t.shape[1] :], real[i, columns - t.shape[1] :] = t, True
        neighbours[i, : n.shape[1]], mask[i, : n.shape[1]] = n, k
    return rows, tokens, real, neighbours, mask


def test_each_row_has_what_it_has_alone():
    model = tiny.model(dtype=torch.float64)
    rows, tokens, real, neighbours, mask = padded()
    got = model(tokens, neighbours, neighbour_mask=mask, token_mask=real)
    for i, (t, n, k) in enumerate(rows):
        want = model(t, n if n.shape[1] else None, neighbour_mask=k if n.shape[1] else None)
        assert relative_error(got[i, -t.shape[1] :], want[0]) < EXACT
    assert relative_error(model(tokens, token_mask=real)[1, -13:], model(rows[1][0])[0]) < EXACT


def test_gradients_reach_every_weight_and_no_padding():
    model = tiny.model(dtype=torch.float64)
    rows, tokens, real, neighbours, mask = padded()
    model(
        tokens, neighbours, neighbour_mask=mask, token_mask=real, loss_mask=real & (real.cumsum(1) > 1)
    ).total.backward()
    whole = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for t, n, k in rows:
        inputs = (n, k) if n.shape[1] else (None, None)
        model(t, inputs[0], neighbour_mask=inputs[1], loss_mask=torch.ones_like(t)).total.backward()
    for got, parameter in zip(whole, model.parameters()):
        torch.testing.assert_close(got, parameter.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("blocks", [[18, 1], [11, *[1] * 8], [11, 2, 5, 1], [11, 8]], ids=str)
def test_a_cache_may_begin_with_padding(blocks):
    """Later blocks continue rows at different positions of their chunks."""
    model = tiny.model(dtype=torch.float64)
    _, tokens, real, neighbours, mask = padded()
    tokens, real, neighbours, mask = tokens[:3], real[:3], neighbours[:3], mask[:3]
    want = model(tokens, neighbours, neighbour_mask=mask, token_mask=real)
    cache, done, parts, begin = model.make_cache(3), [0, 0, 0], [], 0
    for count in blocks:
        ends = [max(begin + count - (19 - n), 0) // M for n in LENGTHS[:3]]
        most = max(e - d for e, d in zip(ends, done))
        new, new_mask = neighbours.new_zeros(3, most, 2, 6), mask.new_zeros(3, most, 2, 6)
        for i, (d, e) in enumerate(zip(done, ends)):
            new[i, : e - d], new_mask[i, : e - d] = neighbours[i, d:e], mask[i, d:e]
        here = real[:, :count] if begin == 0 else None
        inputs = {"neighbours": new, "neighbour_mask": new_mask} if most else {}
        parts.append(model(tokens[:, begin : begin + count], cache=cache, token_mask=here, **inputs))
        done, begin = ends, begin + count
    for i, n in enumerate(LENGTHS[:3]):
        assert relative_error(torch.cat(parts, 1)[i, -n:], want[i, -n:]) < EXACT


def test_padding_on_the_right_needs_no_care():
    model = tiny.model(dtype=torch.float64)
    tokens, neighbours, mask = tiny.inputs()
    real = torch.arange(19) < torch.tensor([[19], [9]])
    with_mask = model(tokens, neighbours, neighbour_mask=mask, token_mask=real)
    assert torch.equal(with_mask, model(tokens, neighbours, neighbour_mask=mask))


def test_refuses_padding():
    model, tokens = tiny.model(), tiny.inputs()[0]
    real = torch.ones(2, 19, dtype=torch.bool)
    for change, message in (((0, 7), "got some between them"), ((0, slice(None)), "got a row of padding")):
        mask = real.clone()
        mask[change] = False
        refused(f"token_mask: expected .*{message}", model, tokens, token_mask=mask)
    refused(r"token_mask: expected \[B,N\] with N=19; got N=18", model, tokens, token_mask=real[:, 1:])
    cache = model.make_cache(2)
    model(tokens, cache=cache)
    mask = real.clone()
    mask[0, 0] = False
    refused("token_mask: expected None where the cache holds tokens", model, tokens, cache=cache, token_mask=mask)
