"""Tests that need a GPU: CUDA graph capture, no host synchronisation, non-default streams."""

import pytest
import torch

import retro_kernels as rk
from retro_kernels.core import dispatch
from retro_kernels.testing import inputs
from tests.conftest import INTERPRETER, fast_backends
from tests.ops.calls import floats, leaves, outputs
from tests.ops.test_contract import SMALL, total

pytestmark = pytest.mark.skipif(INTERPRETER or not torch.cuda.is_available(), reason="needs a CUDA GPU")

EVERY = [(op, b) for op in dispatch.OPS for b in fast_backends(op) if b != "cpu"] or [("leaky_average", "triton")]
every = pytest.mark.parametrize("op, backend", EVERY)


@every
def test_cuda_graph_capture(op, backend):
    kw = inputs.differentiable(SMALL[op](**({"dropout_p": 0.2} if "attention" in op else {})))
    names = floats(kw)

    def step():
        loss = total(op, kw, backend)
        return loss, torch.autograd.grad(loss, [kw[n] for n in names])

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, grads = step()
    with torch.no_grad():
        for name in names:
            kw[name].mul_(0.9)
    torch.cuda.manual_seed(1)
    graph.replay()
    if kw.get("dropout_p"):
        first = loss.clone()
        graph.replay()
        assert loss != first, "each replay draws a fresh dropout mask"
        return
    want, want_grads = step()
    torch.testing.assert_close(loss, want)
    for got, grad in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(got, grad)


@every
def test_no_host_synchronisation(op, backend):
    """Neither in the forward pass, with and without autograd, nor in the backward pass."""
    kw = inputs.differentiable(SMALL[op]())

    def floating():
        return [out for out in outputs(op, kw, backend) if out.is_floating_point()]

    grads = [torch.ones_like(out) for out in floating()]
    total(op, kw, backend).backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad():
            getattr(rk, op)(**kw, backend=backend)
        torch.autograd.grad(floating(), list(leaves(kw).values()), grads, allow_unused=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
