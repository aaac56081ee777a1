"""Every backend of chunked cross-attention against the float64 reference, and its properties."""

import functools

import pytest
import torch

import retro_kernels as rk
from retro_kernels.testing import compare, inputs
from tests.conftest import in_types

OP = "chunked_cross_attention"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
#: two heads show a wrong stride, and a whole and a cut chunk a wrong row: more take the interpreter longer
call = functools.partial(inputs.cross_attention, N=10, H=2)

CASES = {
    "plain": dict(rel=None, biases=False),
    "relative": dict(),
    "shared relative keys": dict(heads="shared"),
    "one chunk": dict(N=7, M=4),
    "shorter than a chunk": dict(N=3, M=4, extra_chunks=1),
    "ragged end": dict(N=13, M=5, R=7),
    "spare chunks": dict(extra_chunks=2),
    "one neighbour": dict(K=1),
    "forty neighbours": dict(K=40, R=3, N=6, B=1),
    "masked neighbours": dict(mask="neighbour"),
    "ragged neighbours": dict(mask="token", gate=True),
    "gate": dict(gate=True),
    "grouped heads": dict(B=1, H=6, G=2, gate=True),
    "one key head": dict(G=1, mask="token"),
    "narrow relative": dict(E=16, D=32),
    "table": dict(E=1, heads="shared"),
    "odd relative width": dict(E=5, gate=True),
    "bounded, left edge": dict(rel="bounded", rel_start=-5, T=3),
    "bounded, right edge": dict(rel="bounded", rel_start=2, T=4),
    "bounded, outside": dict(rel="bounded", rel_start=40, T=4),
    "bounded, wider than all": dict(rel="bounded", rel_start=-30, T=60),
    "bounded, one row": dict(rel="bounded", rel_start=0, T=1, E=8, H=4),  # sums of fewer numbers may cancel
    "chunk of one": dict(M=1, N=5, R=3),
    "long chunk": dict(M=37, N=74, R=11, B=1),
    "long neighbour": dict(M=3, N=6, R=150, B=1),
    "head of 24": dict(D=24, N=9),
    "head of 72": dict(D=72, N=9, B=1),
    "head of 256": dict(D=256, N=6, B=1, H=1),
    "decoding, mid chunk": dict(query_start=9, N=1),
    "decoding, chunk end": dict(query_start=7, N=1),
    "decoding a block": dict(query_start=6, N=7),
    "decoding before a chunk": dict(query_start=1, N=2, extra_chunks=1),
    "dropout": dict(dropout_p=0.4, gate=True, mask="token"),
}


@pytest.mark.parametrize(("name", "dtype"), in_types(CASES, DTYPES))
def test_values_and_gradients(backend, name, dtype):
    compare.check(OP, call(3, dtype=dtype, **CASES[name]), backend)


def test_decoding_equals_the_whole(backend):
    kw = call(10, B=1, N=11, mask="token")
    whole, lse = rk.chunked_cross_attention(**kw, return_lse=True, backend=backend)
    for start, n in [(i, 1) for i in range(11)] + [(2, 9), (0, 5), (5, 3)]:
        step = {**kw, "query": kw["query"][:, start : start + n], "query_start": start}
        out, step_lse = rk.chunked_cross_attention(**step, return_lse=True, backend=backend)
        torch.testing.assert_close(out, whole[:, start : start + n])
        torch.testing.assert_close(step_lse, lse[:, :, start : start + n])
