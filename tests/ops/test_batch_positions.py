"""Positions as a tensor, one a batch entry: rows of different lengths, caches of fixed capacity, no
read by the host.
"""

import pytest
import torch

import retro_kernels as rk
from retro_kernels.testing import compare, inputs
from tests.conftest import INTERPRETER, before_the_kernels, each_with_each, with_backends
from tests.ops.calls import leaves

ARGUMENT = {"relative_attention": "query_offset", "chunked_cross_attention": "query_start"}
EVERY = with_backends(ARGUMENT)
every = pytest.mark.parametrize("op, backend", EVERY)

BOUNDED = dict(rel="bounded", rel_start=-2, T=9)
RELATIVE = {
    "a token": dict(N=1, S=20, causal=True, **BOUNDED),
    "a token, grouped heads": dict(N=1, S=300, H=4, G=2, causal=True, window=17, E=8, **BOUNDED),
    "two tokens, documents": dict(H=2, N=2, S=20, causal=True, segments=True, **BOUNDED),
    "a token, blocks": dict(N=1, S=20, causal=True, window_block=3, **BOUNDED),
    "a prompt": dict(N=13, S=40, causal=True, key_mask=True, **BOUNDED),
    "a long prompt": dict(N=70, S=150, causal=True, causal_gap=1, **BOUNDED),
    "a prompt, blocks": dict(N=70, S=150, causal=True, window_block=16, **BOUNDED),
    "both directions": dict(H=2, N=9, S=20, window=5, heads="shared", **BOUNDED),
    "no positions": dict(N=5, S=20, causal=True, rel=None),
    "dropout": dict(N=9, S=20, causal=True, dropout_p=0.4, **BOUNDED),
}
CROSS = {
    "a token": dict(N=1),
    "a token, gated and masked": dict(N=1, gate=True, mask="token", H=4, G=2, E=8),
    "two tokens": dict(H=2, N=2, mask="neighbour"),
    "a block": dict(N=9, gate=True, mask="token"),
    "a long block": dict(N=50, M=16, R=20),
    "shared keys": dict(H=2, N=9, heads="shared"),
    "no positions": dict(N=9, rel=None, biases=False),
    "dropout": dict(N=9, dropout_p=0.4),
}


def problem(op, name, positions, seed=3, **options):
    """Return arguments with three batch entries at `positions`; six chunks of neighbours."""
    case = dict(B=3, H=1) | cases(op)[name] | options
    if op == "relative_attention":
        kw = inputs.self_attention(seed, **case)
    else:
        kw = inputs.cross_attention(seed, extra_chunks=6 - case["N"] // case.get("M", 4), **case)
    return kw | {ARGUMENT[op]: torch.tensor(positions, device=kw["query"].device)}


def cases(op):
    return RELATIVE if op == "relative_attention" else CROSS


POSITIONS = [(0, 5, 17), (19, -3, 8), (2**40, 11, -(2**62))]


@pytest.mark.parametrize(
    "op, backend, name, positions",
    [
        (op, backend, name, positions)
        for op, backend in EVERY
        if backend != "reference"
        for name, positions in each_with_each(cases(op), POSITIONS)
    ],
)
def test_values_and_gradients(op, backend, name, positions):
    kw = problem(op, name, positions)
    compare.check(op, kw, backend)


@pytest.mark.parametrize("dtype", [torch.float16] + ([] if INTERPRETER else [torch.bfloat16]), ids=str)
@pytest.mark.parametrize("op, backend", [pair for pair in EVERY if pair[1] != "reference"])
def test_half_types(op, backend, dtype):
    for name in ("a token", "a prompt" if op == "relative_attention" else "a block"):
        kw = problem(op, name, (0, 5, 17), dtype=dtype)
        compare.check(op, kw, backend)


@pytest.mark.parametrize("op, name", [(op, name) for op in ARGUMENT for name in cases(op) if name != "dropout"])
def test_the_definition_is_that_of_each_entry_alone(op, name):
    """In float64 a batch at several positions equals one call for each entry with an int."""
    positions = (0, 5, 17)
    kw = inputs.differentiable(problem(op, name, positions, dtype=torch.float64))
    wanted = leaves(kw)
    shared = ("rel_key", "content_bias", "position_bias", ARGUMENT[op])
    whole = getattr(rk, op)(**kw, return_lse=True)
    entries = []
    for b, position in enumerate(positions):
        alone = {n: v[b : b + 1] if isinstance(v, torch.Tensor) and n not in shared else v for n, v in kw.items()}
        if op == "chunked_cross_attention":  # for an int every chunk must exist
            more = max(0, (position + kw["query"].shape[1]) // kw["chunk_len"] - 6)
            for n in {"key", "value", "neighbour_mask", "neighbour_gate"} & alone.keys():
                filler = torch.zeros_like(alone[n][:, :1]).expand(-1, more, *alone[n].shape[2:])
                alone[n] = torch.cat([alone[n], filler], 1)
            if more and "neighbour_mask" not in alone:
                alone["neighbour_mask"] = torch.arange(6 + more).view(1, -1, 1).expand(*alone["key"].shape[:3]) < 6
        entries.append(getattr(rk, op)(**{**alone, ARGUMENT[op]: position}, return_lse=True))
    for a, parts in zip(whole, zip(*entries, strict=True), strict=True):
        torch.testing.assert_close(a, torch.cat(parts))
    losses = [whole[0].square().sum(), sum(out.square().sum() for out, _ in entries)]
    for name, a, b in zip(wanted, *(torch.autograd.grad(loss, wanted.values()) for loss in losses), strict=True):
        torch.testing.assert_close(a, b, msg=lambda m, n=name: f"{n}: {m}")


@every
def test_an_entry_does_not_depend_on_the_others(op, backend):
    kw = problem(op, "a token", (0, 5, 17))
    out = getattr(rk, op)(**kw, backend=backend)
    other = getattr(rk, op)(
        **kw | {ARGUMENT[op]: kw[ARGUMENT[op]] + torch.tensor([4, 0, 1], device=out.device)}, backend=backend
    )
    same = [torch.equal(a, b) for a, b in zip(out, other, strict=True)]
    assert same == [False, True, False]


@every
def test_an_equal_position_gives_what_an_int_gives(op, backend):
    for name in list(cases(op))[:: 9 if INTERPRETER else 1]:
        kw = problem(op, name, (5, 5, 5))
        torch.manual_seed(0)
        want = compare.run(op, kw | {ARGUMENT[op]: 5}, backend)
        torch.manual_seed(0)
        got = compare.run(op, kw, backend)
        for key, value in want.items():
            torch.testing.assert_close(got[key], value, msg=lambda m, k=key, n=name: f"{n}, {k}: {m}")


@pytest.mark.parametrize("backend", [backend for op, backend in EVERY if op == "chunked_cross_attention"])
def test_chunks_that_do_not_exist_are_not_attended(backend):
    """Six chunks of four: positions from 27 on, and before 3, attend nothing; up to 26 the last chunk is read."""
    kw = problem("chunked_cross_attention", "a block", (20, -9, 100), gate=False, mask=None)
    kw = inputs.differentiable(kw)
    out, lse = rk.chunked_cross_attention(**kw, return_lse=True, backend=backend)
    seen = lse.isfinite().all(1)
    assert seen.tolist() == [[True] * 7 + [False] * 2, [False] * 9, [False] * 9]
    assert (out[~seen] == 0).all() and not lse.isnan().any()
    grads = torch.autograd.grad(out.sum(), (kw["query"], kw["key"]))
    assert (grads[0][~seen] == 0).all() and (grads[1][1:] == 0).all() and (grads[1][0, 4:] != 0).any()


@pytest.mark.parametrize("backend", [backend for op, backend in EVERY if op == "relative_attention"])
def test_decoding_over_a_cache_of_fixed_capacity(backend):
    """Two rows at different positions, token by token; entries of the cache beyond a row's position are not read."""
    n, capacity, lengths = 6, 24, torch.tensor([3, 11])
    kw = inputs.self_attention(4, N=capacity, causal=True, rel="bounded", rel_start=0, T=40)
    position = lengths.to(kw["query"].device)
    whole = rk.relative_attention(**kw, backend=backend)
    for step in range(n):
        past = torch.arange(capacity, device=position.device) > (position + step).unsqueeze(1)
        now = kw | {name: kw[name].masked_fill(past[..., None, None], 1e4) for name in ("key", "value")}
        rows = torch.stack([kw["query"][b, lengths[b] + step] for b in range(2)]).unsqueeze(1)
        out = rk.relative_attention(**now | {"query": rows, "query_offset": position + step}, backend=backend)
        want = torch.stack([whole[b, lengths[b] + step] for b in range(2)]).unsqueeze(1)
        torch.testing.assert_close(out, want)


@pytest.mark.parametrize("op", ARGUMENT)
def test_the_host_reads_no_position(op):
    """Validation and shapes work on tensors without memory, so no value is read."""
    kw = problem(op, "a token", (0, 5, 17))
    kw = {n: v.to("meta") if isinstance(v, torch.Tensor) else v for n, v in kw.items()}
    out = getattr(rk, op)(**kw)
    assert out.is_meta and out.shape == kw["query"].shape


@pytest.mark.parametrize("op, backend", before_the_kernels(EVERY))
def test_fullgraph_compile_replays_other_positions(op, backend):
    if INTERPRETER:
        pytest.skip("the interpreter runs eagerly whatever compiles around it")
    kw = problem(op, "a token", (0, 5, 17))
    torch._dynamo.reset()
    run = torch.compile(lambda kw: getattr(rk, op)(**kw, backend=backend), fullgraph=True, backend="aot_eager")
    with torch.compiler.set_stance("default"):
        for shift in range(3):
            moved = kw | {ARGUMENT[op]: kw[ARGUMENT[op]] + shift}
            torch.testing.assert_close(run(moved), getattr(rk, op)(**moved, backend=backend))
