"""The ops' kernels as compiled for sm_80, sm_90 and sm_100, executed, against the float64 reference.

A selection: each call on one architecture, nightly on all; `make check-compiled` runs the ops' whole suite so. Values,
every gradient, and the emulator's checks: bounds, alignment, uninitialised shared memory, races, waits.
"""

import pytest
import torch

import retro_kernels as rk
from ptx_emulator import counters, launches
from ptx_emulator.program import Counted
from retro_kernels.testing import compare, inputs
from tests.conftest import COMPILED, INTERPRETER
from tests.emulated import planted
from tests.emulating import emulating

if INTERPRETER or COMPILED:
    pytest.skip("kernels are interpreted, or emulated by conftest already", allow_module_level=True)

HALVES = [torch.float16, torch.bfloat16]
CALLS = {
    "cca": (
        "chunked_cross_attention",
        lambda dtype: inputs.cross_attention(dtype=dtype, N=70, M=32, R=40, D=64, B=1, H=1, gate=True, mask="token"),
    ),
    "cca grouped": (
        "chunked_cross_attention",
        lambda dtype: inputs.cross_attention(dtype=dtype, N=40, M=16, R=24, D=24, B=1, H=2, G=1, E=16),
    ),
    "cca decode": (
        "chunked_cross_attention",
        lambda dtype: inputs.cross_attention(dtype=dtype, N=1, M=16, R=32, D=64, B=1, query_start=40),
    ),
    "attention": (
        "relative_attention",
        lambda dtype: inputs.self_attention(dtype=dtype, N=70, B=1, D=64, H=1, causal=True),
    ),
    "attention, documents": (
        "relative_attention",
        lambda dtype: inputs.self_attention(
            dtype=dtype, N=40, B=1, D=32, H=1, causal=True, segments=True, window=30, dropout_p=0.2
        ),
    ),
    "logits": ("relative_logits", lambda dtype: inputs.relative_logits(dtype=dtype, N=40, key_len=50)),
    "top-k": ("topk_chunks", lambda dtype: inputs.topk(dtype=dtype, Q=9, S=140, D=48, k=5, docs=True, causal_gap=1)),
    "scan": ("leaky_average", lambda dtype: inputs.leaky(dtype=dtype, N=150, D=24)),
}


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        pytest.param(name, arch, marks=() if number % 3 == place else pytest.mark.nightly)
        for number, name in enumerate(CALLS)
        for place, arch in enumerate((80, 90, 100))
    ],
)
def test_values_and_gradients(name, arch):
    op, make = CALLS[name]
    types = [torch.float32, *HALVES]
    dtype = torch.bfloat16 if arch == 90 else types[(list(CALLS).index(name) + arch // 50) % 3]
    with emulating(arch):
        compare.check(op, make(dtype), "triton")


def test_what_serves_a_call_is_chosen_anew_inside_and_after():
    """A call without a backend uses `triton` inside the emulation, even if it was made before, and not afterwards."""
    x = torch.ones(1, 4, 1, 16)
    decay, log = torch.tensor([0.5]), []
    rk.leaky_average(x, decay)
    with emulating(90, log=log):
        rk.leaky_average(x, decay)
    assert [launch.name for launch in log] == ["leaky_scan"]
    rk.leaky_average(x, decay)
    assert len(log) == 1


def test_float32_products_on_tensor_cores_are_three():
    """A product whose low parts are dropped (tf32 instead of tf32x3) exceeds the tolerance."""
    log = []
    with emulating(80, log=log):
        want = compare.run("relative_logits", CALLS["logits"][1](torch.float32), "triton")["out0"].clone()
    forward = log[0]
    out = forward.arguments["out_ptr"]
    assert torch.equal(out, want)
    (struck,) = planted.without_low_parts(launches.compiled(forward, 80))
    launches.run(forward, 80, kernel=struck)
    error = ((out - want).norm() / want.norm()).item()
    assert 1e-4 < error < 1e-2


@pytest.mark.parametrize(
    ("arch", "kernel"), [(80, "relative_forward"), pytest.param(90, "cca_forward", marks=pytest.mark.nightly)]
)
def test_planted_faults_are_reported(arch, kernel):
    """Most of them are: the last wait of a kernel can go unseen, or a barrier followed by another
    (docs/decisions, 020, has the counts).
    """
    counts = {plant: found for _, plant, found in planted.count(arch, torch.bfloat16, kernel, most=4)}
    assert set(counts) >= {"a barrier gone", "a wait for copies gone", "a predicate of a load lost"}
    silent = [plant for plant, found in counts.items() if found.reported == 0]
    assert not silent
    assert sum(found.reported for found in counts.values()) >= 0.7 * sum(f.planted for f in counts.values()), counts


def test_counters_see_a_lost_coalescing():
    """The same copy with its lanes a row apart: 32 sectors a request, not 2."""
    import triton
    import triton.language as tl

    from retro_kernels.triton_lib.launch import Launch

    @triton.jit
    def copy_kernel(x_ptr, y_ptr, STRIDE: tl.constexpr):
        at = tl.arange(0, 128) * STRIDE
        tl.store(y_ptr + at, tl.load(x_ptr + at))

    ratios = []
    for stride in (1, 33):
        x, y = torch.zeros(128 * 33), torch.zeros(128 * 33)
        metrics, _ = counters.count(Launch(copy_kernel, (1,), {"x_ptr": x, "y_ptr": y, "STRIDE": stride}), 80)
        ratios.append(metrics["sectors_over_fewest"])
    assert ratios[0] == 1.0 and ratios[1] >= 7.9


def test_a_lost_coalescing_and_a_bank_conflict_are_regressions_of_static_rows(tmp_path):
    """`ab --static-only` reports a row of counters for a copy whose lanes are a row apart."""
    from retro_bench.static import regressions, table

    selection = table.select([80], ("leaky_scan:wide:sm80/bfloat16",))
    (row,) = table.rows(selection, tmp_path, 1, counters=True)
    assert row["static"]["emulation_fault"] is None and row["static"]["sectors_over_fewest"] < 1.1
    assert regressions.regressions([row], [row]) == []

    def with_copy(sectors: int, wavefronts: int) -> dict:
        load = Counted("ld.global.b32", "a.py:1", 1, 1, sectors, 4)
        store = Counted("st.shared.b32", "a.py:2", 1, 1, wavefronts, 1)
        return row | {"static": row["static"] | counters.summary([load, store])}

    good = with_copy(4, 1)
    (line,) = regressions.regressions([good], [with_copy(32, 1)])
    assert "sectors of global memory: 8.0 times the fewest possible" in line
    (line,) = regressions.regressions([good], [with_copy(4, 32)])
    assert "wavefronts of shared memory: 32.0 times the fewest possible" in line
