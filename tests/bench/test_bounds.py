"""A case's bound is the sum of parts that this machine was seen to do."""

import json

import pytest
import torch

import bench.__main__ as bench
from bench import registry
from bench.measure import parts
from bench.ops import chunked_cross_attention, topk_chunks
from retro_kernels.core import native

pytestmark = pytest.mark.skipif(native.unavailable("_cpu") is not None, reason=str(native.unavailable("_cpu")))


def case(name):
    kernels = ("chunked_cross_attention", "topk_chunks")
    return next(c for kernel in kernels for c in registry.cases_of(kernel) if c.name == name)


class Unit:
    """Every part of one operation, element or byte takes a second."""

    threads = 1

    def rate(self, *sizes, **options):
        return 1.0

    def softmax(self, elements):
        return elements

    def packing(self, elements, code):
        return elements

    def handover(self, tasks=1):
        return 0.0


@pytest.mark.parametrize(
    "name, mode", [("retro-172m", "fwd"), ("retro-172m", "fwdbwd"), ("rpt-2k", "fwd"), ("rpt-2k", "fwdbwd")]
)
def test_the_products_are_those_of_the_op(name, mode):
    """Counted for the parts, and for the roofline, each by its own formula."""
    one = case(name)
    bound = parts.bound(Unit(), one, "float32", mode, {})
    assert bound.flops == pytest.approx(chunked_cross_attention.work(one, 4, mode).flops, rel=1e-6)
    assert bound.parts["products"] + bound.parts.get("band", 0) >= bound.flops
    s = one.shape
    visible = s["B"] * s["H"] * (s["N"] - s["M"] + 1) * s["K"] * s["R"]
    assert bound.parts["softmax"] == visible * (2 if mode == "fwdbwd" else 1)


def test_top_ks_products_are_those_of_the_op():
    for name in ("rpt-retriever", "precompute-100k"):
        bound = parts.bound(Unit(), case(name), "float32", "fwd", {})
        assert bound.parts["products"] == bound.flops == topk_chunks.work(case(name), 4, "fwd").flops


def test_a_decoding_step_reads_every_key_value_and_relative_key_once():
    class Bytes(Unit):
        def reading(self, size):
            return 1.0

        def host(self, op):
            return 0.0

    one = next(c for c in registry.cases_of("relative_attention") if c.name == "decode")
    s = one.shape
    bound = parts.bound(Bytes(), one, "bfloat16", "decode", {})
    keys_values_table = 2 * s["S"] * s["H"] * s["D"] + s["H"] * s["T"] * s["D"]
    query_and_output = 2 * s["H"] * s["D"]
    assert bound.parts["reading"] == 2 * (keys_values_table + query_and_output)


def test_the_command_measures_the_parts_and_the_case(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(parts, "LEAST_S", 1e-5)
    monkeypatch.setattr(parts, "ROUNDS", 1)
    monkeypatch.setattr("bench.measure.host.BATCHES", 1)
    monkeypatch.setattr("bench.measure.host.CALLS", 1)
    monkeypatch.setattr("bench.measure.ceilings.LEAST_S", 0)
    threads = torch.get_num_threads()
    try:
        command = ["bounds", "--case", "decode-1,decode-16", "--threads", "1", "--json", str(tmp_path / "b.json")]
        code = bench.main(command)
    finally:
        torch.set_num_threads(threads)
    assert code == 0 and "decode-16" in capsys.readouterr().out
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert [row["case"] for row in rows] == ["decode-1", "decode-16"]
    assert set(rows[0]["parts"]) == {"reading", "hand-over", "host"}
    for row in rows:
        assert row["bound"] == pytest.approx(sum(row["parts"].values())) and min(row["parts"].values()) > 0
    assert bench.main(["bounds", "--case", "nothing"]) == 4
