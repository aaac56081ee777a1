"""`profile`: command lines of external profilers, calls in ranges, and the times and FLOPs of a CPU kernel's stages."""

import shlex
import threading

import pytest
import torch

import retro_bench
import retro_bench.__main__ as command_line
import retro_kernels as rk
from retro_bench.measure import choose as plan
from retro_bench.measure import profilers, runner, stages
from retro_bench.records import environment, record
from retro_bench.registry import CASES
from retro_bench.report import summary
from retro_kernels import extensions
from tests.bench.helpers import PROFILE, QUICK

needs_kernels = pytest.mark.skipif(extensions.unavailable("_cpu") is not None, reason="needs the CPU extension")
B, N, H, D = 2, 128, 2, 64
PRODUCT = 2.0 * B * H * N * N * D


def test_every_recipe_runs_a_command_of_ours():
    page = (environment.ROOT / "docs" / "profiling.md").read_text().replace("\\\n", "")
    lines = [line for line in page.splitlines() if line.startswith(("ncu", "nsys")) and " retro-bench " in line]
    assert [line.split()[0] for line in lines] == ["ncu", "nsys"]
    for line in lines:
        words = shlex.split(line)
        parsed = command_line.parser("profile").parse_args(words[words.index("retro-bench") + 1 :])
        assert parsed.mode == ("fwd",) and parsed.calls >= 1


def test_each_kernel_is_called_inside_its_range_and_the_profilers_window(tiny, monkeypatch):
    """With the driver's calls replaced: warm-ups are outside, the calls inside."""
    seen = []
    monkeypatch.setattr(runner, "step", lambda *_: lambda: seen.append("call"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: seen.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: seen.append("stop"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("pop"))
    real = list(
        profilers.kernels(
            plan.Selection("cpu", ("relative_attention",), ("reference",), ("tiny",), ("float32",), ("fwd",))
        )
    )
    monkeypatch.setattr(profilers, "kernels", lambda selection: [(*real[0][:2], _OnCpu(real[0][2]), *real[0][3:])])
    assert profilers.calls(plan.Selection("cuda"), 3, 0, quiet=True) == 1
    name = "relative_attention/reference/tiny/float32/fwd"
    assert seen == ["call"] * profilers.WARMUPS + ["start", name, *["call"] * 3, "pop", "stop"]


class _OnCpu:
    """A case whose tensors are made on the CPU for every device."""

    def __init__(self, case):
        self.case = case

    def make(self, seed, device, dtype):
        return self.case.make(seed, "cpu", dtype)


def test_calls_on_this_machine(tiny, capsys):
    quiet = [word for word in QUICK if word != "--quiet"]
    assert retro_bench.main(["profile", *quiet, "--backend", "reference", "--mode", "fwd", "--calls", "2"]) == 0
    assert capsys.readouterr().out.split() == ["relative_attention/reference/tiny/float32/fwd"]


@pytest.mark.parametrize(("rehearsal", "code"), [(None, 3), ("1", 0)])
def test_a_rehearsal_is_not_judged_by_its_ceilings(tiny, monkeypatch, capsys, rehearsal, code):
    """Ceilings that are measured next to other work are too low."""
    monkeypatch.setattr(summary, "beyond", lambda records: "a share above 100%")
    monkeypatch.delenv(environment.REHEARSAL, raising=False)
    if rehearsal:
        monkeypatch.setenv(environment.REHEARSAL, rehearsal)
    assert retro_bench.main(PROFILE) == code and "above 100%" in capsys.readouterr().err


def attention(gradients: bool):
    query, key, value = (torch.randn(B, N, H, D).requires_grad_(gradients) for _ in range(3))
    rel_key = torch.randn(H, 2 * N - 1, D).requires_grad_(gradients)

    def call():
        out = rk.relative_attention(query, key, value, rel_key=rel_key, backend="cpu")
        if gradients:
            out.sum().backward()

    return call


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2])
def test_the_flops_of_each_stage_are_those_of_its_products(threads, monkeypatch):
    monkeypatch.setattr(stages, "LEAST_S", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        forward, both = (stages.of(attention(gradients)) for gradients in (False, True))
    finally:
        torch.set_num_threads(before)
    assert forward["scores"]["flops"] == forward["values"]["flops"] == PRODUCT
    assert both["scores"]["flops"] == both["values"]["flops"] == 2 * PRODUCT  # once forward, once backward
    assert both["gradients"]["flops"] == 3 * PRODUCT
    assert forward["position logits"]["flops"] >= PRODUCT and both["band gradients"]["flops"] >= 2 * PRODUCT
    assert forward["softmax"]["flops"] == forward["pack"]["flops"] == 0
    assert all(stage["seconds"] > 0 for stage in (*forward.values(), *both.values()))
    assert "gradients" not in forward


@needs_kernels
def test_stages_are_measured_between_start_and_stop_only():
    extension, call = extensions.extension("_cpu"), attention(False)
    extension.start_stage_times()
    call()
    extension.stop_stage_times()
    call()
    extension.start_stage_times()
    worker = threading.Thread(target=call)  # a thread that has measured nothing before
    worker.start()
    worker.join()
    assert extension.stop_stage_times()["scores"][1] == PRODUCT
    extension.start_stage_times()
    assert set(extension.stop_stage_times().values()) == {(0.0, 0.0)}


@needs_kernels
def test_a_small_case_keeps_the_widths_and_one_head_for_each_thread():
    case = stages.small(CASES["chunked_cross_attention", "retro-172m"])
    heads = torch.get_num_threads()
    usual = CASES["chunked_cross_attention", "retro-172m"].shape
    assert dict(case.shape) == usual | {"B": 1, "H": min(heads, usual["H"]), "N": 2 * usual["M"] - 1, "L": 1}
    case = stages.small(CASES["relative_attention", "decoder-1k"])
    assert {letter: case.shape[letter] for letter in "BNSTD"} == {"B": 1, "N": 256, "S": 256, "T": 256, "D": 64}
    for case in CASES.values():  # every case can be made small, and drawn
        if case.op in ("chunked_cross_attention", "relative_attention"):
            assert stages.small(case).make(0, "cpu", torch.float32)


@needs_kernels
def test_profile_shows_the_stages_and_keeps_them(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stages, "LEAST_S", 0)
    path = tmp_path / "a.jsonl"
    command = ["profile", *QUICK, "--backend", "cpu,reference", "--mode", "fwd", "--json", str(path)]
    assert retro_bench.main([*command, "--stages"]) == 0
    kept = {r["backend"]: r["counters"] for r in record.read(path) if r["time"]}
    assert kept.pop("cpu").keys() == {"case", "in cache"} and set(kept.values()) == {None}
    assert "softmax" in (said := capsys.readouterr().out) and "the same in cache" in said


def test_stages_of_a_gpu_are_refused(tiny, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert retro_bench.main(["profile", "--device", "cuda", "--op", "relative_attention", "--stages"]) == 4
    assert "--stages" in capsys.readouterr().err
