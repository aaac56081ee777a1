"""FLOPs and bytes against counts pair by pair; slices of the oracle against the whole; baselines against the oracle."""

import pytest
import torch

import retro_bench
import retro_kernels as rk
from retro_bench import Work, ops
from retro_bench.check import numerics, oracle
from retro_bench.measure import ceilings
from retro_bench.ops import _shared, chunked_cross_attention, relative_attention
from retro_bench.registry import Case


def small(op: str, name: str, shape: str, options=None, extras=(), **more) -> Case:
    return _shared.case(op, name, "a test", shape, options=options or {}, extras=extras, **more)


CAUSAL = {"causal": True, "rel_start": 0}
BIASED = ("rel_key", "content_bias", "position_bias")
EXTRAS = (*BIASED, "neighbour_mask", "neighbour_gate")
RELATIVE = [
    small("relative_attention", "causal", "B=2 N=9 S=9 H=2 G=1 D=16 T=9", CAUSAL, BIASED),
    small("relative_attention", "narrow", "B=1 N=12 S=12 H=2 D=16 E=4 T=3", CAUSAL, ("rel_key", "rel_query")),
    small("relative_attention", "cross", "B=1 N=7 S=5 H=2 D=16", {}, ("rel_key", "key_mask")),
    small("relative_attention", "gap", "B=1 N=8 S=8 H=2 D=16", {"causal": True, "causal_gap": 1}),
    small("relative_attention", "window", "B=1 N=6 S=10 H=2 D=16", {"causal": True, "window": 3}),
    small("relative_attention", "one", "B=1 N=1 S=9 H=2 D=16 T=9", CAUSAL, ("rel_key",)),
]
DECODE = {"options": {"query_start": 9}, "extras": ("rel_key",), "modes": ("decode",)}
ALL = [
    small("chunked_cross_attention", "all", "B=2 N=11 M=4 K=2 R=6 H=2 G=1 D=16 L=2", {}, EXTRAS),
    small("chunked_cross_attention", "decode", "B=1 N=5 M=4 K=1 R=6 H=2 D=16 L=3", **DECODE),
    *RELATIVE,
    small("relative_logits", "one", "B=1 N=1 S=8 H=2 E=8", {"query_offset": 7}),
    small("relative_logits", "bounded", "B=1 N=6 S=8 H=2 E=8 T=5", {"rel_start": -2}, ("position_bias",)),
    small("topk_chunks", "causal", "B=2 Q=9 S=9 D=8 k=3", {"causal_gap": 2}),
    small("topk_chunks", "l2", "B=1 Q=4 S=20 D=8 k=5", {"metric": "l2"}, ("query_doc",)),
    small("leaky_average", "carried", "B=2 N=300 H=2 D=4", {}, ("initial",)),
    small("rms_norm", "a", "B=2 N=9 D=7"),
    small("cross_entropy", "a", "N=9 V=7"),
]
names = [f"{case.op}/{case.name}" for case in ALL]


@pytest.mark.parametrize("case", RELATIVE, ids=lambda c: c.name)
def test_visible_pairs_are_counted_one_by_one(case):
    n, keys, o = case.shape["N"], case.shape["S"], case.options
    offset = keys - n if o.get("causal") else 0
    start, rows = o.get("rel_start", offset - keys + 1), case.shape.get("T", n + keys - 1)
    pairs = [i + offset - j for i in range(n) for j in range(keys)]
    seen = [
        d
        for d in pairs
        if (not o.get("causal") or d >= o.get("causal_gap", 0)) and ("window" not in o or d < o["window"])
    ]
    assert relative_attention._pairs(case) == (len(seen), sum(start <= d < start + rows for d in seen))


def test_flops_and_bytes_of_retro_by_hand():
    case = retro_bench.CASES[("chunked_cross_attention", "retro-172m")]
    counted = chunked_cross_attention.work(case, 4, "fwd")
    attending = 2048 - 63
    assert counted.flops == attending * 16 * (2 * 256 * 64 * 2 + 2 * 128 * 64)
    assert counted.bytes == 4 * (2 * 2048 * 16 * 64 + 2 * 32 * 2 * 128 * 16 * 64 + 16 * 191 * 64)


def test_forward_and_backward_is_more_of_both_and_a_call_without_positions_reads_no_table():
    """Counted by hand: a causal triangle of 3, one head of width 4, float32; the backward pass adds to both."""
    plain = small("relative_attention", "a", "B=1 N=3 S=3 H=1 D=4", {"causal": True})
    forward, both = (relative_attention.work(plain, 4, mode) for mode in ("fwd", "fwdbwd"))
    assert forward == Work(4.0 * 6 * 4, 4 * 3 * 4 * 4)
    assert both == Work(forward.flops * 3.5, forward.bytes + 8 * 3 * 4 * 4 + 2 * 3 * _shared.LSE_BYTES)
    table = small("relative_attention", "b", "B=1 N=3 S=3 H=1 D=4 T=3", CAUSAL, ("rel_key",))
    assert relative_attention.work(table, 4, "fwd") == Work(forward.flops + 2.0 * 6 * 4, forward.bytes + 3 * 4 * 4)


@pytest.mark.parametrize("case", ALL, ids=names)
def test_the_oracle_in_slices_is_the_oracle_at_once(case, monkeypatch):
    operator = retro_bench.OPERATORS[case.op]
    arguments = case.make(3, "cpu", torch.float32)
    backward = case.op != "topk_chunks"
    whole = oracle.solve(operator, case, arguments, 3, backward)
    monkeypatch.setattr(oracle, "SLICE_ELEMENTS", {"cpu": 1})
    sliced = oracle.solve(operator, case, arguments, 3, backward)
    for a, b in zip(whole.outputs, sliced.outputs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    for name, grad in whole.gradients.items():
        torch.testing.assert_close(grad, sliced.gradients[name], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("case", ALL, ids=names)
def test_every_cpu_baseline_is_the_function_it_says(case):
    operator = retro_bench.OPERATORS[case.op]
    arguments = case.make(4, "cpu", torch.float32)
    for contender in [c for c in retro_bench.CONTENDERS.values() if c.op == case.op and c.role == "baseline"]:
        if "cpu" not in contender.devices or contender.name.endswith("_compiled"):
            continue
        if contender.reason(case, "float32", "cpu"):
            continue
        truth = oracle.solve(operator, case, arguments, 4, backward=contender.differentiable)
        verdict = numerics.judge(numerics.errors(operator, contender, arguments, truth), None, "float32", truth.checked)
        assert verdict.passed, f"{contender.name}: {verdict.complaint()}"
        worst = max(t["frobenius"] for t in verdict.tensors.values())
        assert worst < 1e-5, f"{contender.name}: {worst}"


def test_sampled_queries_are_the_first_and_the_last(monkeypatch):
    case = RELATIVE[0]
    monkeypatch.setattr(oracle, "TOTAL_ELEMENTS", {"cpu": 1})
    long = Case(**{**vars(case), "shape": dict(case.shape) | {"N": 40, "S": 40, "T": 40}})
    arguments = long.make(5, "cpu", torch.float32)
    sampled = oracle.solve(retro_bench.OPERATORS[case.op], long, arguments, 5, backward=True)
    assert sampled.rows.tolist() == [0, 1, 2, 3, 36, 37, 38, 39] and "of 40 queries" in sampled.checked
    assert not sampled.upstream[:, 4:36].any() and sampled.upstream[:, :4].all()


def test_top_k_judges_the_choice_not_the_order_of_equals():
    """Swapped near-equal keys pass; a repeated index, a forbidden key and a worse key do not."""
    from retro_bench.check import topk

    query, key = torch.ones(1, 1, 1), torch.tensor([[[3.0], [3.0], [2.0], [9.0]]])
    arguments = {"query": query, "key": key, "k": 2, "key_mask": torch.tensor([[True, True, True, False]])}
    best = rk.topk_chunks(
        **{n: v.double() if v is query or v is key else v for n, v in arguments.items()}, backend="reference"
    )

    def fails(indices, scores=(3.0, 3.0)):
        pairs = topk.compare(arguments, torch.tensor([0]), (torch.tensor([[scores]]), torch.tensor([[indices]])), best)
        errors = [numerics.error(*pair).frobenius for pair in pairs.values()]
        return any(e is None or e > 1e-6 for e in errors)

    assert not fails([0, 1]) and not fails([1, 0])
    assert all(fails(indices) for indices in ([0, 4], [0, -2], [0, 0], [0, -1]))
    assert fails([3, 0], (9.0, 3.0)) and fails([0, 2], (3.0, 2.0)) and fails([0, 1], (3.0, 3.1))


def test_a_choice_beyond_the_causal_limit_is_no_candidate():
    """Query i sees keys up to i: at query 1, key 1 is the last; an offset moves the limit."""
    from retro_bench.check import topk

    arguments = {"query": torch.ones(1, 2, 1), "key": torch.ones(1, 4, 1), "k": 1, "causal_gap": 0}
    rows = torch.tensor([0, 1])
    valid = [topk._valid(arguments, rows, torch.tensor([[[0], [key]]]))[0, 1].item() for key in range(4)]
    assert valid == [True, True, False, False]
    assert topk._valid(arguments | {"query_offset": 1}, rows, torch.tensor([[[0], [2]]]))[0, 1]


def test_an_output_that_eager_does_not_return_is_held_to_the_first_outputs_limit():
    """The last tensor is a gradient with errors of another size; its limit does not apply to the first."""
    eager = {"out": numerics.Errors(1e-6, 1e-6), "d_query": numerics.Errors(1e-2, 1e-2)}
    for off, passes in ((1.5e-6, True), (1e-3, False)):
        verdict = numerics.judge({"out": eager["out"], "lse": numerics.Errors(off, off)}, eager, "float32", "all")
        assert verdict.passed == verdict.tensors["lse"]["passed"] == passes
        assert verdict.tensors["lse"]["yardstick"] == eager["out"].frobenius


def test_a_half_type_is_held_to_no_less_than_the_rate_of_float32():
    """The library's half product is not a ceiling without instructions for half types: widened operands are faster."""
    measured = {"flops_per_s": {"float32": 100.0, "bfloat16": 20.0}, "bytes_per_s": 1.0}
    assert [ceilings.rate(measured, dtype) for dtype in ("bfloat16", "float16", "float32")] == [100.0] * 3
    assert ceilings.rate({"flops_per_s": {"float32": 100.0, "bfloat16": 230.0}}, "bfloat16") == 230.0
    assert ceilings.rate(measured, "float64") is None
    roofline = ceilings.roofline(Work(flops=1000, bytes=1), measured, "bfloat16", seconds=20.0)
    assert roofline == {"floor_s": 10.0, "bound": "compute", "fraction": 0.5}


def test_the_names_of_backends_are_the_dispatchers():
    """The harness has a second list of them, so that `list` needs no torch."""

    from retro_kernels.core import dispatch

    assert ops.BACKENDS == dispatch.ORDER and set(retro_bench.OPERATORS) == set(dispatch.OPS)
