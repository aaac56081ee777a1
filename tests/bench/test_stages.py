"""`profile --stages`: times and FLOPs of the stages of a CPU kernel."""

import threading

import pytest
import torch

import retro_bench
import retro_kernels as rk
from retro_bench.measure import ceilings, stages
from retro_bench.records import record
from retro_bench.registry import CASES
from retro_kernels import extensions
from tests.bench.helpers import QUICK

pytestmark = pytest.mark.skipif(extensions.unavailable("_cpu") is not None, reason="needs the CPU extension")
B, N, H, D = 2, 128, 2, 64
PRODUCT = 2.0 * B * H * N * N * D


def attention(gradients: bool):
    query, key, value = (torch.randn(B, N, H, D).requires_grad_(gradients) for _ in range(3))
    rel_key = torch.randn(H, 2 * N - 1, D).requires_grad_(gradients)

    def call():
        out = rk.relative_attention(query, key, value, rel_key=rel_key, backend="cpu")
        if gradients:
            out.sum().backward()

    return call


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


def test_profile_shows_the_stages_and_keeps_them(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stages, "LEAST_S", 0)
    monkeypatch.setattr(ceilings, "measure", lambda device: None)
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
