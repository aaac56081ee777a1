"""Propagation of NaN and infinity by docs/nan_and_infinity.md: visible values show; masked values and values of another
batch entry or head do not.
"""

import functools

import pytest
import torch

from retro_kernels.testing import inputs
from tests.conftest import INTERPRETER, with_backends
from tests.ops.calls import leaves, outputs

#: batch entry 1 is poisoned; the slow interpreter checks one other
B = 2 if INTERPRETER else 3
OTHERS = [0, 2][: B - 1]
S = 20 if INTERPRETER else 70
MADE = {
    "relative_attention": lambda **kw: inputs.self_attention(1, B=B, N=9, S=S, H=4, G=2, causal=True, **kw),
    "chunked_cross_attention": lambda **kw: inputs.cross_attention(1, B=B, N=7, H=4, G=2, gate=True, **kw),
    "relative_logits": lambda **kw: inputs.relative_logits(1, B=B, H=4, **kw),
    "leaky_average": lambda **kw: inputs.leaky(1, B=B, H=4, **kw),
}
EVERY = with_backends(MADE)
every = pytest.mark.parametrize("op, backend", EVERY)
#: with NaN in a query and a key
BAD = [torch.nan] if INTERPRETER else [torch.nan, torch.inf, -torch.inf]
#: dimension of heads, and the number of query heads per head
HEADS = {
    "query": (2, 1),
    "rel_query": (2, 1),
    "key": (-2, 2),
    "value": (-2, 2),
    "x": (2, 1),
    "initial": (1, 1),
    "rel_key": (0, 1),
    "decay": (0, 1),
}
HEADS |= {"content_bias": (0, 1), "position_bias": (0, 1)}


def results(op, kw, backend):
    """Return outputs and gradients, each with its own upstream gradient of ones."""
    kw = inputs.differentiable(kw)
    outs, wanted = outputs(op, kw, backend, lse=True), leaves(kw)
    upstream = [torch.ones_like(out).where(out != -torch.inf, 0) for out in outs]
    grads = torch.autograd.grad(outs, list(wanted.values()), upstream)
    return {f"out{i}": out.detach() for i, out in enumerate(outs)} | dict(zip(wanted, grads, strict=True))


@functools.cache
def clean_results(op, backend):
    return results(op, MADE[op](), backend)


def some(names: list, count: int = 1) -> list:
    return names[:count] if INTERPRETER else names


def of_batch(op):
    """Return the inputs with a batch dimension; only their gradients are not summed over entries."""
    return [
        n
        for n, v in MADE[op]().items()
        if isinstance(v, torch.Tensor) and n not in ("rel_key", "content_bias", "position_bias", "decay")
    ]


@pytest.mark.parametrize("bad", BAD, ids=str)
@every
def test_nothing_reaches_another_batch_entry(op, backend, bad):
    kw, want = MADE[op](), clean_results(op, backend)
    for name in some(of_batch(op), 2):
        poisoned = {**kw, name: kw[name].clone()}
        poisoned[name][1] = bad
        got = results(op, poisoned, backend)
        for result in [n for n in want if n.startswith("out") or n in of_batch(op)]:
            assert torch.equal(got[result][OTHERS], want[result][OTHERS]), (name, result)


@pytest.mark.parametrize("bad", BAD, ids=str)
@every
def test_nothing_reaches_another_head(op, backend, bad):
    """Head 1 of four, or the key head shared by heads 0 and 1, is poisoned: heads 2 and 3 and key head 1 keep every
    bit.
    """
    kw, want = MADE[op](), clean_results(op, backend)
    for name in some([n for n in kw if n in HEADS], 2):
        dim, share = HEADS[name]
        poisoned = {**kw, name: kw[name].clone()}
        poisoned[name].select(dim, 1 // share).fill_(bad)
        got = results(op, poisoned, backend)
        for result, value in want.items():
            if result == "neighbour_gate":  # summed over heads
                continue
            where, shared = HEADS.get(result, (1 if result == "out1" or op == "relative_logits" else 2, 1))
            clean = torch.arange(2 // shared, value.shape[where])
            a, b = (t.index_select(where, clean.to(t.device)) for t in (got[result], value))
            assert torch.equal(a, b), (name, result)


@every
def test_what_is_seen_shows(op, backend):
    """A NaN in any input of entry 1 reaches the outputs that depend on it."""
    for name in some(of_batch(op)):
        kw = MADE[op]()
        kw[name][1] = torch.nan
        got = results(op, kw, backend)
        seen = got["out1"][1].isfinite() if "out1" in got else None
        out = got["out0"][1]
        if op == "chunked_cross_attention":  # tokens before the first chunk attend nothing
            assert out[3:].isnan().all() and (out[:3] == 0).all(), name
        else:
            assert out.isnan().all() or name == "initial", name
        if name in ("query", "rel_query", "key"):
            assert not seen.any() if seen is not None else True, name
        for grad in {"query", "rel_query"} & got.keys() - {name if op == "relative_logits" else None}:
            rows = got[grad][1][3:] if op == "chunked_cross_attention" else got[grad][1]
            assert rows.isnan().any(), (name, grad)


@pytest.mark.parametrize("op, backend", [pair for pair in EVERY if "attention" in pair[0]])
def test_what_is_masked_never_matters(op, backend):
    """In keys and values, of one token or a whole neighbour: NaN and both infinities."""
    mask = "key_mask" if op == "relative_attention" else "neighbour_mask"
    for option in [True] if op == "relative_attention" else some(["token", "neighbour"]):
        kw = MADE[op](**{"key_mask" if op == "relative_attention" else "mask": option})
        want = results(op, kw, backend)
        hidden = ~kw[mask]
        hidden = hidden.reshape(*hidden.shape, *[1] * (kw["key"].dim() - hidden.dim()))
        for bad in BAD:
            poisoned = {**kw, "key": kw["key"].masked_fill(hidden, bad), "value": kw["value"].masked_fill(hidden, bad)}
            for name, value in results(op, poisoned, backend).items():
                assert torch.equal(value, want[name]), (bad, option, name)
