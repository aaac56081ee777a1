"""The definition: gradcheck, cases by hand, and an independent formulation after the paper's Listing 1."""

import math

import pytest
import torch

import retro_kernels as rk
from retro_kernels.testing import inputs
from tests.reference import gradients

F64 = torch.float64


def listing_one(kw):
    """Borgeaud et al., Listing 1: drop the first M-1 tokens, pad the end, reshape to chunks, attend, shift back.

    Positions by an explicit loop over (i, j); float64; no gate, masks or grouped heads.
    """
    query, key, value, m = kw["query"], kw["key"], kw["value"], kw["chunk_len"]
    b, n, h, d = query.shape
    chunks, k, r = key.shape[1:4]
    shifted = torch.nn.functional.pad(query[:, m - 1 :], (0, 0, 0, 0, 0, m - 1))[:, : chunks * m]
    shifted = torch.nn.functional.pad(shifted, (0, 0, 0, 0, 0, chunks * m - shifted.shape[1]))
    attending = shifted.reshape(b, chunks, m, h, d)
    out = torch.zeros(b, chunks, m, h, d, dtype=query.dtype)
    for i in range(m):
        logits = torch.empty(b, chunks, h, k, r, dtype=query.dtype)
        for j in range(r):
            row = kw["rel_key"][:, (i - j) + (r - 1)]  # the paper's d(i,i') counted from its smallest
            content = torch.einsum("bchd,bckhd->bchk", attending[:, :, i] + kw["content_bias"], key[:, :, :, j])
            position = torch.einsum("bchd,hd->bch", attending[:, :, i] + kw["position_bias"], row)
            logits[..., j] = (content + position[..., None]) / math.sqrt(d)
        weights = logits.flatten(3).softmax(-1).view_as(logits)
        out[:, :, i] = torch.einsum("bchkr,bckrhd->bchd", weights, value)
    out = torch.nn.functional.pad(out.reshape(b, chunks * m, h, d), (0, 0, 0, 0, m - 1, 0))
    return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, max(n - out.shape[1], 0)))[:, :n]


@pytest.mark.parametrize("n, m, k, r", [(16, 4, 2, 8), (12, 4, 1, 3), (9, 3, 3, 1), (8, 1, 2, 2), (64, 16, 2, 32)])
def test_against_listing_one(n, m, k, r):
    kw = inputs.cross_attention(1, dtype=F64, N=n, M=m, K=k, R=r, H=2)
    torch.testing.assert_close(
        rk.chunked_cross_attention(**kw, backend="reference"), listing_one(kw), rtol=1e-12, atol=1e-12
    )


def test_last_token_attends_the_last_chunk():
    """N = L*M: in the paper's Listing 1 the padding is cut, so that the last token attends E_l."""
    kw = inputs.cross_attention(2, dtype=F64, N=8, M=4)
    _, lse = rk.chunked_cross_attention(**kw, return_lse=True)
    assert lse.isfinite()[0, 0].tolist() == [False] * 3 + [True] * 5
    kw["key"][:, 1] += 1
    _, other = rk.chunked_cross_attention(**kw, return_lse=True)
    assert (other != lse)[0, 0].tolist() == [False] * 7 + [True]


def test_worked_by_hand():
    """M=2, one neighbour of two tokens, D=16 with one non-zero entry: logits and weights are computed on paper."""
    e = torch.eye(16, dtype=F64)[0]
    query = torch.stack([0 * e, 1 * e, 2 * e]).view(1, 3, 1, 16)
    key = torch.stack([1 * e, 3 * e]).view(1, 1, 1, 2, 1, 16)
    value = torch.stack([10 * e, 20 * e]).view(1, 1, 1, 2, 1, 16)
    rel_key = torch.stack([0.5 * e, 0 * e, 0.25 * e]).view(1, 3, 16)  # displacements -1, 0, 1
    out, lse = rk.chunked_cross_attention(query, key, value, chunk_len=2, rel_key=rel_key, scale=1.0, return_lse=True)
    # token 0 attends nothing; token 1 has i=0, q=1: logits 1*1 + 1*0,
    # 1*3 + 1*0.5; token 2 has i=1, q=2: 2*1 + 2*0.25, 2*3 + 0
    first, second = (1.0, 3.5), (2.5, 6.0)
    for token, (a, b) in ((1, first), (2, second)):
        total = math.exp(a) + math.exp(b)
        assert lse[0, 0, token].item() == pytest.approx(math.log(total), abs=1e-12)
        assert out[0, token, 0, 0].item() == pytest.approx((10 * math.exp(a) + 20 * math.exp(b)) / total, abs=1e-12)
    assert lse[0, 0, 0].item() == -math.inf and (out[0, 0] == 0).all() and (out[..., 1:] == 0).all()


def test_gate_by_hand():
    """A gate of 0 leaves the neighbour's position logits and a value of 0: it takes probability and adds nothing."""
    kw = inputs.cross_attention(3, dtype=F64, K=2, rel=None, biases=False)
    gate = torch.tensor([1.0, 0.0], dtype=F64).expand(kw["key"].shape[:3]).contiguous()
    out, lse = rk.chunked_cross_attention(**kw, neighbour_gate=gate, return_lse=True)
    alone = {**kw, "key": kw["key"][:, :, :1], "value": kw["value"][:, :, :1]}
    one, lse_one = rk.chunked_cross_attention(**alone, return_lse=True)
    zeros = math.log(6)  # R=6 logits of 0
    rows = lse_one.isfinite()[0, 0].nonzero().flatten()
    expected = torch.logaddexp(lse_one, torch.tensor(zeros, dtype=F64))
    torch.testing.assert_close(lse[:, :, rows], expected[:, :, rows])
    share = (lse_one - expected).exp()[:, :, rows].transpose(1, 2).unsqueeze(-1)
    torch.testing.assert_close(out[:, rows], share * one[:, rows])


def test_neighbour_order_does_not_matter():
    kw = inputs.cross_attention(4, dtype=F64, K=3, mask="token", gate=True)
    order = [2, 0, 1]
    swapped = {n: kw[n][:, :, order] for n in ("key", "value", "neighbour_mask", "neighbour_gate")}
    torch.testing.assert_close(rk.chunked_cross_attention(**{**kw, **swapped}), rk.chunked_cross_attention(**kw))


@pytest.mark.parametrize(
    "case",
    [
        dict(),
        dict(gate=True, mask="token", H=4, G=2),
        dict(E=3, heads="shared", rel="bounded", rel_start=-3, T=5),
        dict(query_start=5, N=4, mask="neighbour"),
        dict(rel=None, biases=False, gate=True),
    ],
    ids=str,
)
def test_gradcheck(case):
    kw = inputs.differentiable(inputs.cross_attention(5, dtype=F64, **{"B": 1, "N": 9, "M": 3, "R": 4, "H": 2, **case}))
    gradients.check(rk.chunked_cross_attention, kw)


def test_dropout_keeps_the_mean_and_the_share():
    kw = inputs.cross_attention(6, dtype=F64, B=1, N=67, M=64, R=128, K=8, H=4, rel=None, biases=False, dropout_p=0.25)
    kw["query"] = torch.zeros_like(kw["query"])  # uniform probabilities: an output entry is a mean over kept values
    kw["value"] = torch.ones_like(kw["value"])
    out = rk.chunked_cross_attention(**kw)[:, 63:]
    kept = out * 0.75  # the share of the 1024 probabilities that were kept
    assert abs(kept.mean().item() - 0.75) < 0.02 and kept.std() > 0
    assert torch.equal(kept[..., 0], kept[..., 1])  # one draw a probability, not a channel
