"""Dimensions of size 1 may have any stride in torch, so no kernel may compute an address from one.

Each call is made with dense tensors and again with other strides of size-1 dimensions, upstream gradients too. The
results have the same bits, and no value beyond a tensor reaches one.
"""

import pytest
import torch

from retro_kernels.core import dispatch
from retro_kernels.testing import compare, guard_bands, inputs
from tests.conftest import each_with_each, fast_backends, with_backends
from tests.ops.calls import BUILDERS

#: op -> calls with dimensions of size 1; every dimension is 1 in some call
SMALL = {
    "chunked_cross_attention": {
        "one token": dict(B=1, N=1, M=1, K=1, R=1, H=1, gate=True, mask="token"),
        "one chunk": dict(B=1, N=6, M=6, K=2, R=1, H=2, E=1, gate=True, mask="neighbour"),
        "one head, one neighbour": dict(B=2, N=9, M=4, K=1, R=3, H=1, heads="shared", E=3),
        "one query of a cache": dict(B=1, N=1, M=4, K=2, R=3, H=2, query_start=11, rel="bounded", rel_start=0, T=1),
    },
    "relative_attention": {
        "one token": dict(B=1, N=1, S=1, H=1, key_mask=True, segments=True),
        "one key": dict(B=1, N=20, S=1, H=2, E=1, heads="shared"),
        "one query": dict(B=1, N=1, S=20, H=2, G=1, key_mask=True, causal=True),
        "one head": dict(B=2, N=9, S=7, H=1, E=3, segments=True),
    },
    "relative_logits": {
        "one pair": dict(B=1, N=1, H=1, key_len=1),
        "one key": dict(B=1, N=64, H=1, key_len=1),
        "one query": dict(B=1, N=1, H=2, key_len=70, heads="shared"),
        "one number a row": dict(B=2, N=5, H=1, E=1, key_len=7),
        "one row of the table": dict(B=1, N=5, H=2, key_len=7, rel_start=0, T=1),
    },
    "merge_attention": {
        "one token": dict(B=1, N=1, H=1, D=16),
        "one head": dict(B=2, N=5, H=1, D=16, dead=True),
        "one number a row": dict(B=1, N=3, H=2, D=1),
    },
    "topk_chunks": {
        "one pair": dict(B=1, Q=1, S=1, D=1, k=1, docs=True, mask=True),
        "one key": dict(B=2, Q=20, S=1, k=3, shared=True, docs=True, mask=True),
        "one query": dict(B=1, Q=1, S=40, k=1),
        "one number a row": dict(B=2, Q=5, S=40, D=1, k=2, metric="l2"),
    },
    "leaky_average": {
        "one number": dict(B=1, N=1, H=1, D=1, segments=1),
        "one lane": dict(B=2, N=40, H=1, D=1, segments=3),
        "one number a head": dict(B=1, N=40, H=3, D=1),
        "one token": dict(B=2, N=1, H=3, D=5),
        "one head": dict(B=1, N=40, H=1, D=40),
    },
    "rms_norm": {"one number": dict(B=1, N=1, D=1), "one row": dict(B=1, N=1), "one number a row": dict(D=1)},
    "cross_entropy": {"one class": dict(N=3, V=1), "one row": dict(N=1)},
}
#: strides in elements: 0, 5, and beyond every address of the machine
STEPS = [0, 5, 2**44]
CASES = [(op, name, backend) for op, backend in with_backends(dispatch.OPS) for name in SMALL[op]]


@pytest.mark.parametrize("op, name, backend, step", [(*case, step) for case, step in each_with_each(CASES, STEPS)])
def test_strides_of_size_one_are_never_used(op, name, backend, step):
    compare.check_layout(op, BUILDERS[op](1, **SMALL[op][name]), backend, lambda t: guard_bands.stepped(t, step))


@pytest.mark.parametrize("n", [8, 64, 5000])
def test_a_transposed_gradient_of_one_key(n):
    """As `.mT` of a caller passes it to the backward pass."""
    for backend in fast_backends("relative_logits"):
        kw = inputs.differentiable(inputs.relative_logits(2, B=1, N=n, H=1, key_len=1, biases=False))
        weights = inputs.randn(inputs.generator(3), 1, 1, 1, n, dtype=torch.float32).to(kw["query"].device)
        grads = []
        for name in (backend, "reference"):
            logits = compare.rk.relative_logits(**kw, backend=name)
            grads.append(torch.autograd.grad((logits.mT * weights).sum(), [kw["query"], kw["rel_key"]]))
        for mine, want in zip(*grads, strict=True):
            torch.testing.assert_close(mine, want)
