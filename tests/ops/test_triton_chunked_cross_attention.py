"""Bands, time blocks, splits and launches of the triton backend, which the common suite cannot see. Needs the
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


WIDE = {"B": 1, "N": 9, "H": 2}


@pytest.mark.parametrize(
    "options",
    [
        WIDE | {"R": 70, "M": 5},
        WIDE | {"R": 33, "M": 33, "N": 70, "K": 3},
        WIDE | {"H": 4, "G": 2, "gate": True, "mask": "neighbour"},
        WIDE | {"M": 37, "N": 80},
    ],
    ids=["wide band", "three neighbours", "grouped", "time blocks"],
)
def test_bands_of_every_shape(monkeypatch, options):
    """Bands are wider than a neighbour, keys end inside a tile, and scratch memory is full of NaN."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        compare.check(OP, inputs.cross_attention(21, **options), "triton")
    finally:
        torch.use_deterministic_algorithms(False)


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


def backward_launches(**options) -> list:
    call = cases.call(torch.bfloat16, **options)
    b, n, h, _ = call.query.shape
    outputs = (call.query, torch.empty(b, h, n, device="meta"))
    needs = tuple(getattr(call, name) is not None for name in ChunkedCrossAttention.DIFFERENTIABLE)
    launched = []
    with launches_to(launched.append):
        launch.backward(call, outputs, outputs, needs, Target(90, 232448))
    return launched


def test_the_backward_pass_is_two_launches_and_one_of_all_sums():
    """However large the call is, and whatever its values: it is planned on meta tensors."""
    for options in {}, {"B": 64}, {"M": 64, "R": 96, "mask": "token"}:
        names = [each.name for each in backward_launches(**options)]
        assert names == ["cca_backward_query", "cca_backward_table", "sums"]


def test_grouped_heads_and_long_chunks_take_one_launch_more():
    for options in {"G": 4}, {"M": 256}:
        names = [each.name for each in backward_launches(**options) if each.name != "sums"]
        assert names == ["cca_backward_query", "cca_backward_key", "cca_backward_table"]


def test_the_band_takes_less_memory_than_the_gradient_of_the_keys():
    query = backward_launches()[0]
    band, dk = query.arguments["band_ptr"], query.arguments["dk_ptr"]
    assert band.numel() * band.element_size() <= dk.numel() * dk.element_size()


def test_rows_of_wide_heads_that_see_one_token():
    """dP and its mean cancel exactly, so only the gradient of lse is left."""
    compare.check(OP, inputs.cross_attention(3, B=1, N=9, M=4, H=2, D=256, K=1, R=1), "triton")
