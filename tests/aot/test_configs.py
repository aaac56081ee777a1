"""The tables of tiles: rows are whole, options go before what has none, and every option named is one that calls have."""

import json

import pytest
import torch

from retro_kernels import configs
from retro_kernels._target import KNOWN
from retro_kernels.triton import _relative_cases, _relative_plan

TABLES = sorted(path.stem for path in configs._TABLES.glob("*.json"))
EVERYTHING = dict(D=64, E=16, T=16, dropout_p=0.1, mask=True, window=512)
OPTIONS = ("dropout", "masked", "window", "narrow")


def call(**options):
    return _relative_cases.call(torch.bfloat16, **options)


def test_options_of_a_call():
    assert _relative_plan.options(call(D=64)) == ()
    assert _relative_plan.options(call(**EVERYTHING)) == OPTIONS
    assert _relative_plan.options(call(D=64, segments=True)) == ("masked",)
    assert _relative_plan.options(call(D=64, rel=False, biases=False)) == ()


@pytest.mark.parametrize("op", TABLES)
def test_a_row_with_an_option_is_one_of_a_kernel_that_serves_all(op):
    rows = configs.table(op)
    place = ("kernel", "arch", "bytes", "width", "rows")
    bare = {tuple(row.get(name) for name in place) for row in rows if "with" not in row}
    named = [row for row in rows if "with" in row]
    assert all(row["with"] in OPTIONS and tuple(row.get(name) for name in place) in bare for row in named)
    written = [json.dumps(row) for row in rows]
    assert len(written) == len(set(written))


@pytest.mark.parametrize(
    "options, stages", [((), 1), (("masked",), 2), (("dropout", "masked"), 3), (("window",), 1), (("masked", "dropout"), 2)]
)
def test_the_first_option_that_has_a_row_wins(options, stages):
    row = dict(kernel="k", arch=80, bytes=2, width=64, rows=1 << 30, block_m=64, block_n=64, num_warps=4, num_stages=1, precision="ieee")
    wider = {**row, "width": 128, "with": "dropout", "num_stages": 5}
    rows = (wider, row, {**row, "with": "dropout", "num_stages": 3}, {**row, "with": "masked", "num_stages": 2})
    with configs.replaced("relative_attention", rows):
        assert configs.choose("relative_attention", configs.Problem("k", 2, 64, 512, 512, options), KNOWN[90]).num_stages == stages
