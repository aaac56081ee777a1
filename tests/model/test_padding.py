"""Padding before a row's tokens: each row equals the row alone, whole and with a cache."""

import pytest
import torch

from retro_kernels.testing import relative_error, tolerances
from tests.model import tiny

M, LENGTHS = 4, (19, 13, 9, 2)
EXACT = tolerances.FLOOR[torch.float64]


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


def test_refuses():
    model, tokens = tiny.model(), tiny.inputs()[0]
    real = torch.ones(2, 19, dtype=torch.bool)
    for change, message in (((0, 7), "got some between them"), ((0, slice(None)), "got a row of padding")):
        mask = real.clone()
        mask[change] = False
        with pytest.raises(ValueError, match=f"token_mask: expected .*{message}"):
            model(tokens, token_mask=mask)
    with pytest.raises(ValueError, match=r"token_mask: expected \[B,N\] with N=19; got N=18"):
        model(tokens, token_mask=real[:, 1:])
    cache = model.make_cache(2)
    model(tokens, cache=cache)
    mask = real.clone()
    mask[0, 0] = False
    with pytest.raises(ValueError, match="token_mask: expected None where the cache holds tokens"):
        model(tokens, cache=cache, token_mask=mask)
