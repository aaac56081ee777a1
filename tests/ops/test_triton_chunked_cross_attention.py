"""Slabs, time blocks, splits and launches of the triton backend, which the common suite cannot see. Needs the
interpreter.
"""

import pytest
import torch

from retro_kernels.ops.chunked_cross_attention.call import ChunkedCrossAttention
from retro_kernels.testing import compare, inputs
from tests.conftest import INTERPRETER

if not INTERPRETER:
    pytest.skip("needs TRITON_INTERPRET=1, in a process of its own", allow_module_level=True)

from retro_kernels.compile.target import KNOWN, Target
from retro_kernels.ops.chunked_cross_attention import cases
from retro_kernels.ops.chunked_cross_attention.triton import launch
from retro_kernels.triton_lib.launch import launches_to

OP = "chunked_cross_attention"


@pytest.mark.parametrize(
    "options", [{}, {"H": 4, "G": 2, "gate": True}, {"M": 37, "N": 80}], ids=["fused", "grouped", "time blocks"]
)
def test_slabs_of_one_chunk(monkeypatch, options):
    """The workspace bound only splits the work into more launches: values stay within the tolerance table."""
    monkeypatch.setattr(launch, "SLAB_BYTES", 1)
    compare.check(OP, inputs.cross_attention(21, **{"B": 1, "N": 9, "H": 2, **options}), "triton")


def test_decoding_is_split_over_keys_and_training_is_not():
    target = KNOWN[90]
    decode, training = [], []
    with launches_to(decode.append):
        launch.forward(cases.call(torch.bfloat16, B=1, N=1, query_start=2047, H=16, D=64), target)
    assert [each.name for each in decode] == ["cca_forward", "merge"]
    x, y, z = decode[0].grid
    assert x * y * z > 16  # more programs than (batch, head) pairs
    with launches_to(training.append):
        launch.forward(cases.call(torch.bfloat16), target)
    assert [each.name for each in training] == ["cca_forward"]


def test_workspace_is_bounded_and_launches_are_pure():
    """A pass reads no values: it works on meta tensors, with the same launches twice."""
    call = cases.call(torch.bfloat16, B=64)
    b, n, h, _ = call.query.shape
    outputs = (call.query, torch.empty(b, h, n, device="meta"))
    needs = tuple(getattr(call, name) is not None for name in ChunkedCrossAttention.DIFFERENTIABLE)
    passes = [], []
    for launched in passes:
        with launches_to(launched.append):
            launch.backward(call, outputs, outputs, needs, Target(90, 232448))
    band = passes[0][0].arguments["band_ptr"]
    assert band.numel() * band.element_size() <= launch.SLAB_BYTES
    assert [(x.name, x.grid) for x in passes[0]] == [(x.name, x.grid) for x in passes[1]]


def test_rows_of_wide_heads_that_see_one_token():
    """dP and its mean cancel exactly, so only the gradient of lse is left."""
    compare.check(OP, inputs.cross_attention(3, B=1, N=9, M=4, H=2, D=256, K=1, R=1), "triton")
