"""Gradients of attentions at large logits: the limits that docs/nan_and_infinity.md states."""

import pytest
import torch

from retro_kernels.testing import assert_passes, inputs
from tests.conftest import COMPILED, INTERPRETER, fast_backends, with_backends
from tests.ops.calls import leaves, outputs

MADE = {
    "relative_attention": lambda n, **kw: inputs.self_attention(1, B=1, N=n, S=max(n, 11), H=2, causal=True, **kw),
    "chunked_cross_attention": lambda n, **kw: inputs.cross_attention(
        1, B=1, N=n, M=4, R=5, H=2, gate=True, query_start=3, **kw
    ),
}
HALF = {
    "relative_attention": lambda: inputs.self_attention(1, B=1, N=20, H=2, D=32, causal=True, dtype=torch.float16),
    "chunked_cross_attention": lambda: inputs.cross_attention(1, B=1, N=20, M=8, R=16, H=2, dtype=torch.float16),
}
every = pytest.mark.parametrize("op, backend", with_backends(MADE))
TOKENS = [9] if INTERPRETER or COMPILED else [1, 2, 9, 140]  # few rows of queries have their own CPU kernel


def results(op, kw, backend):
    kw = inputs.differentiable(kw)
    outs, wanted = outputs(op, kw, backend, lse=True), leaves(kw)
    g = torch.Generator().manual_seed(3)
    upstream = [torch.randn(x.shape, generator=g).to(x).where(x != -torch.inf, 0) for x in outs]
    return outs, dict(zip(wanted, torch.autograd.grad(outs, list(wanted.values()), upstream), strict=True))


@every
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("factor", [1.0, 1e2, 1e3, 1e4, 1e5])
def test_errors_grow_with_lse_as_documented(op, backend, factor, tokens):
    """By at most |lse| / 4e6, relative to the largest element, up to |lse| = 1e6."""
    kw = MADE[op](tokens) | {"scale": 0.25 * factor}
    outs, grads = results(op, kw, backend)
    _, exact = results(op, inputs.cast(kw, torch.float64), "reference")
    largest = outs[1].where(outs[1] != -torch.inf, 0).abs().max().item()
    assert largest < 1e6
    for name, grad in grads.items():
        error = (grad.double() - exact[name]).abs().max() / exact[name].abs().max()
        assert error < 1e-5 + largest / 4e6, name


@every
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("factor", [1e8, 1e10, 1e14, 1e20, 1e33])
def test_finite_logits_of_any_size_give_finite_gradients(op, backend, factor, tokens):
    outs, grads = results(op, MADE[op](tokens) | {"scale": 0.25 * factor}, backend)
    assert outs[0].isfinite().all()
    for name, grad in grads.items():
        assert grad.isfinite().all(), name


@every
@pytest.mark.parametrize("rel", [None, "all"])
def test_logits_beyond_float16_overflow_in_no_pass(op, backend, rel):
    """Logits of content and positions. The values' gradient shows the probabilities of the backward pass.

    Cross-attention's backward pass on Triton keeps 16 bits of a position logit: too few far below the row's largest.
    """
    kw = MADE[op](9, dtype=torch.float16, rel=rel, biases=False)
    kw |= {name: 200 * kw[name] for name in kw.keys() & {"query", "key", "rel_key"}}
    outs, grads = results(op, kw, backend)
    want, exact = results(op, inputs.cast(kw, torch.float64), "reference")
    largest = want[1].where(want[1] != -torch.inf, 0).abs().max().item()
    grads.pop("neighbour_gate", None)  # a sum of logits, beyond float16 itself
    assert largest > 65504 and all(grad.isfinite().all() for grad in grads.values())
    for name, out, other in zip(("out", "lse"), outs, want, strict=True):
        assert_passes(name, out, other, None, torch.float16)
    if (op, backend, rel) != ("chunked_cross_attention", "triton", "all"):
        error = (grads["value"].double() - exact["value"]).abs().max() / exact["value"].abs().max()
        assert error < 1e-3 + largest / 4e6


@every
def test_large_terms_that_cancel_give_finite_gradients(op, backend):
    """The logits are far smaller than the terms of their sums, so that their rounding errors are large."""
    kw = MADE[op](TOKENS[-1])
    for name in ("query", "key"):
        wide = kw[name].to(torch.float32) * 1e6
        kw[name] = torch.cat([wide[..., :8], wide[..., :8] * (1 if name == "query" else -1)], -1)
    outs, grads = results(op, kw, backend)
    assert outs[0].isfinite().all()
    for name, grad in grads.items():
        assert grad.isfinite().all(), name


def large(kw):
    kw["rel_key"] *= 100


def beyond(kw):
    """Four neighbouring displacements have about the same logit, so that a row's softmax has several keys."""
    kw["query"][..., 0] = 60
    kw["key"][..., 0] = kw["position_bias"][..., 0] = 0
    kw["rel_key"][..., 0] = torch.arange(kw["rel_key"].shape[1]) // 4 % 6 * 1250


def hidden(kw):
    """Models mask displacements by such logits."""
    kw["query"][..., 0] = 1
    kw["rel_key"][..., 0] = kw["position_bias"][..., 0] = 0
    kw["rel_key"][..., ::3, 0] = -60000


@every
@pytest.mark.parametrize(("change", "least"), [(large, 200), (beyond, 65504), (hidden, 0)])
def test_large_position_logits_of_half_types_keep_their_probabilities(op, backend, change, least):
    """The values' gradients are sums of probabilities. Float16 itself would round logits of these sizes by up to 1."""
    kw = HALF[op]()
    change(kw)
    (_, lse), grads = results(op, kw, backend)
    _, exact = results(op, inputs.cast(kw, torch.float64), "reference")
    largest = lse.where(lse != -torch.inf, 0).abs().max()
    assert largest > least
    error = (grads["value"].double() - exact["value"]).abs().max() / exact["value"].abs().max()
    assert error < (1e-3 + largest / 4e6 if change is beyond else 0.01)


@pytest.mark.parametrize("backend", fast_backends("relative_attention"))
def test_rounding_of_out_bounds_the_error_of_saturated_half_gradients(backend):
    """delta = rowsum(dO * out) comes from the rounded out. So a logit's gradient p * (dP - delta) has an error of up to
    p * ulp * |dO| . |out|, which exceeds the gradient itself where one key takes nearly all of the softmax.
    """
    g, dtype = inputs.generator(1), torch.bfloat16
    query, key, value = (3 * inputs.randn(g, 1, n, 1, 32, dtype=torch.float32) for n in (20, 3, 3))
    kw = {"query": query, "key": key, "value": value, "causal": True}
    kw = {n: v.to(inputs.DEVICE, dtype) if isinstance(v, torch.Tensor) else v for n, v in kw.items()}
    (out, _), grads = results("relative_attention", kw, backend)
    _, exact = results("relative_attention", inputs.cast(kw, torch.float64), "reference")
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
    products = (upstream.double().abs() * out.double().abs()).sum(-1)  # [1,N,1]
    ulp, scale = 2**-8, 32**-0.5
    bound = ulp * scale * products[..., None] * kw["key"].double().abs().amax(1, keepdim=True)
    error = (grads["query"].double() - exact["query"]).abs()
    assert (error <= bound + 4 * ulp * exact["query"].abs().amax()).all()
