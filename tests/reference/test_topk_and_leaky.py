"""The definitions of topk_chunks and leaky_average: loops in plain Python, gradcheck, edge cases."""

import pytest
import torch

import retro_kernels as rk
from retro_kernels.testing import inputs

F64 = torch.float64

CASES = [
    dict(),
    dict(metric="l2"),
    dict(shared=True, docs=True),
    dict(mask=True, causal_gap=2, query_offset=9),
    dict(causal_gap=0, k=9),
    dict(S=3, k=7),
    dict(docs=True, mask=True, causal_gap=1, query_offset=4, metric="l2", shared=True),
]


def brute_force(kw):
    """One score at a time, sorted by (-score, index)."""
    scores, indices = [], []
    for b, queries in enumerate(kw["query"]):
        key = kw["key"][b if kw["key"].shape[0] > 1 else 0]
        for i, q in enumerate(queries):
            pairs = []
            for j, x in enumerate(key):
                last = (
                    i + kw.get("query_offset", 0) - kw["causal_gap"] if kw.get("causal_gap") is not None else len(key)
                )
                doc = kw["key_doc"][b if kw["key_doc"].shape[0] > 1 else 0, j] if "key_doc" in kw else None
                masked = "key_mask" in kw and not kw["key_mask"][b if kw["key_mask"].shape[0] > 1 else 0, j]
                if j > last or masked or (doc is not None and doc == kw["query_doc"][b, i]):
                    continue
                pairs.append(
                    (float((q * x).sum()) if kw.get("metric", "dot") == "dot" else -float((q - x).square().sum()), j)
                )
            pairs = sorted(pairs, key=lambda pair: (-pair[0], pair[1]))[: kw["k"]] + [(-torch.inf, -1)] * kw["k"]
            scores.append([s for s, _ in pairs[: kw["k"]]])
            indices.append([j for _, j in pairs[: kw["k"]]])
    shape = (*kw["query"].shape[:2], kw["k"])
    return torch.tensor(scores, dtype=F64).view(shape), torch.tensor(indices).view(shape)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_topk_against_brute_force(case):
    kw = inputs.topk(1, dtype=F64, integers=True, **case)
    scores, indices = rk.topk_chunks(**kw, backend="reference")
    want_scores, want_indices = brute_force(kw)
    assert torch.equal(indices, want_indices) and torch.equal(scores, want_scores)


def test_topk_is_float32_and_skips_nan():
    kw = inputs.topk(2, dtype=torch.bfloat16, S=4, k=4)
    kw["key"][:, 2] = torch.nan
    scores, indices = rk.topk_chunks(**kw, backend="reference")
    assert scores.dtype == torch.float32 and indices.dtype == torch.int64
    assert (indices[..., 3] == -1).all() and (scores[..., 3] == -torch.inf).all() and not (indices == 2).any()


@pytest.mark.parametrize("metric", ["dot", "l2"])
def test_topk_masked_keys_may_hold_anything(metric):
    kw = inputs.differentiable(inputs.topk(5, mask=True, shared=True, metric=metric))
    masked = kw["key"].detach().masked_fill(~kw["key_mask"].unsqueeze(-1), torch.nan).requires_grad_()
    results = []
    for key in (kw["key"], masked):
        scores, indices = rk.topk_chunks(**{**kw, "key": key}, backend="reference")
        results.append([scores, indices, *torch.autograd.grad(scores.sum(), (kw["query"], key))])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("metric", ["dot", "l2"])
def test_topk_gradcheck(metric):
    kw = inputs.topk(3, dtype=F64, B=2, Q=3, S=5, D=4, shared=True)
    query, key = kw["query"].requires_grad_(), kw["key"].requires_grad_()

    def best(q, k):
        scores, _ = rk.topk_chunks(q, k, 3, metric=metric, causal_gap=0, query_offset=1)
        return scores.where(scores.isfinite(), 0)

    assert torch.autograd.gradcheck(best, (query, key))


def test_leaky_by_hand_and_by_loop():
    y = rk.leaky_average(torch.ones(1, 3, 1, 1), torch.tensor([0.5]), initial=torch.full((1, 1, 1), 4.0))
    assert y.flatten().tolist() == [3.0, 2.5, 2.25]
    kw = inputs.leaky(4, dtype=F64)
    state = kw["initial"]
    for t, y in enumerate(rk.leaky_average(**kw).unbind(1)):
        state = kw["x"][:, t] + kw["decay"].view(-1, 1) * state
        torch.testing.assert_close(y, state)


def test_leaky_documents_by_hand_and_gradcheck():
    segment = torch.tensor([[3, 3, 1, 1], [0, 3, 3, 0]])
    x, decay, initial = torch.ones(2, 4, 1, 1), torch.tensor([0.5]), torch.full((2, 1, 1), 4.0)
    for backend in ("reference", None):
        y = rk.leaky_average(x, decay, initial=initial, segment=segment, backend=backend)
        assert y.flatten(1).tolist() == [[3.0, 2.5, 1.0, 1.5], [3.0, 1.0, 1.5, 1.0]]
    kw = inputs.differentiable(inputs.leaky(5, dtype=F64, N=4, H=2, D=3))
    run = lambda x, d, i: rk.leaky_average(x, d, initial=i, segment=segment)  # noqa: E731
    assert torch.autograd.gradcheck(run, (kw["x"], kw["decay"], kw["initial"]))


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.99])
def test_leaky_gradcheck(decay):
    kw = inputs.differentiable(inputs.leaky(5, dtype=F64, B=1, N=6, H=2, D=3, decay=[decay, decay]))
    assert torch.autograd.gradcheck(
        lambda x, d, i: rk.leaky_average(x, d, initial=i), (kw["x"], kw["decay"], kw["initial"])
    )
