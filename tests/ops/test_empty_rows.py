"""A row that attends nothing has out 0, lse -inf and no gradients; a NaN that a row attends stays NaN."""

import pytest
import torch

import retro_kernels as rk
from retro_kernels.testing import compare, inputs
from tests.conftest import with_backends
from tests.ops.calls import leaves

ATTENTIONS = ("chunked_cross_attention", "relative_attention")
every = pytest.mark.parametrize("op, backend", with_backends(ATTENTIONS))
relative = pytest.mark.parametrize("backend", [backend for _, backend in with_backends(["relative_attention"])])


def problem(op):
    """Return arguments some of whose rows attend nothing, and the name of their mask."""
    if op == "relative_attention":
        kw, name = (
            inputs.self_attention(1, N=9, H=2, key_mask=True, segments=True, causal=True, causal_gap=1),
            "key_mask",
        )
        kw[name][1, :5] = False
    else:
        kw, name = inputs.cross_attention(1, N=11, H=2, mask="token"), "neighbour_mask"
        kw[name][:, 1] = False
    return kw, name


@every
def test_rows_that_attend_nothing(op, backend):
    kw, _ = problem(op)
    got = compare.check(op, kw, backend)
    empty = (got["out1"] == -torch.inf).transpose(1, 2)
    assert empty.any() and not empty.all()
    assert (got["out0"][empty] == 0).all() and (got["grad_query"][empty] == 0).all()


@every
def test_a_merge_of_shards_that_are_empty_together(op, backend):
    """A merge by hand: where both shards have lse -inf, its backward pass gives NaN to out and to lse."""
    kw, mask = problem(op)
    kw = inputs.differentiable(kw)
    half = torch.arange(kw[mask].shape[-1], device=kw[mask].device) % 2 == 0
    run = getattr(rk, op)
    (a, la), (b, lb) = (
        run(**{**kw, mask: kw[mask] & part}, return_lse=True, backend=backend) for part in (half, ~half)
    )
    for part in (a, b):
        part.register_hook(lambda grad: seen.append(grad.isnan().any().item()))
    seen = []
    lse = torch.logaddexp(la, lb)
    weight_a, weight_b = (torch.exp(part - lse).transpose(1, 2).unsqueeze(-1) for part in (la, lb))
    merged = torch.where((lse == -torch.inf).transpose(1, 2).unsqueeze(-1), 0, weight_a * a + weight_b * b)
    whole = run(**kw, backend="reference")
    torch.testing.assert_close(merged, whole, rtol=1e-5, atol=1e-5)
    want, got = (torch.autograd.grad(out.square().sum(), leaves(kw).values()) for out in (whole, merged))
    for name, g, w in zip(leaves(kw), got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    assert seen == [True, True]  # else this test shows nothing


@pytest.mark.parametrize(
    "apart", [dict(causal=True, causal_gap=20), dict(segments=True), dict(window=2, query_offset=30)], ids=str
)
@relative
def test_keys_that_nobody_sees_may_hold_anything(backend, apart):
    """Keys hidden by the gap, documents or the window, without a mask: nothing is visible, so no value matters."""
    kw = inputs.self_attention(2, N=5, S=9, **apart)
    if "segments" in apart:
        kw["key_segment"] = kw["key_segment"] + 7
    kw["key"], kw["value"] = kw["key"] * torch.nan, kw["value"] * torch.nan
    kw = inputs.differentiable(kw)
    out, lse = rk.relative_attention(**kw, return_lse=True, backend=backend)
    assert (out == 0).all() and (lse == -torch.inf).all()
    grads = torch.autograd.grad((out, lse), leaves(kw).values(), (torch.ones_like(out), torch.ones_like(lse)))
    for name, grad in zip(leaves(kw), grads, strict=True):
        assert (grad == 0).all(), name


@every
def test_nan_that_is_attended_stays_nan(op, backend):
    """It is not taken for a row that attends nothing: in values, in lse and in gradients."""
    kw = (
        inputs.cross_attention(3, N=10, H=2)
        if op == "chunked_cross_attention"
        else inputs.self_attention(3, causal=True)
    )
    kw["query"][0, 8] = torch.nan
    kw = inputs.differentiable(kw)
    out, lse = getattr(rk, op)(**kw, return_lse=True, backend=backend)
    assert out[0, 8].isnan().all() and lse[0, :, 8].isnan().all()
    assert not out[0, :8].isnan().any() and not out[1].isnan().any()
    grad_query, grad_value = torch.autograd.grad(out.sum(), (kw["query"], kw["value"]))
    assert grad_query[0, 8].isnan().all() and grad_value[0].isnan().any()
    assert not grad_query[0, :8].isnan().any() and not grad_value[1].isnan().any()


@pytest.mark.parametrize("behind", [False, True], ids=["ahead", "behind"])
@every
def test_minus_infinity_in_a_table_hides(op, backend, behind):
    """A table of numbers, as of T5 or ALiBi, with -inf is a mask by displacement; some rows keep no key."""
    kw = (
        inputs.cross_attention(4, B=1, N=10, H=2, biases=False, E=1)
        if op == "chunked_cross_attention"
        else inputs.self_attention(4, H=2, biases=False, E=1)
    )
    middle = kw["rel_key"].shape[1] // 2  # displacement 0, for chunks -1
    kw["rel_key"].zero_()[:, slice(middle, None) if behind else slice(middle)] = -torch.inf
    kw["rel_query"] = torch.ones_like(kw["rel_query"])
    results = []
    for where in (backend, "reference"):
        call = {n: v.detach().clone().requires_grad_() if n in ("query", "key", "value") else v for n, v in kw.items()}
        out, lse = getattr(rk, op)(**call, return_lse=True, backend=where)
        results.append([out, lse, *torch.autograd.grad(out.square().sum(), leaves(call).values())])
        assert not any(x.isnan().any() for x in results[-1])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    if op == "relative_attention" and not behind:
        causal = {n: v for n, v in kw.items() if not n.startswith("rel")} | {"causal": True}
        torch.testing.assert_close(results[0][0], rk.relative_attention(**causal, backend="reference"))
