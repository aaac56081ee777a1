"""A database in blocks: the stream equals one call, ties included; rescoring restores the exact order."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import retro_kernels as rk
from retro_kernels.ops.topk_chunks.stream import TopkStream, topk_merge, topk_rescore
from retro_kernels.testing import inputs
from tests.refusals import refused


def stream(kw: dict, cuts: list[int], **options):
    kw = dict(kw)
    key, docs, mask = kw.pop("key"), kw.pop("key_doc", None), kw.pop("key_mask", None)
    running = TopkStream(kw.pop("query"), kw.pop("k"), **kw, **options)
    for start, end in zip([0, *cuts], [*cuts, key.shape[1]], strict=True):
        part = slice(start, end)
        running.update(
            key[:, part],
            key_doc=None if docs is None else docs[:, part],
            key_mask=None if mask is None else mask[:, part],
        )
    return running


@settings(max_examples=40)
@given(
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 6), st.integers(0, 60), st.integers(1, 12)),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    options=st.fixed_dictionaries(
        dict(docs=st.booleans(), mask=st.booleans(), shared=st.booleans(), metric=st.sampled_from(["dot", "l2"]))
    ),
    causal=st.one_of(st.none(), st.tuples(st.integers(0, 3), st.integers(0, 60))),
    seed=st.integers(0, 99),
)
def test_stream_equals_one_call(sizes, cuts, options, causal, seed):
    B, Q, S, k = sizes
    if causal is not None:
        options = options | dict(causal_gap=causal[0], query_offset=causal[1])
    kw = inputs.topk(seed, B=B, Q=Q, S=S, D=4, k=k, integers=True, **options)
    running = stream(kw, sorted(min(cut, S) for cut in cuts), backend="reference")
    want = rk.topk_chunks(**kw, backend="reference")
    assert all(torch.equal(got, whole) for got, whole in zip(running.result(), want, strict=True))
    assert running.seen == S


def test_stream_is_differentiable():
    kw = inputs.topk(1, S=40, k=6, shared=True)
    grads = []
    for run in (lambda kw: stream(kw, [13, 20]).result(), lambda kw: rk.topk_chunks(**kw, backend="reference")):
        leaves = inputs.differentiable(kw)
        scores, _ = run(leaves)
        grads.append(torch.autograd.grad((scores * torch.arange(6.0)).sum(), (leaves["query"], leaves["key"])))
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want)


def test_merge_orders_by_score_then_index():
    a = torch.tensor([[3.0, 1.0, -torch.inf]]), torch.tensor([[9, 2, -1]])
    b = torch.tensor([[3.0, 1.0]]), torch.tensor([[4, 1]])
    scores, indices = topk_merge(*a, *b, k=6)
    assert indices.tolist() == [[4, 9, 1, 2, -1, -1]]
    assert scores.tolist() == [[3.0, 3.0, 1.0, 1.0, -torch.inf, -torch.inf]]


@pytest.mark.parametrize("metric", ["dot", "l2"])
@pytest.mark.parametrize("shared", [False, True])
def test_rescoring_bfloat16_candidates(metric, shared, monkeypatch):
    """k of 2k candidates from bfloat16 keys, rescored in float32, equal the float32 result; bfloat16 alone orders them
    wrongly.
    """
    kw = inputs.topk(3, Q=30, S=300, D=32, k=8, shared=shared, metric=metric)
    half = inputs.cast(kw, torch.bfloat16)
    want = rk.topk_chunks(**kw, backend="reference")
    assert not torch.equal(rk.topk_chunks(**half, backend="reference")[1], want[1])
    _, candidates = stream(half, [100], keep=16, backend="reference").candidates()
    assert candidates.shape[-1] == 16
    monkeypatch.setattr("retro_kernels.ops.topk_chunks.stream.RESCORE_ELEMENTS", 10000)  # several blocks of queries
    scores, indices = topk_rescore(kw["query"], kw["key"], candidates, 8, metric=metric)
    assert torch.equal(indices, want[1])
    torch.testing.assert_close(scores, want[0])


def test_rescoring_keeps_empty_slots_empty():
    kw = inputs.topk(4, S=3, k=5)
    scores, indices = rk.topk_chunks(**kw, backend="reference")
    again = topk_rescore(kw["query"], kw["key"], indices, 5)
    assert torch.equal(again[1], indices)
    torch.testing.assert_close(again[0], scores)


def test_stream_says_what_is_wrong():
    query = torch.zeros(1, 2, 4)
    refused("update", TopkStream(query, 3).result)
    refused("keep", TopkStream, query, 3, keep=2)
