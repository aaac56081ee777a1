"""Chunked cross-attention on the CPU: every instruction set, blocks of keys and queries, threads, partial gradients."""

import pytest
import torch

import retro_kernels as rk
from retro_kernels import extensions
from retro_kernels.testing import assert_passes, compare, inputs
from tests.ops.same import assert_threads_do_not_show

from .test_cpu_infrastructure import isas

OP = "chunked_cross_attention"
pytestmark = pytest.mark.skipif(extensions.unavailable("_cpu") is not None, reason=str(extensions.unavailable("_cpu")))

# sizes around the kernel's units: 64 queries a unit, 132 keys a block, 12 rows a slice, 16 lanes
CASES = {
    "everything": dict(mask="token", gate=True, G=2, E=5, N=23, M=5, R=7),
    "several key blocks": dict(B=1, H=2, K=3, R=67, M=9, N=20, gate=True),
    "several units": dict(B=1, H=2, M=70, N=150, R=33, K=2),
    "units, blocks and groups": dict(B=1, H=4, G=1, M=67, N=70, R=135, K=1, mask="token", E=3),
    "units of a group in one task": dict(B=2, H=4, G=1, M=130, N=131, R=9, K=1),
    "odd rows and keys": dict(M=17, N=40, R=15, K=3, D=40, mask="token"),
    "bounded, cut by a unit": dict(B=1, H=2, M=80, N=100, R=20, rel="bounded", rel_start=10, T=60, E=1),
    "decoding a group": dict(query_start=9, N=1, H=8, G=1, gate=True),
    "decoding two rows, two ranges": dict(query_start=7, N=2, K=3, R=100, D=24, E=5, gate=True, mask="token"),
    "decoding before the first chunk": dict(query_start=1, N=2, rel="bounded", rel_start=-3, T=4, mask="neighbour"),
}


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(kernels, name, dtype, isa):
    kernels.set_isa(isa)
    compare.check(OP, inputs.cross_attention(3, dtype=dtype, **CASES[name]), "cpu")


@pytest.mark.parametrize("isa", isas())
def test_a_key_of_minus_infinity_stays_hidden_from_an_odd_number_of_queries(kernels, isa):
    """Three queries leave half of a pair of bfloat16 without a query."""
    kernels.set_isa(isa)
    query, key, value = (
        torch.ones(s, dtype=torch.bfloat16) for s in ((1, 6, 1, 16), (1, 1, 1, 8, 1, 16), (1, 1, 1, 8, 1, 16))
    )
    key[0, 0, 0, 0] = -torch.inf
    key.requires_grad_(), value.requires_grad_()
    rk.chunked_cross_attention(query, key, value, chunk_len=4, backend="cpu").sum().backward()
    assert key.grad.isfinite().all() and value.grad.isfinite().all()


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("N", [1, 30])
def test_positions_of_each_entry(kernels, N, isa):
    kernels.set_isa(isa)
    kw = inputs.cross_attention(3, B=3, N=N, M=5, R=7, G=2, E=5, mask="token", gate=True, extra_chunks=9 - N // 5)
    compare.check(OP, kw | {"query_start": torch.tensor([0, 13, 42])}, "cpu")


@pytest.mark.parametrize("seed", [22, 29])
def test_gradients_of_one_query_use_the_scores_of_its_forward_pass(seed):
    """Its probabilities are off by a percent if the two passes round at different places."""
    compare.check(
        OP, inputs.cross_attention(seed, dtype=torch.bfloat16, N=1, query_start=10, B=1, H=2, M=4, K=1, R=3), "cpu"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_do_not_depend_on_threads(dtype):
    kw = inputs.cross_attention(4, dtype=dtype, B=2, N=60, M=8, R=20, heads="shared", gate=True, dropout_p=0.2)
    assert_threads_do_not_show(OP, kw)


def test_each_gradient_alone_is_the_same():
    """A gradient's bits do not depend on the other requested gradients."""
    kw = inputs.cross_attention(5, gate=True, E=8, mask="token")
    leaves = inputs.differentiable(kw)
    names = [n for n, v in leaves.items() if isinstance(v, torch.Tensor) and v.requires_grad]
    grad = inputs.randn(inputs.generator(1), *kw["query"].shape, dtype=torch.float32)
    together = torch.autograd.grad(
        rk.chunked_cross_attention(**leaves, backend="cpu"), [leaves[n] for n in names], grad
    )
    for name, want in zip(names, together, strict=True):
        alone = {n: v.detach().requires_grad_(n == name) if n in names else v for n, v in leaves.items()}
        got = torch.autograd.grad(rk.chunked_cross_attention(**alone, backend="cpu"), alone[name], grad)[0]
        assert torch.equal(got, want), name


@pytest.mark.parametrize("tokens", [40, 150])
def test_probabilities_of_a_few_rows_add_up_to_one(tokens):
    """The forward pass of few rows adds scores in another order, so `lse` would not match large scores of the backward
    pass.
    """
    kw = inputs.cross_attention(1, B=2, N=1, M=1, K=2, R=tokens, H=2, D=200) | {"scale": 1.0}
    kw["value"].requires_grad_()
    out = rk.chunked_cross_attention(**kw, backend="cpu")
    upstream = torch.randn(out.shape, generator=inputs.generator(2))
    (grad,) = torch.autograd.grad(out, kw["value"], upstream)
    torch.testing.assert_close(grad.double().sum((1, 2, 3)), upstream[:, 0].double(), atol=2e-6, rtol=0)


@pytest.mark.parametrize("rows", [1, 2])
def test_score_gradients_of_a_few_rows_add_up_to_zero(rows):
    """Their mean uses the backward pass' own probabilities, not the output of the forward pass."""
    for seed in range(6):
        kw = inputs.cross_attention(seed, B=2, N=rows, M=rows, K=2, R=150, H=2, D=64, E=1, biases=False)
        kw |= {"rel_key": torch.ones_like(kw["rel_key"]), "scale": 1.0}  # a relative query's gradient is that sum
        kw["rel_query"].requires_grad_()
        out = rk.chunked_cross_attention(**kw, backend="cpu")
        (grad,) = torch.autograd.grad(out, kw["rel_query"], torch.randn(out.shape, generator=inputs.generator(2)))
        torch.testing.assert_close(grad, torch.zeros_like(grad), atol=4e-6, rtol=0)


def test_large_scores_fit_their_log_sum_exp():
    """A log-sum-exp of 50 is rounded once: an error of 4e-6 in its last place is one of 4e-6 in every probability."""
    kw = inputs.cross_attention(3046, B=1, N=132, M=60, R=63, G=2, D=256, rel=None, gate=True, mask="neighbour")
    kw |= {"scale": 1.0, "query_start": torch.tensor([5])}
    upstream = inputs.randn(inputs.generator(132), 1, 4, 132, dtype=torch.float32)

    def grad_gate(backend, dtype):
        call = inputs.differentiable(inputs.cast(kw, dtype))
        lse = rk.chunked_cross_attention(**call, return_lse=True, backend=backend)[1]
        return torch.autograd.grad(lse, call["neighbour_gate"], torch.where(lse.isfinite(), upstream, 0).to(dtype))[0]

    want, eager = grad_gate("reference", torch.float64), grad_gate("reference", torch.float32)
    assert_passes("grad_neighbour_gate", grad_gate("cpu", torch.float32), want, eager, torch.float32)
