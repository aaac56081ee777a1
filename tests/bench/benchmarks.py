"""Front end for developers: `python -m pytest tests/bench/benchmarks.py --benchmark-only -k "retro-172m and fwd"`.

Each kernel is checked, then timed by pytest-benchmark, and its record goes to bench/out/pytest-benchmark.jsonl. With
--benchmark-disable every case runs once and nothing is recorded. It is no gate; `ab` is.
"""

from __future__ import annotations

import pytest
import torch

import retro_bench
import retro_kernels as rk
from retro_bench.measure import choose as plan
from retro_bench.measure import profilers, runner, samples, timing
from retro_bench.records import environment, record

OUT = environment.ROOT / "bench" / "out" / "pytest-benchmark.jsonl"
ROUNDS = 10
RUN = runner.Run("cpu", effort=samples.Effort(most=1))  # checks each call and times it once


def measurements():
    """Every kernel (the reference where there is none), case, type and mode of the default CPU selection."""
    for name, *parts in profilers.kernels(plan.Selection("cpu", baselines=())):
        yield pytest.param(*parts, id=name)


@pytest.mark.parametrize(("contender", "case", "dtype", "mode"), list(measurements()))
def test_kernel(benchmark, contender, case, dtype, mode):
    eager = retro_bench.CONTENDERS[case.op, plan.YARDSTICK]
    made = record.latest(list(runner.run_case(RUN, case, dtype, [mode], [eager, contender])))
    done = made[record.identity(case.op, contender.name, case.name, dtype, mode)]
    if done["status"] == "unsupported":
        pytest.skip(done["reason"])
    assert done["status"] == "ok", done["reason"]
    arguments = case.make(done["seed"], "cpu", getattr(torch, dtype))
    call = runner.step(contender, case, arguments, mode == "fwdbwd")
    benchmark.pedantic(call, rounds=ROUNDS, warmup_rounds=timing.WARMUPS)
    if benchmark.enabled:
        method = {"clock": "wall", "cache": "warm", "threads": torch.get_num_threads(), "repeats": 1}
        time = samples.summary(list(benchmark.stats.stats.data), method)
        record.Writer(OUT).write(done | {"time": time, "speedup": None})


@pytest.mark.parametrize("op", list(retro_bench.OPERATORS))
def test_host_overhead(benchmark, op):
    """The public function on the smallest call: validation, dispatch and launch, hardly any arithmetic."""
    x = torch.ones(1, 4, 1, 16)
    calls = {
        "chunked_cross_attention": lambda: rk.chunked_cross_attention(
            x, x.view(1, 1, 1, 4, 1, 16), x.view(1, 1, 1, 4, 1, 16), chunk_len=4
        ),
        "relative_attention": lambda: rk.relative_attention(x, x, x),
        "relative_logits": lambda: rk.relative_logits(x, torch.ones(1, 7, 16), key_len=4),
        "topk_chunks": lambda: rk.topk_chunks(x[:, :, 0], x[:, :, 0], 2),
        "leaky_average": lambda: rk.leaky_average(x, torch.ones(1) / 2),
        "merge_attention": lambda: rk.merge_attention((x, x), (x[..., 0].mT, x[..., 0].mT)),
        "rms_norm": lambda: rk.rms_norm(x, torch.ones(16)),
        "cross_entropy": lambda: rk.cross_entropy(x[0, :, 0], torch.arange(4)),
    }
    with torch.no_grad():
        benchmark.pedantic(calls[op], rounds=50, iterations=20, warmup_rounds=2)
