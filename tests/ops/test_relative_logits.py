"""Every backend of the position logits against the float64 reference."""

import pytest
import torch

import retro_kernels as rk
from retro_kernels.testing import compare, inputs
from tests.conftest import in_types

OP = "relative_logits"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

CASES = {
    "all rows": dict(),
    "no bias": dict(biases=False),
    "shared": dict(heads="shared"),
    "one query": dict(N=1),
    "one key": dict(key_len=1),
    "one pair": dict(N=1, key_len=1),
    "more queries": dict(N=20, key_len=3),
    "offset": dict(query_offset=5),
    "offset, bounded": dict(query_offset=-4, rel_start=-6, T=5),
    "bounded, outside": dict(rel_start=50, T=5),
    "bounded, wider than all": dict(rel_start=-40, T=80),
    # a gradient's strip of 64 columns may hold old values beyond the last key
    "bounded, wider than two strips": dict(N=20, rel_start=-130, T=260),
    "bounded, one row": dict(rel_start=0, T=1),
    "table": dict(E=1, heads="shared"),
    "narrow": dict(E=3),
    "odd": dict(E=21),
    "widest": dict(E=256, B=1, H=1),
}


@pytest.mark.parametrize(("name", "dtype"), in_types(CASES, DTYPES))
def test_values_and_gradients(backend, name, dtype):
    compare.check(OP, inputs.relative_logits(3, dtype=dtype, **CASES[name]), backend)


@pytest.mark.parametrize("start", range(-7, 8))
def test_every_edge_of_a_bounded_extent(backend, start):
    compare.check(OP, inputs.relative_logits(4, B=1, N=6, H=1, key_len=6, rel_start=start, T=3, E=4), backend)


def test_entries_outside_the_extent_are_zero(backend):
    kw = inputs.relative_logits(5, N=9, key_len=12, rel_start=-2, T=4)
    logits = rk.relative_logits(**kw, backend=backend)
    displacement = torch.arange(9).view(-1, 1) - torch.arange(12)
    outside = (displacement < -2) | (displacement > 1)
    assert (logits[:, :, outside] == 0).all() and (logits[:, :, ~outside] != 0).all()


def test_they_are_the_attentions(backend):
    """Added to a plain attention they give relative_attention."""
    kw = inputs.self_attention(7, N=5, S=7)
    position = rk.relative_logits(
        kw["query"], kw["rel_key"], key_len=7, position_bias=kw["position_bias"], backend=backend
    )
    content = torch.einsum("bnhd,bshd->bhns", kw["query"] + kw["content_bias"], kw["key"])
    weights = ((content + position) / 4).softmax(-1)
    want = rk.relative_attention(**kw, backend="reference")
    torch.testing.assert_close(torch.einsum("bhns,bshd->bnhd", weights, kw["value"]), want)
