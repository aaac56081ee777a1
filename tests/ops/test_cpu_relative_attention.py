"""Relative attention and its logits on the CPU: block edges, every instruction set, any number of threads."""

import subprocess
import sys

import pytest
import torch

import retro_kernels as rk
from retro_kernels import extensions
from retro_kernels.testing import compare, inputs
from tests.ops.same import assert_threads_do_not_show

from .test_cpu_infrastructure import isas

pytestmark = pytest.mark.skipif(extensions.unavailable("_cpu") is not None, reason=str(extensions.unavailable("_cpu")))

# blocks are 64 queries by 128 keys, tasks 256 queries
BLOCKS = {
    "63": dict(N=63, S=63, causal=True),
    "64": dict(N=64, S=64, causal=True),
    "65": dict(N=65, S=65, causal=True, causal_gap=1),
    "127 by 128": dict(N=127, S=128, segments=True),
    "129 by 191": dict(N=129, S=191, key_mask=True),
    "256 by 257": dict(N=256, S=257, causal=True, E=3),
    "300, windowed": dict(N=300, S=300, causal=True, window=67),
    "300, window of a block": dict(N=300, S=300, causal=True, window=64, E=8),
    "300, window of one": dict(N=300, S=300, window=1, query_offset=0, E=1),
    "300, blocks": dict(N=300, S=300, causal=True, window_block=64, E=8),
    "300, blocks off the grid": dict(N=300, S=300, causal=True, window_block=37, query_offset=11),
    "300, blocks, both directions": dict(N=300, S=300, window_block=100, query_offset=-77, key_mask=True),
    "two queries, blocks": dict(N=2, S=700, causal=True, window_block=130, D=24, E=5),
    "300, bounded": dict(N=300, S=300, causal=True, rel="bounded", rel_start=0, T=70, E=16),
    "300, bounded off the chunks": dict(N=200, S=300, rel="bounded", rel_start=-77, T=65, E=16),
    "one query": dict(N=1, S=300, causal=True),
    "one query, a short table": dict(N=1, S=300, causal=True, rel="bounded", rel_start=0, T=90),
    "two queries, a short table": dict(N=2, S=300, H=4, G=2, D=24, E=5, rel="bounded", rel_start=-1, T=40),
    "one query, many ranges": dict(N=1, S=900, causal=True, H=4, G=2),
    "two queries, window": dict(N=2, S=700, causal=True, window=530, D=24, E=5),
    "two queries that see nothing": dict(N=2, S=300, causal=True, query_offset=-2),
    "two queries of documents": dict(N=2, S=600, B=3, segments=True, key_mask=True, heads="shared"),
    "two queries, bounded": dict(N=2, S=300, causal=True, rel="bounded", rel_start=20, T=70, E=16),
    "five queries, window": dict(N=5, S=300, causal=True, window=130),
    "one key": dict(N=200, S=1),
    "one key, wide head": dict(N=40, S=1, D=200),
    "two keys, wide head": dict(N=90, S=90, D=256, causal=True, window=2),
    "grouped heads": dict(N=70, S=140, H=4, G=2, heads="shared", E=5, causal=True),
    "more queries than keys": dict(N=260, S=70, causal=True),
    "many batch entries": dict(B=9, N=5, S=7, H=8),
    "many batch entries of grouped heads": dict(B=9, N=5, S=7, H=4, G=2, E=5),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_block_edges(name):
    compare.check("relative_attention", inputs.self_attention(3, **{"B": 1, "H": 2, **BLOCKS[name]}), "cpu")


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        dict(N=70, S=140, key_mask=True, causal=True, D=24, E=5),
        dict(N=9, S=70, H=4, G=2, window=20, dropout_p=0.2),
        dict(N=200, S=1),
        dict(N=130, S=140, H=2, E=3, causal=True),
        dict(N=2, S=300, H=4, G=2, D=24, E=5, causal=True, key_mask=True),
        dict(N=130, S=140, H=2, E=3, causal=True, window_block=33),
        dict(B=2, N=70, S=140, D=24, causal=True, rel="bounded", rel_start=0, T=90, query_offset=torch.tensor([3, 70])),
        dict(B=2, N=1, S=140, D=24, causal=True, rel="bounded", rel_start=0, T=90, query_offset=torch.tensor([3, 130])),
    ],
    ids=str,
)
def test_every_isa(kernels, isa, dtype, case):
    kernels.set_isa(isa)
    compare.check("relative_attention", inputs.self_attention(4, dtype=dtype, **{"B": 1, "H": 2, **case}), "cpu")
    logits = dict(B=1, N=70, H=2, key_len=90, E=case.get("E", 16))
    compare.check("relative_logits", inputs.relative_logits(4, dtype=dtype, **logits), "cpu")


def test_what_a_single_query_may_not_see_is_not_read():
    kw = inputs.self_attention(10, B=2, N=1, S=330, H=2)
    mask = torch.rand(2, 330, generator=inputs.generator(11)) < 0.5
    for name in ("key", "value"):
        kw[name] = kw[name].masked_fill(~mask[..., None, None], torch.nan)
    compare.check("relative_attention", kw | {"key_mask": mask}, "cpu")


def test_documents_hide_whole_tiles():
    """Five documents in one row of 300: hidden tiles are skipped, and the band restarts after each gap."""
    kw = inputs.self_attention(5, B=1, N=300, H=2)
    ids = torch.tensor([0] * 70 + [1] * 60 + [2] * 3 + [3] * 130 + [0] * 37).view(1, -1)  # the first one returns
    compare.check("relative_attention", kw | {"query_segment": ids, "key_segment": ids}, "cpu")


def test_a_masked_block_between_visible_ones():
    kw = inputs.self_attention(6, B=2, N=70, S=330, H=2)
    mask = torch.ones(2, 330, dtype=torch.bool)
    mask[0, 60:200], mask[1, 128:256] = False, False
    for name in ("key", "value"):
        kw[name] = kw[name].masked_fill(~mask[..., None, None], torch.nan)
    compare.check("relative_attention", kw | {"key_mask": mask}, "cpu")


@pytest.mark.parametrize("key_len", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("N", [1, 63, 64, 65, 130])
def test_logits_at_block_edges(N, key_len):
    compare.check("relative_logits", inputs.relative_logits(7, B=1, N=N, H=2, E=5, key_len=key_len), "cpu")


def test_bits_do_not_depend_on_threads():
    for case in (
        dict(B=1, N=300, H=2, causal=True),
        dict(B=1, N=1, S=900, H=2),
        dict(B=9, N=20, H=8, heads="shared", E=3),
    ):
        assert_threads_do_not_show("relative_attention", inputs.self_attention(8, **case))
    assert_threads_do_not_show("relative_logits", inputs.relative_logits(8, N=300, key_len=70))


MEMORY = """
import resource, torch, retro_kernels as rk
from retro_kernels.testing import inputs
kw = inputs.self_attention(9, B=1, N=16384, H=1, D=16, rel="bounded", rel_start=0, T=64, causal=True, window=100)
kw = inputs.differentiable(kw)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rk.relative_attention(**kw, backend="cpu").sum().backward()
rk.relative_logits(kw["query"][:, :64], kw["rel_key"], key_len=16384, rel_start=0, backend="cpu")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_is_linear():
    """One matrix [N,N] of 16384 tokens takes 1 GiB; forward and backward use less than an eighth of it."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True)
    assert int(done.stdout) < 128 * 1024, done.stderr  # KiB


@pytest.mark.parametrize("rows", [1, 2])
def test_probabilities_of_a_few_rows_add_up_to_one(rows):
    """The forward pass of few rows adds scores in another order, so `lse` would not match large scores of the backward
    pass.
    """
    kw = inputs.self_attention(1, B=2, N=rows, S=150, H=2, D=200, scale=1.0)
    kw["value"].requires_grad_()
    out = rk.relative_attention(**kw, backend="cpu")
    upstream = torch.randn(out.shape, generator=inputs.generator(2))
    (grad,) = torch.autograd.grad(out, kw["value"], upstream)
    torch.testing.assert_close(grad.double().sum(1), upstream.double().sum(1), atol=2e-6, rtol=0)


@pytest.mark.parametrize("rows", [1, 2])
def test_score_gradients_of_a_few_rows_add_up_to_zero(rows):
    """Their mean uses the backward pass' own probabilities, not the output of the forward pass."""
    for seed in range(6):
        kw = inputs.self_attention(seed, B=2, N=rows, S=300, H=2, D=64, E=1, biases=False, scale=1.0, causal=False)
        kw["rel_key"] = torch.ones_like(kw["rel_key"])  # so that a relative query's gradient is that sum
        kw["rel_query"].requires_grad_()
        out = rk.relative_attention(**kw, backend="cpu")
        (grad,) = torch.autograd.grad(out, kw["rel_query"], torch.randn(out.shape, generator=inputs.generator(2)))
        torch.testing.assert_close(grad, torch.zeros_like(grad), atol=4e-6, rtol=0)
