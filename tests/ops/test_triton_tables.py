"""Every committed tile that serves calls with options, on small problems under the interpreter: compiling shows its
registers, not its sums.
"""

from unittest import mock

import pytest
import torch

import retro_kernels as rk
from retro_kernels import configs
from retro_kernels._target import KNOWN
from retro_kernels.testing import compare, inputs
from retro_kernels.triton import chunked_cross_attention, relative_attention
from retro_kernels.triton.common import plan
from retro_kernels.triton.common.combinations import WIDTHS, combinations
from retro_kernels.triton.common.launch import Launch
from tests.conftest import INTERPRETER

OP = "relative_attention"
pytestmark = pytest.mark.skipif(
    not INTERPRETER or not rk.backends()[OP]["triton"], reason="a GPU runs its own architecture's tiles"
)

POSITIONS = {"E=D": {}, "E=16": dict(E=16), "none": dict(rel=None, biases=False)}
CALLS = {
    relative_attention: (
        lambda **kw: inputs.self_attention(
            5, dtype=torch.float16, **{"causal": True, "B": 1, "N": 40, "S": 56, "H": 2, "G": 1, **kw}
        ),
        {
            "both directions": dict(causal=False),
            "window": dict(window=30),
            "mask": dict(key_mask=True),
            "documents": dict(segments=True),
            "dropout": dict(dropout_p=0.2),
        },
    ),
    chunked_cross_attention: (
        lambda **kw: inputs.cross_attention(
            5, dtype=torch.float16, **{"B": 1, "N": 100, "M": 64, "K": 2, "R": 40, "H": 2, **kw}
        ),
        {
            "mask": dict(mask="token"),
            "gate": dict(gate=True),
            "grouped heads": dict(G=1),
            "dropout": dict(dropout_p=0.2),
        },
    ),
}


def rows_that_serve(name: str, call: dict) -> list[dict]:
    """The rows that the launches of a call, forward and backward, look up; nothing is launched."""
    with mock.patch.object(Launch, "run", lambda self: None), configs.watched() as seen:
        compare.run(name, call, "triton")
    return [row for _, row in seen]


@pytest.mark.parametrize("arch", KNOWN)
@pytest.mark.parametrize("op", CALLS, ids=lambda op: op.__name__.rpartition(".")[2])
def test_every_tile_with_an_option_computes_right(op, arch):
    name = op.__name__.rpartition(".")[2]
    make, options = CALLS[op]
    left = [
        row
        for row in configs.table(name)
        if row["arch"] == arch and row["bytes"] == 2 and row["width"] in WIDTHS and "with" in row
    ]
    assert left
    with mock.patch.object(plan, "current_target", lambda device: KNOWN[arch]):
        for _, keywords in reversed(list(combinations(POSITIONS, options))):
            call = make(**keywords)
            reached = rows_that_serve(name, call)
            if any(row in reached for row in left):
                compare.check(name, call, "triton")
                left = [row for row in left if row not in reached]
    assert not left, f"no call here reaches {left}"
