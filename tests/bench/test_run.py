"""check and run from end to end on a tiny case: timed calls, refusals, the file, the exit code."""

import contextlib
import json
from types import SimpleNamespace

import pytest
import torch

import retro_bench
import retro_kernels as rk
from retro_bench.measure import ceilings, runner, timing
from retro_bench.measure.pace import LEAST_SHARE, Pace
from retro_bench.ops import relative_attention as baselines
from retro_bench.records import environment, record
from tests.bench.helpers import PROFILE, QUICK, rates, wrong


def run(path, *more):
    command = ["run", *QUICK, "--json", str(path), "--samples", "2", "--seconds", "0", *more]
    code = retro_bench.main(command)
    return code, list(record.latest(record.read(path)).values()) if path.exists() else []


def by_backend(records, mode="fwd"):
    return {r["backend"]: r for r in records if r["mode"] == mode}


def test_run_checks_times_and_records(tiny, tmp_path, capsys):
    code, records = run(tmp_path / "a.jsonl", "--backend", "reference")
    assert code == 0
    of_backend = by_backend(records, "fwdbwd")
    reference = of_backend["reference"]
    assert reference["status"] == "ok" and reference["numerics"]["passed"]
    assert {"out", "lse", "d_query", "d_key", "d_value", "d_rel_key", "d_content_bias", "d_position_bias"} == set(
        reference["numerics"]["tensors"]
    )
    assert len(reference["time"]["samples"]) >= 2 and reference["time"]["minimum"] > 0
    assert reference["speedup"]["eager"] == pytest.approx(
        of_backend["eager"]["time"]["minimum"] / reference["time"]["minimum"]
    )
    assert reference["roofline"] is None and reference["launches"] is None and reference["static"] is None
    assert of_backend["flex"]["status"] == "unsupported" if "flex" in of_backend else True
    assert "tiny" in capsys.readouterr().out


def test_a_kernel_that_is_wrong_by_a_part_in_ten_thousand_fails_and_is_not_timed(tiny, tmp_path):
    retro_bench.register(wrong(1.0001))
    code, records = run(tmp_path / "a.jsonl", "--backend", "mine")
    mine = by_backend(records)["mine"]
    assert code == 2
    assert mine["status"] == "numerics_fail" and mine["time"] is None and "limit" in mine["reason"]
    assert by_backend(records)["eager"]["time"] is not None
    assert retro_bench.main(["check", *QUICK, "--backend", "mine"]) == 2


def test_a_kernel_that_forgets_to_write_fails(tiny, tmp_path):
    """Its output comes from torch.empty and its last row is never written; the NaN in fresh memory shows that."""

    def forgets(query, **arguments):
        out = torch.empty_like(query)
        out[:, :-1] = rk.relative_attention(query, **arguments, backend="reference")[:, :-1]
        return out

    retro_bench.register(retro_bench.Contender("relative_attention", "forgets", forgets, role="ours"))
    code, records = run(tmp_path / "a.jsonl", "--backend", "forgets", "--mode", "fwd")
    assert code == 2
    tensor = by_backend(records)["forgets"]["numerics"]["tensors"]["out"]
    assert tensor["frobenius"] is None and not tensor["passed"]


def test_a_baseline_without_its_mask_is_refused(tiny, tmp_path):
    def unmasked(query, key, value, *, causal, **options):
        return baselines.eager(query, key, value, causal=False, **options)

    retro_bench.register(retro_bench.Contender("relative_attention", "unmasked", unmasked))
    code, records = run(tmp_path / "a.jsonl", "--backend", "reference", "--mode", "fwd")
    of_backend = by_backend(records)
    assert of_backend["unmasked"]["status"] == "numerics_fail" and of_backend["unmasked"]["time"] is None
    assert "unmasked" not in of_backend["reference"]["speedup"] and of_backend["sdpa_bias"]["status"] == "ok"
    assert code == 2


def test_out_of_memory_and_a_backend_that_declines_are_statuses(tiny, tmp_path):
    def greedy(**arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB")

    def picky(**arguments):
        raise ValueError("backend: 'mine' cannot serve this call of relative_attention: head dimension 16")

    def broken(**arguments):
        raise RuntimeError("illegal memory access")

    for name, function in (("greedy", greedy), ("picky", picky), ("broken", broken)):
        retro_bench.register(retro_bench.Contender("relative_attention", name, function, role="ours"))
    code, records = run(tmp_path / "a.jsonl", "--backend", "greedy,picky,reference", "--mode", "fwd")
    statuses = [by_backend(records)[name]["status"] for name in ("greedy", "picky", "reference")]
    assert code == 0 and statuses == ["oom", "unsupported", "ok"]
    code, records = run(tmp_path / "b.jsonl", "--backend", "broken", "--mode", "fwd")
    assert code == 2 and "illegal memory access" in by_backend(records)["broken"]["reason"]


def test_an_interrupted_run_leaves_whole_lines_and_resumes(tiny, tmp_path):
    def interrupts(**arguments):
        raise KeyboardInterrupt

    stops = dict(op="relative_attention", name="stops", role="ours")
    only = lambda case, dtype, device: None if case.name == "second" else "no"  # noqa: E731
    retro_bench.register(retro_bench.Case(**{**vars(tiny), "name": "second"}))
    retro_bench.register(wrong(1.0))
    retro_bench.register(retro_bench.Contender(**stops, function=interrupts, reason=only))
    path = tmp_path / "a.jsonl"
    assert run(path, "--backend", "mine,stops", "--mode", "fwd")[0] == 5
    kept = record.read(path)
    timed = {r["case"]["name"] for r in kept if r["time"]}
    assert timed == {"tiny"} and "stops" in {i.split("/")[1] for i in record.left(path)}
    with open(path, "a") as f:
        f.write('{"schema": 1, "run"')  # killed inside a write
    assert len(record.read(path)) == len(kept)
    retro_bench.register(retro_bench.Contender(**stops, function=wrong(1.0).function), replace=True)
    command = ["run", *QUICK, "--resume", str(path), "--backend", "mine", "--mode", "fwd"]
    assert retro_bench.main(command) == 0
    records = record.read(path)
    timed = [r for r in record.latest(records).values() if r["backend"] == "mine" and r["time"]]
    assert [r["case"]["name"] for r in timed] == ["tiny", "second"]
    assert retro_bench.main(command) == 0
    assert len(record.read(path)) == len(records)


def test_a_ceiling_that_a_kernel_exceeds_is_measured_again_and_then_said_to_be_wrong(
    tiny, tmp_path, monkeypatch, capsys
):
    """Too low at first, then right. A ceiling that stays too low is an error of `profile`, not a share of 185%."""
    low, high = rates(1.0), rates(1e15)
    for answers, code in (([low, high], 0), ([low] * 9, 3)):
        path, left = tmp_path / str(code), list(answers)
        monkeypatch.setattr(ceilings, "measure", lambda device, left=left: left.pop(0))
        assert retro_bench.main([*PROFILE, "--json", str(path)]) == code
        (kernel,) = [r for r in record.read(path) if r["backend"] == "reference"]
        assert (kernel["roofline"]["fraction"] < 1) == (code == 0)
        assert kernel["ceilings"] == (high if code == 0 else low)
        assert ("error of the ceiling" in capsys.readouterr().err) == (code == 3)
        assert len(left) == len(answers) - (2 if code == 0 else 1 + runner.MOST_CEILINGS)


def test_shares_are_of_the_highest_ceiling_of_a_run(tiny, tmp_path, monkeypatch):
    """Ceilings are measured before and after; records written in between use the higher one too."""
    path, answers = tmp_path / "a.jsonl", [1e15, 2e15]
    monkeypatch.setattr(ceilings, "measure", lambda device: rates(1e15, answers.pop(0)))
    assert run(path, "--mode", "fwd")[0] == 0
    timed = [r for r in record.read(path) if r["time"]]
    assert timed and not answers
    for one in timed:
        assert one["ceilings"]["flops_per_s"]["float32"] == 2e15
        floor = max(one["work"]["flops"] / 2e15, one["work"]["bytes"] / 1e15)
        assert one["roofline"]["floor_s"] == pytest.approx(floor)


def test_a_run_is_not_resumed_on_another_machine(tiny, tmp_path, monkeypatch, capsys):
    some, path = ("--backend", "reference", "--mode", "fwd"), tmp_path / "a.jsonl"
    run(path, *some)
    real = environment.environment()
    monkeypatch.setattr(environment, "environment", lambda: real | {"isa": ["another"]})
    assert retro_bench.main(["run", *QUICK, "--resume", str(path), *some]) == 4
    assert "measured elsewhere: isa" in capsys.readouterr().err


def test_threads_are_those_of_now_whoever_asked_before():
    threads = torch.get_num_threads()
    try:
        seen = []
        for count in (1, 2):
            torch.set_num_threads(count)
            seen.append(environment.environment()["threads"])
    finally:
        torch.set_num_threads(threads)
    assert seen == [1, 2]


def test_one_seed_repeats_the_inputs_and_none_does_not(tiny):
    a, b, c = (tiny.make(seed, "cpu", torch.float32)["query"] for seed in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_records_are_json_lines(tiny, tmp_path):
    _, records = run(tmp_path / "a.jsonl", "--backend", "reference", "--mode", "fwd")
    request, *lines = map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())
    assert list(record.latest(lines).values()) == records
    assert request["requested"] == [r["id"] for r in records] and request["run"] == records[0]["run"]
    assert len({r["run"] for r in records}) == 1


def test_graphs_are_what_is_timed(monkeypatch):
    """On a stand-in for the GPU: with graphs every sample replays one capture, without them it calls the kernel."""
    said, plain = [], SimpleNamespace(wait_stream=lambda other: None)
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda end: 2.0)
    graph = SimpleNamespace(replay=lambda: said.append("replay"))
    fakes = {
        "Stream": lambda: plain,
        "current_stream": lambda: plain,
        "stream": lambda s: contextlib.nullcontext(),
        "synchronize": lambda: None,
        "CUDAGraph": lambda: graph,
        "graph": lambda g: contextlib.nullcontext(said.append("capture")),
        "Event": lambda **k: event,
        "_sleep": lambda cycles: None,
        "current_device": lambda: 0,
        "get_device_properties": lambda d: SimpleNamespace(L2_cache_size=64),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device=None, **k: zeros(*sizes, **k))
    monkeypatch.setattr(
        torch.Tensor, "zero_", lambda tensor: pytest.fail("the flush writes: its dirty lines are charged to the kernel")
    )
    read, largest = [], torch.Tensor.max
    monkeypatch.setattr(torch.Tensor, "max", lambda tensor: read.append(tensor.nbytes) or largest(tensor))
    effort = timing.Effort(least=3, most=3, seconds=0.0)
    times = timing.measure({"a": lambda: said.append("call")}, "cuda", effort, graphs=True)
    assert read == [timing.L2_MULTIPLE * 64] * 3  # evicts the L2 cache before every sample
    assert times["a"]["method"]["cuda_graph"] and times["a"]["median"] == 2e-3 and 0 < times["a"]["host_s"] < 1
    captured_at = said.index("capture")
    assert said[captured_at + 1] == "call" and said[captured_at + 2 :] == ["replay"] * (timing.WARMUPS + 3)
    said.clear()
    timing.measure({"a": lambda: said.append("call")}, "cuda", effort)
    assert said == ["call"] * (timing.WARMUPS + 3)


@pytest.mark.parametrize(("device", "least"), list(timing.NARROW_SAMPLES.items()))
def test_samples_that_agree_end_early_and_others_do_not(monkeypatch, device, least):
    """A steady call takes the minimum number of samples, an unsteady one all of them."""

    class Stub:
        def __init__(self, *_):
            self.count = 0

        def prepare(self, name, call):
            return 0.0

        def sample(self, name):
            self.count += 1
            return 1e-3 if name == "steady" else 1e-3 * (1 + self.count)

        narrow = timing._CpuSampler.narrow if device == "cpu" else timing._CudaSampler.narrow
        method = more = lambda self, name: {"clock": "wall"}

    monkeypatch.setattr(timing, "_CpuSampler", Stub)
    monkeypatch.setattr(timing, "_CudaSampler", Stub)
    samples = timing.measure({"steady": None, "drifts": None}, device, timing.Effort(least=3, most=30, seconds=60))
    assert len(samples["steady"]["samples"]) == least and len(samples["drifts"]["samples"]) == 30


def test_the_pace_spends_less_where_the_rest_would_end_too_late():
    now = [0.0]
    at = Pace([10.0] * 10, limit=100, begun=0.0, clock=lambda: now[0])
    assert at.share() == 1.0 and not at.over() and Pace([1.0]).share() == 1.0
    now[0] = 60.0  # three steps took 60 s of 30 expected: seven more would take 140 s, and 40 s are left
    at.done = 3
    assert at.share() == pytest.approx(40 / 140)
    now[0], at.done = 99.0, 4
    assert at.share() == LEAST_SHARE and not at.over()
    now[0], at.done = 100.0, 10
    assert at.over() and at.share() == 1.0


def test_a_ceiling_that_a_kernel_exceeds_to_the_end_of_a_run_is_raised(tiny, tmp_path, monkeypatch, capsys):
    low = {"cached_bytes_per_s": 2.0, "cache_bytes": 1 << 20}
    monkeypatch.setattr(ceilings, "measure", lambda device: rates(1.0) | low)
    code, records = run(tmp_path / "a.jsonl", "--mode", "fwd")
    timed = [r for r in records if r["time"]]
    assert code == 0 and timed and all(r["roofline"]["fraction"] <= 1 for r in timed)
    assert max(r["roofline"]["fraction"] for r in timed) > 0.999 and timed[0]["ceilings"]["bytes_per_s"] == 1.0
    said = capsys.readouterr().out
    assert (
        "ceilings raised to the rate of a kernel that exceeded them: relative_attention/" in said and "%!" not in said
    )
