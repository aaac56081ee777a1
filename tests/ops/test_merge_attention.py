"""Every backend of the merge against the float64 reference, and against one attention over all keys."""

import pytest
import torch

import retro_kernels as rk
from retro_kernels.testing import compare, inputs
from tests.conftest import INTERPRETER, with_backends

NAME = "merge_attention"
every = pytest.mark.parametrize("backend", [backend for _, backend in with_backends([NAME])])
CASES = {"three": {}, "two, wide": {"P": 2, "D": 80}, "dead parts": {"dead": True}, "one token": {"P": 9, "N": 1}}
HALVES = [torch.float16] if INTERPRETER else [torch.float16, torch.bfloat16]


@every
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_values_and_gradients(name, dtype, backend):
    compare.check(NAME, inputs.merged(3, dtype=dtype, **CASES[name]), backend)


@every
def test_the_parts_of_the_keys_make_the_whole(backend):
    kw = inputs.differentiable(inputs.self_attention(5, B=2, N=7, S=20, H=2, D=16, rel=None))
    query, key, value = kw["query"], kw["key"], kw["value"]
    whole = rk.relative_attention(query, key, value, return_lse=True, backend="reference")
    parts = [
        rk.relative_attention(query, key[:, a:b], value[:, a:b], return_lse=True, backend="reference")
        for a, b in ((0, 3), (3, 4), (4, 20))
    ]
    merged = rk.merge_attention(*zip(*parts, strict=True), backend=backend)
    grads = [torch.randn_like(x) for x in whole]
    for got, want in zip(
        (*merged, *torch.autograd.grad(merged, (query, key, value), grads)),
        (*whole, *torch.autograd.grad(whole, (query, key, value), grads)),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@every
def test_no_part_that_counts(backend):
    """out 0, lse -inf and zero gradients, whatever the parts and the gradients hold."""
    outs = torch.full((2, 1, 3, 2, 16), torch.nan, device=inputs.DEVICE, requires_grad=True)
    lses = torch.full((2, 1, 2, 3), -torch.inf, device=inputs.DEVICE, requires_grad=True)
    out, lse = rk.merge_attention(outs, lses, backend=backend)
    assert out.eq(0).all() and lse.eq(-torch.inf).all()
    grads = torch.autograd.grad((out, lse), (outs, lses), (out + torch.nan, lse * torch.nan))
    assert all(grad.eq(0).all() for grad in grads)


@every
def test_one_part_alone_counts_and_nan_spreads_in_its_row(backend):
    kw = inputs.merged(1, P=2)
    kw["lses"][1] = -torch.inf
    kw["outs"][1] = torch.nan
    kw["outs"][0, 0, 0, 0, 0] = torch.nan
    out, lse = rk.merge_attention(**kw, backend=backend)
    torch.testing.assert_close(out, kw["outs"][0], equal_nan=True)
    torch.testing.assert_close(lse, kw["lses"][0])


@every
@pytest.mark.parametrize("size", [1e4, 1e7, 1e14, 1e30, -1e30])
def test_weights_of_huge_lses_sum_to_one(backend, size):
    """lse rounds the sum of the parts away, so gradients must not take their weights from lse alone."""
    kw = inputs.merged(4, P=3)
    kw["lses"] = torch.full_like(kw["lses"], size)
    leaves = inputs.differentiable(kw)
    outs = rk.merge_attention(**leaves, backend=backend)
    grads = [torch.randn_like(x) for x in outs]
    douts, dlses = torch.autograd.grad(outs, (leaves["outs"], leaves["lses"]), grads)
    torch.testing.assert_close(douts, (grads[0] / 3).expand_as(douts))
    torch.testing.assert_close(dlses.sum(0), grads[1], rtol=1e-5, atol=1e-5)
    tangents = tuple(torch.randn_like(x) for x in kw.values())
    _, (out, lse) = torch.func.jvp(lambda *x: rk.merge_attention(*x, backend=backend), tuple(kw.values()), tangents)
    torch.testing.assert_close(lse, tangents[1].mean(0), rtol=1e-5, atol=1e-5)
    pushed = (out * grads[0]).sum() + (lse * grads[1]).sum()
    pulled = (tangents[0] * douts).sum() + (tangents[1] * dlses).sum()
    torch.testing.assert_close(pushed, pulled, rtol=1e-4, atol=1e-4)


@every
@pytest.mark.parametrize("size", [torch.inf, torch.nan])
def test_an_lse_without_a_value_spreads_in_its_row_alone(backend, size):
    kw = inputs.merged(1, P=3)
    kw["lses"][1, 0, 0, 0] = size
    out, lse = rk.merge_attention(**kw, backend=backend)
    assert out[0, 0, 0].isnan().all() and lse[0, 0, 0].isnan()
    assert out.isnan().sum() == out.shape[-1] and lse.isnan().sum() == 1


@every
def test_each_gradient_is_computed_alone_and_from_each_output_alone(backend):
    kw = inputs.merged(6, P=3)
    leaves = inputs.differentiable(kw)
    outs, pair = rk.merge_attention(**leaves, backend=backend), tuple(leaves.values())
    wanted = rk.merge_attention(**leaves, backend="reference")
    for got, want in zip(outs, wanted, strict=True):  # the gradient of a sum has stride 0
        both = torch.autograd.grad(want.sum(), pair, retain_graph=True, materialize_grads=True)
        together = torch.autograd.grad(got.sum(), pair, retain_graph=True, materialize_grads=True)
        for i, grad in enumerate(both):
            torch.testing.assert_close(together[i], grad, rtol=1e-5, atol=1e-5)
    for name, leaf in leaves.items():
        alone = rk.merge_attention(**(kw | {name: leaf}), backend=backend)[0].square().sum()
        (grad,) = torch.autograd.grad(alone, leaf)
        (want,) = torch.autograd.grad(rk.merge_attention(**leaves, backend="reference")[0].square().sum(), leaf)
        torch.testing.assert_close(grad, want, rtol=1e-5, atol=1e-5)


def test_definition_by_gradcheck():
    kw = inputs.merged(2, dtype=torch.float64, P=3, B=1, N=2, H=1, D=3)
    leaves = [value.requires_grad_() for value in kw.values()]
    assert torch.autograd.gradcheck(lambda outs, lses: rk.merge_attention(outs, lses, backend="reference"), leaves)
