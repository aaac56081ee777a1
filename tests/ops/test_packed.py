"""Packed documents by `cu_seqlens`: values of separate calls, errors, reads by the host."""

import pytest
import torch

import retro_kernels as rk
from retro_kernels.testing import compare, inputs
from tests import standin
from tests.conftest import COMPILED, INTERPRETER

OP = "relative_attention"
ENDS = [0, 7, 7, 30, 41]  # one document is empty
LINE = {"rel_start": 0, "T": 20}  # displacements; a document may be longer


def boundaries(*ends):
    return torch.tensor(ends, dtype=torch.int32, device=inputs.DEVICE)


def packed(**options):
    return inputs.self_attention(3, B=1, N=ENDS[-1], H=2, causal=True, rel="bounded", **LINE, **options)


def test_segments_and_boundaries_give_the_same_bits(backend):
    kw = packed()
    segment = torch.repeat_interleave(torch.arange(3), torch.tensor([7, 23, 11]))[None].to(inputs.DEVICE)
    want = compare.run(OP, {**kw, "query_segment": segment, "key_segment": segment}, backend)
    got = compare.run(OP, {**kw, "cu_seqlens": boundaries(*ENDS)}, backend)
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("falling", [False, True])
def test_the_table_takes_documents_that_ascend_and_those_that_do_not(backend, falling):
    """Rows of several tiles: displacements beyond every document add nothing, and an unsorted order loses none."""
    kw = inputs.self_attention(4, B=1, N=200, S=200, D=16, H=1, G=1, causal=True)
    segment = torch.arange(200, device=inputs.DEVICE)[None] // 40
    segment = segment * (-1 if falling else 1)
    if falling:
        segment[0, 100:] += 3  # the first ones return
    compare.check(OP, {**kw, "query_segment": segment, "key_segment": segment}, backend)


@pytest.mark.parametrize(
    "given, error, words",
    [
        (lambda: boundaries(1, 41), ValueError, "begin with 0"),
        (lambda: boundaries(0, 30, 20, 41), ValueError, "never to fall"),
        (lambda: boundaries(0, 40), ValueError, "end with N=41"),
        (lambda: boundaries(0, 41).long(), TypeError, "cu_seqlens: expected torch.int32; got torch.int64"),
        (lambda: boundaries(0, 41)[None], ValueError, r"cu_seqlens: expected \[documents\+1\]"),
        (lambda: [0, 41], TypeError, "cu_seqlens: expected a tensor or None; got list"),
    ],
)
def test_errors(given, error, words):
    with pytest.raises(error, match=words):
        rk.relative_attention(**packed(), cu_seqlens=given(), backend="reference")


def test_boundaries_of_a_batch_or_beside_segments_are_refused():
    kw = inputs.self_attention(5, N=8, S=8)
    with pytest.raises(ValueError, match=r"query: expected \[1,N,H,D\] where cu_seqlens is given"):
        rk.relative_attention(**kw, cu_seqlens=boundaries(0, 8))
    with pytest.raises(ValueError, match="expected None where query_segment is given"):
        rk.relative_attention(**inputs.self_attention(5, segments=True), cu_seqlens=boundaries(0, 8))


@pytest.mark.skipif(INTERPRETER or COMPILED, reason="the stand-in needs no kernels")
def test_a_gpu_reads_no_boundary_and_what_lies_beyond_attends_nothing():
    near = torch.tensor([2, 20, 30], dtype=torch.int32)
    with standin.standing_in() as waits:
        kw = {n: v.to(standin.DEVICE) if isinstance(v, torch.Tensor) else v for n, v in packed(E=8).items()}
        cu_seqlens = near.to(standin.DEVICE)
        waits.clear()
        out = rk.relative_attention(**kw, cu_seqlens=cu_seqlens, backend="triton")
        assert not waits
        out = out.cpu()
    assert (out[:, :2] == 0).all() and (out[:, 30:] == 0).all() and (out[:, 2:30] != 0).any(-1).all()


@pytest.mark.skipif(INTERPRETER, reason="the interpreter runs eagerly whatever compiles around it")
def test_boundaries_compile(backend):
    kw = packed()
    call = torch.compile(
        lambda ends: rk.relative_attention(**kw, cu_seqlens=ends, backend=backend), fullgraph=True, backend="aot_eager"
    )
    ends = boundaries(*ENDS)
    torch.testing.assert_close(call(ends), rk.relative_attention(**kw, cu_seqlens=ends, backend=backend))
