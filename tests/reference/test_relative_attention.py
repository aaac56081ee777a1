"""The definition of relative attention and its logits: explicit loops, gradcheck, and torch's own attention."""

import math

import pytest
import torch

import retro_kernels as rk
from retro_kernels.testing import inputs
from tests.reference import gradients

F64 = torch.float64


def loops(kw):
    """Every option by an explicit loop over (i, j), one batch entry and head at a time."""
    query, key, value = kw["query"], kw["key"], kw["value"]
    b, n, h, d = query.shape
    s, groups = key.shape[1:3]
    offsets = kw.get("query_offset")
    offsets = (s - n if kw.get("causal") else 0) if offsets is None else offsets
    block = kw.get("window_block")
    out = torch.zeros_like(query)
    for batch in range(b):
        offset = offsets if isinstance(offsets, int) else offsets[batch].item()
        start = kw["rel_start"] if kw.get("rel_start") is not None else offset - (s - 1)
        for head in range(h):
            for i in range(n):
                logits = {}
                for j in range(s):
                    displacement = i + offset - j
                    hidden = (
                        (kw.get("causal") and displacement < kw.get("causal_gap", 0))
                        or (kw.get("window") is not None and displacement >= kw["window"])
                        or (block is not None and j < block * ((i + offset) // block - 1))
                        or ("key_mask" in kw and not kw["key_mask"][batch, j])
                        or ("query_segment" in kw and kw["query_segment"][batch, i] != kw["key_segment"][batch, j])
                    )
                    if hidden:
                        continue
                    q = query[batch, i, head]
                    logit = (q + kw["content_bias"][head]) @ key[batch, j, head * groups // h]
                    row = displacement - start
                    table = kw["rel_key"][head if kw["rel_key"].shape[0] > 1 else 0]
                    if 0 <= row < len(table):
                        rq = kw["rel_query"][batch, i, head] if "rel_query" in kw else q
                        logit = logit + (rq + kw["position_bias"][head]) @ table[row]
                    logits[j] = logit / math.sqrt(d)
                if logits:
                    weights = torch.stack(list(logits.values())).softmax(0)
                    out[batch, i, head] = sum(
                        w * value[batch, j, head * groups // h] for w, j in zip(weights, logits, strict=True)
                    )
    return out


CASES = [
    dict(),
    dict(causal=True),
    dict(causal=True, causal_gap=1),
    dict(causal=True, window=3),
    dict(window=2, query_offset=3),
    dict(causal=True, N=3, S=8),
    dict(causal=True, N=8, S=3),
    dict(N=1, S=5, query_offset=-2),
    dict(key_mask=True, segments=True),
    dict(E=3, heads="shared", rel="bounded", rel_start=-2, T=4, H=4, G=2),
    dict(causal=True, rel="bounded", rel_start=0, T=3, E=1),
    dict(causal=True, window_block=2),
    dict(window_block=2, query_offset=-3, S=9),
    dict(causal=True, query_offset=torch.tensor([3, -2]), S=7, rel="bounded", rel_start=-1, T=5),
    dict(window=3, query_offset=torch.tensor([8, 2]), S=7, rel="bounded", rel_start=-1, T=5, key_mask=True),
    dict(causal=True, window_block=3, query_offset=torch.tensor([0, 5]), S=11, rel="bounded", rel_start=0, T=6),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_loops(case):
    kw = inputs.self_attention(1, dtype=F64, **{"N": 6, "H": 2, **case})
    torch.testing.assert_close(rk.relative_attention(**kw, backend="reference"), loops(kw), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradcheck(case):
    kw = inputs.differentiable(inputs.self_attention(2, dtype=F64, **{"N": 4, "H": 2, **case}))
    gradients.check(rk.relative_attention, kw)


def test_without_positions_it_is_torchs_attention():
    kw = inputs.self_attention(3, dtype=F64, rel=None, biases=False)
    for causal in (False, True):
        mine = rk.relative_attention(**kw, causal=causal)
        theirs = torch.nn.functional.scaled_dot_product_attention(
            *(kw[n].transpose(1, 2) for n in ("query", "key", "value")), is_causal=causal
        )
        torch.testing.assert_close(mine, theirs.transpose(1, 2))


def test_logits_by_hand():
    rel_key = torch.arange(5.0, dtype=F64).view(1, 5, 1)
    got = rk.relative_logits(torch.ones(1, 3, 1, 1, dtype=F64), rel_key, key_len=3)
    assert got[0, 0].tolist() == [[2, 1, 0], [3, 2, 1], [4, 3, 2]]
    bounded = rk.relative_logits(torch.ones(1, 3, 1, 1, dtype=F64), rel_key[:, 3:4], key_len=3, rel_start=1)
    assert bounded[0, 0].tolist() == [[0, 0, 0], [3, 0, 0], [0, 3, 0]]


def test_logits_gradcheck():
    kw = inputs.differentiable(inputs.relative_logits(5, dtype=F64, B=1, N=3, H=2, E=2, key_len=4))
    assert torch.autograd.gradcheck(
        lambda q, r, v: rk.relative_logits(q, r, key_len=4, position_bias=v),
        (kw["query"], kw["rel_key"], kw["position_bias"]),
    )
