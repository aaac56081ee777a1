"""Every committed tile for calls with options, on small problems in the interpreter; compilation
does not check values.
"""

import functools
from unittest import mock

import pytest
import torch

import retro_kernels as rk
from retro_kernels.compile import tiles
from retro_kernels.compile.target import KNOWN
from retro_kernels.ops.chunked_cross_attention import triton as chunked_cross_attention
from retro_kernels.ops.chunked_cross_attention.triton.launch import FEW
from retro_kernels.ops.relative_attention import triton as relative_attention
from retro_kernels.testing import compare, inputs
from retro_kernels.triton_lib import launch
from retro_kernels.triton_lib.combinations import WIDTHS, combinations
from retro_kernels.triton_lib.launch import launches_to
from tests.conftest import INTERPRETER, noted_launches

OP = "relative_attention"
pytestmark = pytest.mark.skipif(
    not INTERPRETER or not rk.backends()[OP]["triton"], reason="a GPU runs its own architecture's tiles"
)

POSITIONS = {"E=D": {}, "E=16": dict(E=16), "none": dict(rel=None, biases=False)}
CALLS = {
    relative_attention: (
        functools.partial(inputs.self_attention, 5, dtype=torch.float16, causal=True, B=1, N=40, S=56, H=2, G=1),
        {
            "both directions": dict(causal=False),
            "window": dict(window=30),
            "mask": dict(key_mask=True),
            "documents": dict(segments=True),
            "dropout": dict(dropout_p=0.2),
        },
    ),
    chunked_cross_attention: (
        functools.partial(inputs.cross_attention, 5, dtype=torch.float16, B=1, N=100, M=64, K=2, R=40, H=2),
        {
            "mask": dict(mask="token"),
            "gate": dict(gate=True),
            "grouped heads": dict(G=1),
            "dropout": dict(dropout_p=0.2),
        },
    ),
}
#: calls that are not a combination of options: many neighbours, tables that end before the keys, a separate relative
#: query, a padded head
_SHORT = ({}, dict(dropout_p=0.2), dict(key_mask=True), dict(dropout_p=0.2, key_mask=True), dict(E=16))
MORE = {
    relative_attention: [
        *(dict(D=d, rel="bounded", rel_start=0, T=20, **more) for d in WIDTHS for more in _SHORT),
        dict(D=128, E=128),
        dict(D=96),
    ],
    chunked_cross_attention: [dict(K=FEW + 1, R=8, D=d, **more) for d in WIDTHS for more in ({}, dict(mask="token"))],
}


def rows_that_serve(name: str, call: dict) -> list[dict]:
    """Return the rows that the launches of a call, forward and backward, look up; nothing is launched."""
    with launches_to(lambda launch: None), tiles.watched() as seen:
        compare.run(name, call, "triton")
    return [row for _, row in seen]


@pytest.mark.parametrize("arch", [80, 90, 100, "gfx942", "gfx1100"])
@pytest.mark.parametrize("op", CALLS, ids=lambda op: op.__name__.split(".")[-2])
def test_every_tile_with_an_option_computes_right(op, arch):
    name = op.__name__.split(".")[-2]
    make, options = CALLS[op]
    left = [
        row
        for row in tiles.table(name)
        if row["arch"] == arch and row["bytes"] == 2 and row["width"] in WIDTHS and "with" in row
    ]
    assert left
    with mock.patch.object(launch, "current_target", lambda device: KNOWN[arch]):
        combined = [keywords for _, keywords in combinations(POSITIONS, options)]
        for keywords in [*reversed(combined), *MORE[op]]:
            call = make(**keywords)
            reached = rows_that_serve(name, call)
            if any(row in reached for row in left):
                compare.check(name, call, "triton")
                left = [row for row in left if row not in reached]
    assert not left, f"no call here reaches {left}"


@pytest.mark.parametrize("wanted", [("position_bias",), ("content_bias", "position_bias")])
def test_biases_of_a_gradient_that_is_one_sum(wanted):
    """sm_90: the query kernel keeps content and position parts together, and the product for keys sums the biases'
    parts; without gradients of keys the parts stay separate.
    """
    make, _ = CALLS[relative_attention]
    call = make(D=96, N=66, S=66)
    with mock.patch.object(launch, "current_target", lambda device: KNOWN[90]):
        found = []
        for others in (("query", "key"), ("query",)):
            names = (*wanted, *others)
            leaves = {name: call[name].clone().requires_grad_() for name in names}
            out = rk.relative_attention(**{**call, **leaves}, backend="triton")[0]
            grad = inputs.randn(inputs.generator(1), *out.shape, dtype=out.dtype)
            with noted_launches() as ran:
                found.append(dict(zip(names, torch.autograd.grad(out, list(leaves.values()), grad), strict=True)))
            launched = {}
            for one in ran:  # the first of a name: the keys' among the columns' launches
                launched.setdefault(one.name, one.arguments)
            whole = "key" in names
            assert (launched["relative_query"]["BLOCK_M"] >= 64) == whole
            assert whole == any(launched.get("relative_columns", {}).get(f"d{n[:-5]}_ptr") is not None for n in wanted)
    for name in (*wanted, "query"):
        torch.testing.assert_close(found[0][name], found[1][name], rtol=2e-3, atol=2e-3)
        assert found[0][name].isfinite().all() and found[0][name].abs().max() > 0.05


def test_the_interpreters_bfloat16_rounds_as_torch_does():
    from tests import bfloat16

    values = torch.cat([torch.randn(4096) * 10.0**e for e in (-40, -3, 0, 3, 38)])
    values = torch.cat([values, torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1 + 2**-8, 1 + 3 * 2**-8])])
    bits = torch.from_numpy(bfloat16.rounded(values.numpy()).view("int16"))
    assert torch.equal(bits, values.bfloat16().view(torch.int16))
    assert (
        torch.from_numpy(bfloat16.rounded(torch.tensor([torch.nan]).numpy()).view("int16")).view(torch.bfloat16).isnan()
    )
