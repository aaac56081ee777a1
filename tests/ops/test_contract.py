"""The contract of every op: a torch.library operator that passes opcheck, compile, autocast, checkpointing and any
requires_grad.
"""

import contextlib
import functools
import itertools
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import retro_kernels as rk
from retro_kernels.core import dispatch, operator
from retro_kernels.core.arguments import CALLS
from retro_kernels.testing import compare, guard_bands, inputs
from tests.conftest import COMPILED, INTERPRETER, before_the_kernels, fast_backends, with_backends
from tests.fresh import python
from tests.ops.calls import BUILDERS, floats, outputs, resolved
from tests.refusals import refused

OPTIONS = {
    "chunked_cross_attention": {"B": 1, "N": 6, "M": 4, "R": 5, "H": 2, "gate": True, "mask": "token"},
    "relative_attention": {"B": 1, "N": 9, "H": 2, "key_mask": True, "causal": True},
    "topk_chunks": {"docs": True, "mask": True, "causal_gap": 1, "query_offset": 9},
    "leaky_average": {"B": 1, "N": 9, "segments": 3},
    "merge_attention": {"B": 1, "dead": True},
}
SMALL = {op: functools.partial(build, seed=1, **OPTIONS.get(op, {})) for op, build in BUILDERS.items()}
EVERY = with_backends(dispatch.OPS)
every = pytest.mark.parametrize("op, backend", EVERY)


def total(op, kw, backend):
    out = outputs(op, kw, backend)[0]
    return out.where(out.isfinite(), 0).float().square().sum()


@every
def test_opcheck(op, backend):
    if op != "leaky_average" and INTERPRETER:
        pytest.skip("other backends show the same operators")
    kw = inputs.differentiable(SMALL[op]())
    call = resolved(op, kw)
    # aot dispatch runs the backward pass twice and compares, which shows hidden state and aliasing
    torch.library.opcheck(getattr(torch.ops.retro_kernels, op), (*call, backend))
    detached = [v.detach() if isinstance(v, torch.Tensor) else v for v in call]
    outs = getattr(torch.ops.retro_kernels, op)(*detached, backend)
    outs = outs if isinstance(outs, tuple) else (outs,)
    grads = [torch.ones_like(o) if o.is_floating_point() else None for o in outs]
    outs = [out for out, name in zip(outs, call.RETURNS) if name in operator.kept(call)]
    needs = [getattr(call, n) is not None for n in call.DIFFERENTIABLE]
    backward = getattr(torch.ops.retro_kernels, f"{op}_backward")
    given = (*detached, backend, *outs, *grads, needs)
    torch.library.opcheck(backward, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("op, backend", before_the_kernels(EVERY))
def test_fullgraph_compile_with_changing_lengths(op, backend):
    if op != "leaky_average" and INTERPRETER:
        pytest.skip("the interpreter runs eagerly whatever compiles around it; one op is enough to show the path")
    torch._dynamo.reset()
    compiled = torch.compile(lambda kw: total(op, kw, backend), fullgraph=True, dynamic=True, backend="aot_eager")
    for size in (9, 11, 14):
        shape = {"S": size} if op == "topk_chunks" else {"N": size}
        kw = inputs.differentiable(BUILDERS[op](2, **shape))
        loss = compiled(kw)
        torch.testing.assert_close(loss, total(op, kw, backend))
        got = torch.autograd.grad(loss, [kw[n] for n in floats(kw)])
        want = torch.autograd.grad(total(op, kw, backend), [kw[n] for n in floats(kw)])
        for name, a, b in zip(floats(kw), got, want, strict=True):
            torch.testing.assert_close(a, b, msg=name)


@pytest.mark.skipif(INTERPRETER, reason="of the reference")
@pytest.mark.parametrize("used, with_gradient", [((0,), [True, False]), ((1,), [False, True]), ((0, 1), [True, True])])
@pytest.mark.parametrize("op", ["chunked_cross_attention", "relative_attention"])
def test_an_output_that_nobody_used_brings_no_gradient(op, used, with_gradient, monkeypatch):
    """None, not zeros: a backward pass skips the work for that output."""
    module, seen = dispatch.module(op, "reference"), []
    real = module.backward
    monkeypatch.setattr(
        module, "backward", lambda call, outs, grads, needs: seen.append(grads) or real(call, outs, grads, needs)
    )
    outs = getattr(rk, op)(**inputs.differentiable(SMALL[op]()), return_lse=True, backend="reference")
    sum(outs[i].where(outs[i].isfinite(), 0).sum() for i in used).backward()
    assert [grad is not None for grad in seen[0]] == with_gradient


@every
def test_any_subset_of_inputs_may_require_grad(op, backend):
    kw = SMALL[op]()
    names = floats(kw)
    leaves = inputs.differentiable(kw)
    want = dict(zip(names, torch.autograd.grad(total(op, leaves, backend), [leaves[n] for n in names]), strict=True))
    sizes = (1,) if INTERPRETER or COMPILED else {1, 2, max(1, len(names) - 1)}
    for subset in [subset for size in sizes for subset in itertools.combinations(names, size)]:
        some = {n: v.detach().requires_grad_(n in subset) if n in names else v for n, v in kw.items()}
        got = torch.autograd.grad(total(op, some, backend), [some[n] for n in subset])
        for name, grad in zip(subset, got, strict=True):
            torch.testing.assert_close(grad, want[name], msg=lambda m, s=subset, n=name: f"{n} of {s}: {m}")


@every
@pytest.mark.skipif(INTERPRETER, reason="autocast's type on CPU is bfloat16, which the interpreter's dot gets wrong")
def test_autocast(op, backend):
    kw = inputs.differentiable(SMALL[op]())
    with torch.autocast(inputs.DEVICE, torch.bfloat16):
        loss = total(op, kw, backend)
    # a running sum keeps its input's type, like torch's cumsum; so do a merge and a norm
    narrow = op not in ("leaky_average", "merge_attention", "rms_norm", "cross_entropy")
    same = {n: v.bfloat16() if n in floats(kw) and narrow else v for n, v in kw.items()}
    torch.testing.assert_close(loss, total(op, same, backend))
    for name, grad in zip(floats(kw), torch.autograd.grad(loss, [kw[n] for n in floats(kw)]), strict=True):
        assert grad.dtype == torch.float32 and grad.isfinite().all(), name


@pytest.mark.parametrize("x, decay, initial", [("bfloat16", "float32", "float32"), ("float32", "bfloat16", "bfloat16")])
def test_autocast_gives_a_running_sum_one_type(x, decay, initial):
    """States, decays and inputs may have several types under autocast; without it the mixture is an error."""
    types = {"x": x, "decay": decay, "initial": initial}
    kw = inputs.differentiable({name: v.to(getattr(torch, types[name])) for name, v in inputs.leaky(1).items()})
    refused("expected torch", rk.leaky_average, **kw, error=TypeError)
    with torch.autocast(inputs.DEVICE, torch.bfloat16):
        y = rk.leaky_average(**kw)
    same = {"x": kw["x"], "initial": kw["initial"].to(kw["x"].dtype), "decay": kw["decay"].float()}
    assert torch.equal(y, rk.leaky_average(**same))
    grads = torch.autograd.grad(y.float().square().sum(), [kw[n] for n in kw])
    assert [g.dtype for g in grads] == [v.dtype for v in kw.values()]


@every
def test_checkpointing(op, backend):
    kw = inputs.differentiable(SMALL[op](**({"dropout_p": 0.3} if "dropout_p" in CALLS[op]._fields else {})))
    results = []
    for wrap in (lambda f: f(), lambda f: torch.utils.checkpoint.checkpoint(f, use_reentrant=False)):
        torch.manual_seed(3)
        loss = wrap(lambda: total(op, kw, backend))
        results.append([loss, *torch.autograd.grad(loss, [kw[n] for n in floats(kw)])])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@every
@pytest.mark.parametrize("listening", [False, True], ids=["alone", "under a mode"])
def test_second_derivative_is_refused(op, backend, listening):
    kw = inputs.differentiable(SMALL[op]())
    name = floats(kw)[0]
    with FlopCounterMode(display=False) if listening else torch.enable_grad():
        (grad,) = torch.autograd.grad(total(op, kw, backend), kw[name], create_graph=True)
    if getattr(CALLS[op], "TWICE", False):
        leaves = [kw[n] for n in floats(kw)]
        want = torch.autograd.grad(total(op, kw, None), kw[name], create_graph=True)[0]
        got, want = (torch.autograd.grad(g.square().sum(), leaves) for g in (grad, want))
        for name, a, b in zip(floats(kw), got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)
        return
    refused(f"{op}: second derivatives", grad.sum().backward, error=RuntimeError)


@every
def test_masks_documents_gates_and_decays_may_have_any_stride(op, backend):
    """Tensors whose last dimension is not a row of a product: a strided one is neither misread nor refused."""
    kw = inputs.differentiable(SMALL[op](**({"segments": True} if op == "relative_attention" else {})))
    strided = {n: v for n, v in kw.items() if n.endswith(("mask", "doc", "segment", "gate")) or n == "decay"}
    results = []
    for view in (lambda t: t, guard_bands.spread):
        outs = outputs(op, {n: view(v) if n in strided else v for n, v in kw.items()}, backend)
        loss = outs[0].where(outs[0].isfinite(), 0).square().sum()
        results.append([*outs, *torch.autograd.grad(loss, [kw[n] for n in floats(kw)])])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


#: masks, documents and a relative query of its own
WHOLE = {"chunked_cross_attention": {"E": 8}, "relative_attention": {"E": 8, "segments": True}}


@pytest.mark.parametrize("view", [guard_bands.guarded, guard_bands.sliced], ids=["guard bands", "strided"])
@pytest.mark.parametrize("op, backend", [(op, b) for op in SMALL if op != "topk_chunks" for b in fast_backends(op)])
def test_layouts_give_the_same_bits(op, backend, view):
    """In topk_chunks, which has a test of its own, the order of sums may depend on the layout."""
    compare.check_layout(op, SMALL[op](**WHOLE.get(op, {})), backend, view)


@pytest.mark.parametrize("op, backend", [pair for pair in EVERY if "dropout_p" in CALLS[pair[0]]._fields])
def test_a_seed_repeats_every_bit_and_another_gives_another_output(op, backend):
    kw, runs = SMALL[op](dropout_p=0.2, heads="shared"), []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        runs.append(compare.run(op, kw, backend))
    assert all(torch.equal(runs[1][name], value) for name, value in runs[0].items())
    assert not torch.equal(runs[2]["out0"], runs[0]["out0"])


@every
def test_empty_inputs(op, backend):
    kw = SMALL[op]()
    for name in floats(kw):  # batch 0 in every tensor
        if (kw[name].dim() >= 3 and name != "rel_key") or op == "cross_entropy":
            kw[name] = kw[name][:, :0] if op == "merge_attention" else kw[name][:0]
    kw = {n: v[:0] if n.endswith(("mask", "doc", "segment", "target")) else v for n, v in kw.items()}
    kw = inputs.differentiable(kw)
    loss = total(op, kw, backend)
    loss.backward()
    assert loss == 0
    for name in floats(kw):
        assert kw[name].grad is None or (kw[name].grad == 0).all()


@pytest.mark.parametrize("n, keys", [(1, 0), (0, 1), (0, 0)])
def test_no_displacement_takes_a_table_of_no_rows(n, keys):
    """A slice of a larger table may be empty: decoding from an empty cache, a shard without keys or queries."""
    kw = inputs.self_attention(1, N=1, S=1, causal=True)
    sizes = {"query": n, "key": keys, "value": keys, "rel_key": 0}
    kw = inputs.differentiable(kw | {name: kw[name][:, :size] for name, size in sizes.items()})
    out, lse = rk.relative_attention(**kw, return_lse=True)
    assert out.shape == (2, n, 4, 16) and (out == 0).all() and lse.shape == (2, 4, n) and (lse == -torch.inf).all()
    for name, grad in zip(floats(kw), torch.autograd.grad(out.sum(), [kw[f] for f in floats(kw)]), strict=True):
        assert grad.shape == kw[name].shape and (grad == 0).all(), name
    logits = rk.relative_logits(kw["query"], kw["rel_key"], key_len=keys)
    assert logits.shape == (2, 4, n, keys)


@pytest.mark.parametrize("op", dispatch.OPS)
def test_float64_falls_to_the_reference(op):
    kw = inputs.cast(SMALL[op](), torch.float64)
    out = getattr(rk, op)(**kw)
    assert (out[0] if isinstance(out, tuple) else out).dtype == torch.float64
    for backend in fast_backends(op):
        refused(f"backend: '{backend}' cannot serve .*float64", getattr(rk, op), **kw, backend=backend)


def test_use_backend_sets_and_restores_the_default():
    kw = SMALL["chunked_cross_attention"]()
    with rk.use_backend("reference"):
        assert dispatch.named(None) == "reference"
        out = rk.chunked_cross_attention(**kw)
        with pytest.raises(ZeroDivisionError), rk.use_backend(None):
            assert dispatch.named(None) is None
            raise ZeroDivisionError
        assert dispatch.named(None) == "reference"
    assert dispatch.named(None) is None
    assert torch.equal(out, rk.chunked_cross_attention(**kw, backend="reference"))
    refused("backend: expected None or one of", rk.use_backend, "cublas")


def test_contexts_of_two_threads_may_close_in_any_order():
    first, second = rk.use_backend("cpu"), rk.use_backend("reference")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert dispatch.named(None) == "reference"
    second.__exit__(None, None, None)
    assert dispatch.named(None) is None


def test_use_backend_inside_a_compiled_function():
    torch._dynamo.reset()
    kw = SMALL["leaky_average"]()

    def both(kw):
        with rk.use_backend("reference"):
            inside = dispatch.named(None), rk.leaky_average(**kw)
        return *inside, dispatch.named(None)

    inside, y, after = torch.compile(both, fullgraph=True, backend="eager")(kw)
    assert (inside, after) == ("reference", None) and torch.equal(y, rk.leaky_average(**kw, backend="reference"))


def test_a_backend_that_is_not_there_says_why():
    missing = {(op, n): s.reason for op, d in rk.backends().items() for n, s in d.items() if not s}
    for (op, name), reason in missing.items():
        with pytest.raises(ValueError, match=f"backend: '{name}' cannot serve this call of {op}: ") as error:
            getattr(rk, op)(**SMALL[op](), backend=name)
        assert str(error.value).endswith(reason)


def test_a_backend_that_is_slower_serves_whoever_names_it(monkeypatch):
    call = resolved("leaky_average", SMALL["leaky_average"]())
    fastest = dispatch.choose_backend("leaky_average", call, None)
    name = fastest.__name__.rpartition(".")[2]
    if name == "reference":
        pytest.skip("nothing but the reference runs here")
    monkeypatch.setattr(fastest, "slower", lambda call: "another is faster", raising=False)
    assert dispatch.choose_backend("leaky_average", call, None) is not fastest
    assert dispatch.choose_backend("leaky_average", call, name) is fastest


def test_kernels_run_on_the_device_of_their_tensors(monkeypatch):
    """Without a GPU: a call selects its tensors' device, and none if that is current."""
    tensor = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: ("current inside", device.index))
    assert operator._on_device(tensor) == ("current inside", 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert isinstance(operator._on_device(tensor), contextlib.nullcontext)
    assert isinstance(operator._on_device(torch.ones(1)), contextlib.nullcontext)


def attend(op: str, x: torch.Tensor) -> torch.Tensor:
    """Return [1,48,32] of an attention with dropout over x [1,48,32]."""
    query = x.unflatten(-1, (2, 16))
    if op == "relative_attention":
        out = rk.relative_attention(query, query.cos(), query.exp(), causal=True, dropout_p=0.5, backend="reference")
    else:
        key = query.cos().view(1, 6, 1, 8, 2, 16)
        out = rk.chunked_cross_attention(query, key, key.exp(), chunk_len=8, dropout_p=0.5, backend="reference")
    return out.flatten(-2)


@pytest.mark.parametrize(
    "op, compiler, budget", [("chunked_cross_attention", "aot_eager", 0.5), ("relative_attention", "inductor", 0.1)]
)
def test_dropout_masks_agree_under_a_memory_budget(op, compiler, budget):
    """The backward pass of a compiled graph that recomputes activations has the mask of its forward pass."""
    torch.manual_seed(0)
    x, weight = torch.randn(1, 48, 32, requires_grad=True), (0.2 * torch.randn(32, 32)).requires_grad_()

    def layers(x, weight):
        for _ in range(2):
            x = torch.tanh(attend(op, (x @ weight).sin()) @ weight)
        return x.square().sum()

    def gradients(function):
        torch.manual_seed(3)
        return torch.autograd.grad(function(x, weight), (x, weight))

    torch._dynamo.reset()
    with torch._functorch.config.patch(activation_memory_budget=budget):
        got = gradients(torch.compile(layers, backend=compiler, fullgraph=True))
    for a, b in zip(got, gradients(layers)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_two_compiled_attentions_of_equal_inputs_have_masks_of_their_own(compiler):
    torch._dynamo.reset()
    both = torch.compile(lambda x: (attend("relative_attention", x), attend("relative_attention", x)), backend=compiler)
    first, second = both(torch.randn(1, 48, 32))
    assert not torch.equal(first, second)


def test_compiled_graphs_on_disk_are_read_by_equal_sources_only(tmp_path):
    """The key of torch's cache has the sources of the package in it, next to the user's own tag."""
    shutil.copytree(Path(rk.__file__).parent, tmp_path / "retro_kernels")
    with (tmp_path / "retro_kernels" / "ops" / "_dropout.py").open("a") as file:
        file.write("#")
    code = "import retro_kernels, torch; print(torch.compiler.config.cache_key_tag)"
    said = python("-c", code, cwd=tmp_path, PYTHONPATH=str(tmp_path), TORCH_COMPILE_CACHE_KEY_TAG="mine")
    own, package, digest = said.split()
    assert (own, package, len(digest)) == ("mine", "retro_kernels", 12)
    assert digest not in torch.compiler.config.cache_key_tag and package in torch.compiler.config.cache_key_tag


def test_a_memory_budget_of_zero_is_refused_with_dropout():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: attend("relative_attention", x), backend="aot_eager")
    message = r"dropout_p: expected 0 with torch\._functorch\.config\.activation_memory_budget"
    with torch._functorch.config.patch(activation_memory_budget=0.0), pytest.raises(RuntimeError, match=message):
        compiled(torch.randn(1, 48, 32, requires_grad=True))
