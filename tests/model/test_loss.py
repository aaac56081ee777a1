"""The cross-entropy without the logits of all tokens, against the plain one: values, gradients, memory."""

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from retro_kernels.core import dispatch, layouts
from retro_model.layers import linear_cross_entropy, loss, next_token_loss
from tests.model import tiny
from tests.refusals import refused

T, D, V = 29, 8, 37


def inputs(dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, D, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for n in (T, V))
    return x, weight, torch.randint(V, (T,), generator=g), torch.rand(T, generator=g) > 0.3


def plain(x, weight, targets, weights):
    logits = x @ weight.T
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, targets, reduction="none") * weights


@pytest.mark.parametrize("rows", [None, 1, 7, T, 100])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_the_plain_one(dtype, rows):
    x, weight, targets, counted = inputs(dtype)
    want = plain(x, weight, targets, counted)
    want_grads = torch.autograd.grad(3 * want.sum(), (x, weight))
    total, losses = linear_cross_entropy(x, weight, targets, counted, rows=rows)
    grads = torch.autograd.grad(3 * total, (x, weight))
    tolerance = {"rtol": 1e-12, "atol": 1e-13} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(losses, want.detach(), **tolerance)
    torch.testing.assert_close(total, want.sum(), **tolerance)
    for got, expected in zip(grads, want_grads):
        torch.testing.assert_close(got, expected, **tolerance)
    assert not losses.requires_grad and not losses[~counted].any()


def test_the_operator_keeps_its_contract():
    x, weight, targets, counted = inputs()
    torch.library.opcheck(
        torch.ops.retro_model.linear_cross_entropy, (x, weight, targets, counted.double(), 7, True, True)
    )
    torch.library.opcheck(
        torch.ops.retro_model.linear_cross_entropy,
        (x.detach(), weight.detach(), targets, counted.double(), 7, False, False),
    )


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_side_gets_no_gradient(frozen):
    x, weight, targets, _ = inputs()
    want = torch.autograd.grad(plain(x, weight, targets, torch.ones(T)).sum(), (x, weight)[1 - frozen])[0]
    (x, weight)[frozen].requires_grad_(False)
    linear_cross_entropy(x, weight, targets, rows=7)[0].backward()
    assert (x, weight)[frozen].grad is None
    torch.testing.assert_close((x, weight)[1 - frozen].grad, want)


def test_half_precision_is_no_worse_than_the_plain_one():
    exact = inputs()
    want = torch.autograd.grad(plain(*exact).sum(), exact[:2])
    error = lambda grads: max((g.double() - w).abs().max() / w.abs().max() for g, w in zip(grads, want))  # noqa: E731
    x, weight, targets, counted = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(linear_cross_entropy(x, weight, targets, counted, rows=7)[0], (x, weight))
        eager = torch.autograd.grad(plain(x, weight, targets, counted).sum(), (x, weight))
    assert all(g.dtype == torch.float32 for g in got)
    assert error(got) <= 2 * error(eager) and error(eager) > 1e-4


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_model_sums_what_its_logits_say(checkpoint):
    model = tiny.model(dtype=torch.float64, checkpoint=checkpoint).train()
    tokens, neighbours, mask = tiny.inputs()
    counted = torch.rand(tokens.shape) > 0.2
    logits = model(tokens, neighbours, neighbour_mask=mask)
    want = F.cross_entropy(logits[:, :-1].mT, tokens[:, 1:], reduction="none") * counted[:, 1:]
    want_grads = torch.autograd.grad(want.sum(), list(model.parameters()))
    got = model(tokens, neighbours, neighbour_mask=mask, loss_mask=counted)
    torch.testing.assert_close(got.losses, want.detach(), rtol=1e-12, atol=1e-12)
    for parameter, expected in zip(torch.autograd.grad(got.total, list(model.parameters())), want_grads):
        torch.testing.assert_close(parameter, expected, rtol=1e-10, atol=1e-12)


def allocated(run) -> int:
    """Return the peak of allocated bytes during `run`, by the profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        run()
    held = most = 0
    for event in sorted(
        (e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()
    ):
        held += event.nbytes()
        most = max(most, held)
    return most


def test_memory_is_that_of_some_rows():
    tokens, width, vocabulary, rows = 1024, 16, 4096, 64
    x, weight = torch.randn(tokens, width, requires_grad=True), torch.randn(vocabulary, width, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,))
    whole = 4 * tokens * vocabulary
    fused = allocated(lambda: linear_cross_entropy(x, weight, targets, rows=rows)[0].backward())
    eager = allocated(lambda: plain(x, weight, targets, torch.ones(tokens)).sum().backward())
    assert eager > 2 * whole and fused < whole / 4


def test_refuses():
    x, weight, targets, counted = inputs()
    refused(r"weight: expected \[V,d\] with d=8; got d=7", linear_cross_entropy, x, weight[:, :7], targets)
    refused(r"targets: expected \[T\] with T=29; got T=28", linear_cross_entropy, x, weight, targets[1:])
    refused("rows: expected an int >= 1", linear_cross_entropy, x, weight, targets, counted, rows=0)
    model, tokens = tiny.model(), tiny.inputs()[0]
    refused(r"loss_mask: expected \[B,N\] with N=19; got N=18", model, tokens, loss_mask=torch.ones(2, 18))
    assert next_token_loss(
        torch.zeros(1, 3, D), weight.detach().float(), tokens[:1, :3], torch.ones(1, 3)
    ).losses.shape == (1, 2)


def test_without_the_kernels_it_is_torchs(monkeypatch):
    x, weight, targets, counted = inputs(torch.float32)
    ours = linear_cross_entropy(x, weight, targets, counted)
    monkeypatch.setattr(dispatch, "_available", lambda op: ("reference",))
    monkeypatch.setattr(loss, "LOGITS_IN_CACHE", 3 * V)
    layouts.forget()
    theirs = linear_cross_entropy(x, weight, targets, counted)
    layouts.forget()
    for a, b in zip(
        (*ours, *torch.autograd.grad(ours[0], (x, weight))), (*theirs, *torch.autograd.grad(theirs[0], (x, weight)))
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_ignored_targets_have_no_loss_and_no_gradient():
    """-100, as in torch; any other target out of range raises."""
    g = torch.Generator().manual_seed(3)
    x, weight = torch.randn(6, 8, generator=g, requires_grad=True), torch.randn(11, 8, generator=g, requires_grad=True)
    targets = torch.tensor([1, -100, 10, 0, -100, 5])
    total, losses = linear_cross_entropy(x, weight, targets, rows=4)
    want = F.cross_entropy(x @ weight.T, targets, reduction="none")
    torch.testing.assert_close(losses, want.detach())
    for got, right in zip(torch.autograd.grad(total, (x, weight)), torch.autograd.grad(want.sum(), (x, weight))):
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="target: expected 0 to V-1=10 or ignore_index=-100; got 11"):
        linear_cross_entropy(x, weight, targets.clamp(min=11))
