"""Every backend of relative attention against the float64 reference, and its properties."""

import functools

import pytest
import torch

import retro_kernels as rk
from retro_kernels.testing import compare, inputs
from tests.conftest import in_types

OP = "relative_attention"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
#: two heads show a wrong stride; more, or a batch in every case, take the interpreter longer
call = functools.partial(inputs.self_attention, B=1, H=2)

CASES = {
    "plain": dict(rel=None, biases=False),
    "content bias alone": dict(rel=None),
    "relative": dict(B=2),
    "relative, no biases": dict(biases=False),
    "shared relative keys": dict(heads="shared"),
    "causal": dict(causal=True),
    "strictly causal": dict(causal=True, causal_gap=1),
    "gap wider than the sequence": dict(causal=True, causal_gap=40),
    "sliding window": dict(causal=True, window=4),
    "window of one": dict(causal=True, window=1),
    "window inside the gap": dict(causal=True, causal_gap=3, window=3),
    "window, both directions": dict(window=3, query_offset=2),
    "blocks": dict(window_block=4, causal=True),
    "blocks, both directions": dict(window_block=4),
    "blocks of one": dict(window_block=1, causal=True, segments=True),
    "blocks, off the grid": dict(window_block=5, causal=True, query_offset=3, S=17, key_mask=True),
    "blocks before the keys": dict(window_block=3, query_offset=-10, N=20, causal=True),
    "blocks past the keys": dict(window_block=3, query_offset=7),
    "blocks wider than all": dict(window_block=50, causal=True, dropout_p=0.3),
    "one query, blocks": dict(window_block=7, causal=True, N=1, S=70, rel="bounded", rel_start=0, T=14),
    "more keys": dict(N=3, S=11),
    "more keys, causal": dict(N=3, S=11, causal=True),
    "more queries": dict(N=11, S=3),
    "more queries, causal": dict(N=11, S=3, causal=True),
    "one query": dict(N=1, S=9, causal=True),
    "one query, one key": dict(N=1, S=1),
    "one query, documents, splits of the keys past the gap": dict(N=1, S=70, causal=True, causal_gap=30, segments=True),
    "one query, key mask, splits of the keys before the window": dict(
        N=1, S=140, causal=True, window=10, key_mask=True
    ),
    "offset beyond the keys": dict(N=5, S=4, query_offset=30),
    "offset before the keys": dict(N=5, S=4, query_offset=-30, causal=True),
    "key mask": dict(B=2, key_mask=True),
    "segments": dict(B=2, segments=True),
    "everything hides": dict(B=2, key_mask=True, segments=True, causal=True, window=6),
    "grouped heads": dict(H=6, G=2),
    "one key head": dict(G=1, key_mask=True),
    "low rank": dict(E=16, D=32, causal=True, rel="bounded", rel_start=0, T=9),
    "table": dict(E=1, heads="shared"),
    "odd width": dict(E=5, heads="each", causal=True),
    "wide": dict(E=72),
    "bounded to the left": dict(rel="bounded", rel_start=-5, T=3),
    "bounded to the right": dict(rel="bounded", rel_start=2, T=4),
    "bounded, outside": dict(rel="bounded", rel_start=40, T=4),
    "bounded, wider than all": dict(rel="bounded", rel_start=-30, T=60),
    "bounded, one row": dict(rel="bounded", rel_start=0, T=1, E=8),
    "head of 24": dict(D=24, N=9),
    "head of 72": dict(D=72, N=9),
    "head of 256": dict(D=256, N=6, H=1),
    "scale": dict(scale=0.7),
    "dropout": dict(B=2, dropout_p=0.4, causal=True, key_mask=True),
}


@pytest.mark.parametrize(("name", "dtype"), in_types(CASES, DTYPES))
def test_values_and_gradients(backend, name, dtype):
    kw = call(3, dtype=dtype, **CASES[name])
    compare.check(OP, kw, backend)


@pytest.mark.parametrize("start", range(-8, 9))
def test_every_edge_of_a_bounded_extent(backend, start):
    """Three rows of relative keys from `start`: of the displacements -6..6 some, all or none are inside."""
    compare.check(OP, call(4, N=7, H=1, rel="bounded", rel_start=start, T=3, E=8), backend)


@pytest.mark.parametrize("far", [2**30, 2**31 - 1, 2**63 - 1])
def test_limits_past_every_position(backend, far):
    """A window larger than the sequence hides nothing, a larger gap hides everything; sys.maxsize works too."""
    kw = call(16, causal=True, N=5, S=9)
    want = compare.run(OP, kw, backend)
    for name, value in compare.run(OP, {**kw, "window": far}, backend).items():
        torch.testing.assert_close(value, want[name], msg=name)
    for name, value in compare.run(OP, {**kw, "causal_gap": far}, backend).items():
        assert (value == (-torch.inf if name == "out1" else 0)).all(), name


@pytest.mark.parametrize("far", [2**29, -(2**29)])
def test_the_farthest_positions(backend, far):
    """Only differences of positions count: a common large offset changes nothing, and a table at the other end is never
    used.
    """
    first = -3 if far > 0 else 0  # so that the table starts within the bound
    kw = call(17, N=5, S=9, rel="bounded", rel_start=first, T=4, query_offset=0)
    want = compare.run(OP, kw, backend)
    for name, value in compare.run(OP, {**kw, "query_offset": far, "rel_start": far + first}, backend).items():
        torch.testing.assert_close(value, want[name], msg=name)
    outside = compare.run(OP, {**kw, "query_offset": far, "rel_start": -far}, backend)
    assert (outside["grad_rel_key"] == 0).all() and (outside["grad_position_bias"] == 0).all()
    without = compare.run(OP, {**kw, "rel_key": None, "rel_start": None, "position_bias": None}, backend)
    for name, value in without.items():
        torch.testing.assert_close(outside[name], value, msg=name)


def test_decoding_in_blocks_equals_the_whole(backend):
    kw = call(12, causal=True, window_block=4, rel="bounded", rel_start=0, T=8, E=8)
    whole = rk.relative_attention(**kw, backend=backend)
    for start, n in [(i, 1) for i in range(13)] + [(2, 9), (5, 6)]:
        step = {
            **kw,
            **{name: kw[name][:, start : start + n] for name in ("query", "rel_query")},
            "query_offset": start,
        }
        torch.testing.assert_close(rk.relative_attention(**step, backend=backend), whole[:, start : start + n])


def test_decoding_equals_the_whole(backend):
    """Token by token and in blocks, with a growing cache of keys: a bounded extent, and every displacement."""
    for case in (dict(rel="bounded", rel_start=0, T=20, E=8), dict()):
        kw = call(12, causal=True, window=9, **case)
        whole, lse = rk.relative_attention(**kw, return_lse=True, backend=backend)
        for start, n in [(i, 1) for i in range(13)] + [(2, 9), (0, 5)]:
            end = start + n
            step = {**kw, "query": kw["query"][:, start:end], "key": kw["key"][:, :end], "value": kw["value"][:, :end]}
            if "rel_query" in kw:
                step["rel_query"] = kw["rel_query"][:, start:end]
            else:  # all rows: displacements 1-n .. end-1, row 0 of the whole table being displacement -12
                step["rel_key"] = kw["rel_key"][:, 12 + 1 - n : 12 + end]
            out, step_lse = rk.relative_attention(**step, return_lse=True, backend=backend)
            torch.testing.assert_close(out, whole[:, start:end])
            torch.testing.assert_close(step_lse, lse[:, :, start:end])
