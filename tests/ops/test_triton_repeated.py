"""Later calls of a layout, with scalars of earlier launches, equal first calls."""

import pytest
import torch

import retro_kernels as rk
from retro_kernels.core import layouts
from retro_kernels.testing import inputs
from tests.conftest import COMPILED, INTERPRETER

if not (INTERPRETER or COMPILED):
    pytest.skip("needs TRITON_INTERPRET=1, in a process of its own", allow_module_level=True)

CALLS = {
    "chunked_cross_attention": lambda seed, **more: inputs.cross_attention(
        seed, B=1, N=9, H=2, mask="token", gate=True, **more
    ),
    "relative_attention": lambda seed, **more: inputs.self_attention(
        seed, B=1, N=9, H=2, causal=True, key_mask=True, **more
    ),
    "relative_logits": lambda seed: inputs.relative_logits(seed),
    "topk_chunks": lambda seed: inputs.topk(seed, docs=True),
    "leaky_average": lambda seed: inputs.leaky(seed, segments=3),
}


def results(op, kw):
    """Return every output and gradient."""
    kw = inputs.differentiable(kw)
    outs = getattr(rk, op)(**kw, backend="triton")
    outs = outs if isinstance(outs, tuple) else (outs,)
    out = outs[0].where(outs[0].isfinite(), 0)
    leaves = [value for value in kw.values() if isinstance(value, torch.Tensor) and value.requires_grad]
    return [
        *outs,
        *torch.autograd.grad(out, leaves, torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)),
    ]


def anew(op, kw):
    """Return `results` of a first call."""
    layouts.forget()
    return results(op, kw)


@pytest.mark.parametrize("op", CALLS)
def test_later_calls_equal_first_calls(op):
    got = [results(op, CALLS[op](seed)) for seed in (1, 2, 3, 4)]
    for seed, found in enumerate(got, 1):
        for a, b in zip(found, anew(op, CALLS[op](seed)), strict=True):
            assert torch.equal(a, b)


STEPS = {
    "chunked_cross_attention": (inputs.cross_attention(1, B=1, N=1, H=1, M=4, query_start=67), "query_start"),
    "relative_attention": (
        inputs.self_attention(1, B=1, N=1, S=64, T=64, H=1, causal=True, rel="bounded", rel_start=0),
        "query_offset",
    ),
    "relative_logits": (inputs.relative_logits(1, B=1, N=1, H=1, key_len=20, T=80, rel_start=-19), "query_offset"),
    "topk_chunks": (inputs.topk(1, B=1, Q=2, S=30, causal_gap=2), "query_offset"),
}


@pytest.mark.parametrize("op", STEPS)
def test_a_position_that_moves_is_each_calls_own(op):
    kw, name = STEPS[op]
    for position in (3, 4, 5, 63, 0, 29, 30, 31, 32):
        got = getattr(rk, op)(**kw | {name: position}, backend="triton")
        want = getattr(rk, op)(**kw | {name: position}, backend="reference")
        for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, want)), strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)
    with pytest.raises(ValueError, match=f"{name}: expected"):
        getattr(rk, op)(**kw | {name: 2**70}, backend="triton")


def test_a_seed_is_drawn_for_every_call():
    kw = CALLS["relative_attention"](1, dropout_p=0.5)
    drawn = [rk.relative_attention(**kw, backend="triton") for _ in range(4)]
    assert not torch.equal(drawn[2], drawn[3])
    torch.manual_seed(7)
    again = rk.relative_attention(**kw, backend="triton")
    torch.manual_seed(7)
    layouts.forget()
    assert torch.equal(again, rk.relative_attention(**kw, backend="triton"))


def test_the_interpreters_bfloat16_rounds_as_torch_does():
    from tests import bfloat16

    values = torch.cat([torch.randn(4096) * 10.0**e for e in (-40, -3, 0, 3, 38)])
    values = torch.cat([values, torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1 + 2**-8, 1 + 3 * 2**-8])])
    bits = torch.from_numpy(bfloat16.rounded(values.numpy()).view("int16"))
    assert torch.equal(bits, values.bfloat16().view(torch.int16))
    assert (
        torch.from_numpy(bfloat16.rounded(torch.tensor([torch.nan]).numpy()).view("int16")).view(torch.bfloat16).isnan()
    )
