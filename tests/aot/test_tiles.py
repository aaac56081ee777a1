"""Tables of tiles: rows are complete, rows with options come first, and every named option occurs in calls."""

import itertools
import json

import pytest
import torch

from retro_kernels.compile import tiles
from retro_kernels.compile.target import KNOWN
from retro_kernels.ops.chunked_cross_attention import triton as chunked_cross_attention
from retro_kernels.ops.relative_attention import triton as relative_attention
from retro_kernels.triton_lib.combinations import WIDTHS

TABLES = sorted(path.parent.name for path in tiles._OPS.glob("*/tiles.json"))
EVERYTHING = dict(D=64, E=16, T=16, dropout_p=0.1, key_mask=True, window=512)
#: by cost, the highest first: the order of rows in a table
OPTIONS = ("dropout", "gated_mask", "edges", "many", "masked", "plain", "window", "narrow", "padded", "apart")

#: calls that are not a combination of options: a short table, a separate relative query, a head that is padded
MORE = (dict(D=64, T=1024), dict(D=128, E=128), dict(D=96))


def call(**options):
    return relative_attention.cases.call(torch.bfloat16, **options)


def test_options_of_a_call():
    def cross(**options):
        return chunked_cross_attention.launch.options(chunked_cross_attention.cases.call(torch.bfloat16, **options))

    def relative(**options):
        return relative_attention.launch.options(call(**options))

    every = ("dropout", "masked", "window", "narrow")
    assert relative(D=64) == relative(D=64, rel=None, biases=False) == cross(D=64) == ()
    assert relative(**EVERYTHING) == every and relative(D=96) == ("padded",)
    assert relative(**EVERYTHING, causal=False) == ("dropout", "edges", *every[1:])
    assert relative(D=64, window=512, causal=False) == ("edges", "masked", "window")
    assert relative(D=64, segments=True) == ("masked",)
    assert cross(D=64, E=16, gate=True) == ("masked", "narrow")
    assert cross(rel=None, biases=False, dropout_p=0.1) == ("dropout", "masked", "plain")


@pytest.mark.parametrize("op", TABLES)
def test_a_row_with_an_option_is_one_of_a_kernel_that_serves_all(op):
    rows = tiles.table(op)
    place = ("kernel", "arch", "bytes", "width", "rows")
    bare = {tuple(row.get(name) for name in place) for row in rows if "with" not in row}
    named = [row for row in rows if "with" in row]
    assert all(tuple(row.get(name) for name in place) in bare for row in named)
    assert all(tiles.named(row) == [name for name in OPTIONS if name in tiles.named(row)] for row in named), (
        "an unknown option or order"
    )
    for one, two in itertools.pairwise(row for row in rows if len(tiles.named(row)) == 1):
        if all(one[name] == two[name] for name in place):
            assert OPTIONS.index(one["with"]) < OPTIONS.index(two["with"])
    written = [json.dumps(row) for row in rows]
    assert len(written) == len(set(written))


#: options of a call -> stages of the row that serves it
SERVED = {(): 1, ("masked",): 2, ("dropout", "masked"): 3, ("masked", "dropout"): 3, ("window",): 1}
SERVED[("dropout", "masked", "window")] = 4


@pytest.mark.parametrize("options", SERVED)
def test_most_options_win_then_the_first_row(options):
    row = dict(kernel="k", arch=80, bytes=2, width=64, rows=1 << 30, block_m=64, block_n=64, num_warps=4)
    row |= dict(num_stages=1, precision="ieee")
    wider = {**row, "width": 128, "with": "dropout", "num_stages": 5}
    both = {**row, "with": "masked+window", "num_stages": 4}
    rows = (wider, row, {**row, "with": "dropout", "num_stages": 3}, {**row, "with": "masked", "num_stages": 2}, both)
    query = tiles.TileQuery("k", 2, 64, 512, 512, options)
    with tiles.replaced("relative_attention", rows):
        assert tiles.choose_tile("relative_attention", query, KNOWN[90]).num_stages == SERVED[options]


@pytest.mark.parametrize("arch", KNOWN)
@pytest.mark.parametrize(
    "op, cases",
    [(relative_attention, relative_attention.cases), (chunked_cross_attention, chunked_cross_attention.cases)],
)
def test_every_row_with_an_option_serves_some_call(op, cases, arch):
    with tiles.watched() as seen:
        launches = list(op.aot_combinations(KNOWN[arch]))
        for options in MORE if op is relative_attention else ():
            list(relative_attention._cases("", call(**options), KNOWN[arch]))
    assert len({launch.case for launch in launches}) == len(WIDTHS) * len(cases.POSITIONS) * 2 ** len(cases.OPTIONS)
    name = op.__name__.split(".")[-2]
    used = [row for _, row in seen]
    mine = [
        row
        for row in tiles.table(name)
        if row["arch"] == arch and row["bytes"] == 2 and row["width"] in WIDTHS and "with" in row
    ]
    assert not [row for row in mine if row not in used]
