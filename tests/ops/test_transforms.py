"""torch's transforms of every op give the right values or are refused by name, as the guide's table says."""

import functools
import io
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import retro_kernels as rk
from retro_kernels.core import dispatch
from retro_kernels.testing import inputs
from tests.conftest import COMPILED, INTERPRETER, before_the_kernels, with_backends
from tests.ops.calls import floats, leaves, outputs
from tests.refusals import refused

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "ops.md"
CALLS = {
    "chunked_cross_attention": lambda seed: inputs.cross_attention(seed, B=1, N=5, M=3, K=1, R=2, H=2, gate=True),
    "relative_attention": lambda seed: inputs.self_attention(seed, B=1, N=4, H=2, causal=True),
    "relative_logits": lambda seed: inputs.relative_logits(seed, B=1, N=3, H=2, E=4, key_len=4),
    "merge_attention": lambda seed: inputs.merged(seed, P=2, B=1, N=2, H=2, D=3),
    "topk_chunks": lambda seed: inputs.topk(seed, B=2, Q=3, S=5, D=4, k=7, shared=True, docs=True, metric="l2"),
    "leaky_average": lambda seed: inputs.leaky(seed, B=1, N=4, H=2, D=2, segments=2),
    "rms_norm": lambda seed: inputs.rms(seed, N=3, D=5),
    "cross_entropy": lambda seed: inputs.entropy(seed, N=3, V=5),
}
FORWARD_MODE = ("leaky_average", "merge_attention", "relative_logits", "topk_chunks")
FIRST = "retro_kernels.{op}: forward-mode derivatives are not implemented"
EVERY = with_backends(dispatch.OPS)
every = pytest.mark.parametrize("op, backend", EVERY)


@functools.cache
def function(op: str, backend: str, entrance: str = "public function"):
    """Return (f, primals): the first output, where finite, as a function of the call's floating tensors."""
    kw = CALLS[op](1)
    names = floats(kw)

    def f(*values):
        out = outputs(op, kw | dict(zip(names, values, strict=True)), backend)[0]
        return torch.where(out.isfinite(), out, 0)

    primals = tuple(kw[n] for n in names)
    return ENTRANCES[entrance](f, primals), primals


class AsModule(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *values):
        return self.function(*values)


class Caught(TorchDispatchMode):
    """Mode that collects the arguments of each raw operator."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace == "retro_kernels":
            self.found[operator] = args
        return operator(*args, **(kwargs or {}))


def raw_operator(f, primals):
    with Caught() as caught:
        f(*primals)
    ((operator, args),) = caught.found.items()
    places = [next(i for i, arg in enumerate(args) if arg is x) for x in primals]

    def raw(*values):
        given = dict(zip(places, values, strict=True))
        outs = operator(*[given.get(i, arg) for i, arg in enumerate(args)])
        out = outs[0] if isinstance(outs, tuple) else outs
        return torch.where(out.isfinite(), out, 0)

    return raw


def exported(f, primals):
    return torch.export.export(AsModule(f), primals)


def exported_and_loaded(f, primals):
    file = io.BytesIO()
    torch.export.save(exported(f, primals), file)
    file.seek(0)
    return torch.export.load(file).module()


def traced(f, primals):
    return torch.jit.trace(f, primals, check_trace=False)


def traced_and_loaded(f, primals):
    file = io.BytesIO()
    torch.jit.save(traced(AsModule(f), primals), file)
    file.seek(0)
    return torch.jit.load(file)


#: ways to call an op: (f, primals) -> a function of the primals
ENTRANCES = {
    "public function": lambda f, primals: f,
    "raw operator": raw_operator,
    "make_fx graph": lambda f, primals: make_fx(f)(*primals),
    "exported program": lambda f, primals: exported(f, primals).module(),
    "loaded exported program": exported_and_loaded,
    "traced function": traced,
    "loaded traced function": traced_and_loaded,
}


def loss(f):
    return lambda *values: f(*values).square().sum()


def gradients(f, primals, outgoing=None) -> tuple[torch.Tensor, ...]:
    """Return gradients by autograd, without a transform."""
    leaves = [x.detach().clone().requires_grad_() for x in primals]
    out = f(*leaves)
    return torch.autograd.grad(out, leaves, out.detach() * 2 if outgoing is None else outgoing)


def close(got, want) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def tangents_of(primals, seed: int = 5):
    g = inputs.generator(seed)
    return tuple(inputs.randn(g, *x.shape, dtype=x.dtype).to(x.device) for x in primals)


# ---------------------------------------------------------------- one probe for each row of the guide's table


def probe_grad(op, backend, entrance):
    f, primals = function(op, backend, entrance)
    every_one = tuple(range(len(primals)))
    want = gradients(f, primals)
    close(torch.func.grad(loss(f), argnums=every_one)(*primals), want)
    out, pull = torch.func.vjp(f, *primals)
    close([out], [f(*primals)])
    close(pull(2 * out), want)
    jacobians = torch.func.jacrev(f, argnums=every_one)(*primals)
    close(
        [torch.einsum("o,oi->i", 2 * out.flatten(), j.reshape(out.numel(), -1)) for j in jacobians],
        [g.flatten() for g in want],
    )


def probe_vmap(op, backend, entrance):
    f, primals = function(op, backend, entrance)
    stacks = [torch.stack([x, y, x]) for x, y in zip(primals, tangents_of(primals))]
    calls = [[x[i] for x in stacks] for i in range(3)]
    close(torch.func.vmap(f)(*stacks), [f(*call) for call in calls])
    firsts, rest = stacks[0].movedim(0, 1), primals[1:]
    close(torch.func.vmap(lambda x: f(x, *rest), in_dims=1)(firsts), [f(call[0], *rest) for call in calls])
    each = torch.func.vmap(torch.func.grad(loss(f), argnums=tuple(range(len(primals)))))(*stacks)
    for i, call in enumerate(calls):
        close([x[i] for x in each], gradients(f, call))
    if not rest:
        return
    shared = torch.func.grad(lambda *values: torch.func.vmap(lambda x: f(x, *values))(stacks[0]).square().sum())
    close([shared(*rest)], [sum(gradients(f, (call[0], *rest))[1] for call in calls)])


def probe_jvp(op, backend, entrance):
    f, primals = function(op, backend, entrance)
    tangents = tangents_of(primals)
    out, pushed = torch.func.jvp(f, primals, tangents)
    close([out], [f(*primals)])
    jacobians = torch.func.jacrev(f, argnums=tuple(range(len(primals))))(*primals)
    want = sum(j.reshape(out.numel(), -1) @ t.flatten() for j, t in zip(jacobians, tangents))
    close([pushed.flatten()], [want])
    for i, (x, t) in enumerate(zip(primals, tangents)):  # one tangent, the others absent
        alone = torch.func.jvp(lambda x, i=i: f(*primals[:i], x, *primals[i + 1 :]), (x,), (t,))[1]
        close([alone.flatten()], [jacobians[i].reshape(out.numel(), -1) @ t.flatten()])
        jacobian = torch.func.jacfwd(f, argnums=i)(*primals)
        close([jacobian], [jacobians[i]])
    with forward_ad.dual_level():
        dual = f(*map(forward_ad.make_dual, primals, tangents))
        close([forward_ad.unpack_dual(dual).tangent.flatten()], [want])


def probe_hessian(op, backend, entrance):
    f, primals = function(op, backend, entrance)
    torch.func.hessian(loss(f))(*primals)


def probe_grad_of_grad(op, backend, entrance):
    f, primals = function(op, backend, entrance)
    torch.func.grad(lambda *v: torch.func.grad(loss(f))(*v).sum())(*primals)


def probe_batched_gradients(op, backend, entrance):
    """As torch.autograd.functional.jacobian(vectorize=True) does."""
    f, primals = function(op, backend, entrance)
    leaves = [x.clone().requires_grad_() for x in primals]
    out = f(*leaves)
    torch.autograd.grad(out, leaves, torch.stack([out.detach(), torch.ones_like(out)]), is_grads_batched=True)


def probe_flops(op, backend, entrance):
    f, primals = function(op, backend, entrance)
    leaves = [x.clone().requires_grad_() for x in primals]
    f(*leaves).sum().backward()  # counting must see the call although a plan may exist
    with FlopCounterMode(display=False) as counter:
        out = f(*leaves)
        forward = counter.get_flop_counts()["Global"][getattr(torch.ops.retro_kernels, op)]
        out.sum().backward()
        backward = counter.get_flop_counts()["Global"][getattr(torch.ops.retro_kernels, f"{op}_backward")]
    want = {
        "chunked_cross_attention": (4 * 5 * 2 * 2 * 16 + 2 * 5 * 2 * 2 * 16, 10 * 5 * 2 * 2 * 16 + 6 * 5 * 2 * 2 * 16),
        "relative_attention": (4 * 4 * 4 * 2 * 16 + 2 * 4 * 4 * 2 * 16, 10 * 4 * 4 * 2 * 16 + 6 * 4 * 4 * 2 * 16),
        "relative_logits": (2 * 3 * 4 * 2 * 4, 4 * 3 * 4 * 2 * 4),
        "merge_attention": (2 * 2 * 2 * 2 * 3, 4 * 2 * 2 * 2 * 3),
        "topk_chunks": (2 * 2 * 3 * 5 * 4, 4 * 2 * 3 * 7 * 4),
        "leaky_average": (2 * 4 * 2 * 2, 4 * 4 * 2 * 2),
        "rms_norm": (4 * 2 * 3 * 5, 8 * 2 * 3 * 5),
        "cross_entropy": (3 * 3 * 5, 4 * 3 * 5),
    }
    assert (forward, backward) == want[op]


class Heard(torch.Tensor):
    """A subclass that records the calls to `__torch_function__`."""

    calls: ClassVar[list] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def probe_torch_function(op, backend, entrance):
    f, primals = function(op, backend, entrance)
    f(*primals)  # the subclass must see the call although a plan may exist
    for at in range(len(primals)):
        Heard.calls.clear()
        got = f(*[x.as_subclass(Heard) if i == at else x for i, x in enumerate(primals)])
        if "traced" not in entrance:  # TorchScript calls operators without Python
            assert any(op in str(func) for func in Heard.calls)
            assert isinstance(got, Heard)
        close([got.as_subclass(torch.Tensor)], [f(*primals)])


def probe_saved_tensors_hooks(op, backend, entrance):
    """Hooks that return the same values, as a copy or in another layout."""
    f, primals = function(op, backend, entrance)
    want = gradients(f, primals)

    def apart(x):
        return torch.stack([x, torch.full_like(x, torch.nan) if x.is_floating_point() else x], -1)[..., 0]

    for pack in (lambda x: x, torch.clone, apart, lambda x: x.mT.contiguous().mT if x.dim() > 1 else x):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            got = gradients(f, primals)
        close(got, want)


TRANSFORMS = {
    "grad": lambda f: lambda *v: torch.func.grad(loss(f))(*v),
    "vjp": lambda f: lambda *v: torch.func.vjp(f, *v)[1](f(*v))[0],
    "vmap": lambda f: lambda *v: torch.func.vmap(f)(*[torch.stack([x, x + 1]) for x in v]),
    "vmap(grad)": lambda f: lambda *v: torch.func.vmap(torch.func.grad(loss(f)))(*[torch.stack([x, -x]) for x in v]),
    "jvp": lambda f: lambda *v: torch.func.jvp(f, v, tuple(map(torch.ones_like, v)))[1],
}


PROBES = {
    "`func.grad`, `vjp`, `jacrev`": probe_grad,
    "`func.vmap`, `vmap(grad)`, `grad(vmap)`": probe_vmap,
    "`autograd.grad(is_grads_batched=True)`": probe_batched_gradients,
    "`func.jvp`, `jacfwd`, `autograd.forward_ad`": probe_jvp,
    "`func.hessian`": probe_hessian,
    "`grad` of `grad`": probe_grad_of_grad,
    "`FlopCounterMode`": probe_flops,
    "`__torch_function__` of subclasses": probe_torch_function,
    "`saved_tensors_hooks`": probe_saved_tensors_hooks,
}


#: the row of the compiled transforms below
COMPILED_ROW = "`torch.compile` of `grad`, `vjp`, `vmap`, `vmap(grad)`"


@functools.cache
def table() -> dict[str, dict[str, str]]:
    """Return the guide's table: row -> op -> cell."""
    section = GUIDE.read_text().split("## With torch's transforms\n")[1].split("\n## ")[0]
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")]
    ops = [name.strip("`") for name in rows[0][1:]]
    return {row[0]: dict(zip(ops, row[1:], strict=True)) for row in rows[2:]}


def test_the_guides_table_is_whole():
    assert list(table()) == [*PROBES, COMPILED_ROW]
    assert all(set(row) == set(dispatch.OPS) for row in table().values())
    assert {cell for row in table().values() for cell in row.values()} == {"yes", "refused"}
    assert set(table()[COMPILED_ROW].values()) == {"yes"}


#: the entrances differ in front of the kernels, so one backend of an op shows all but the public function
ENTERED = [(op, backend, "public function") for op, backend in EVERY] + [
    (op, backend, entrance)
    for op, backend in dict(reversed(EVERY)).items()
    for entrance in ENTRANCES
    if entrance != "public function" and not INTERPRETER
]


@pytest.mark.parametrize("op, backend, entrance", ENTERED)
@pytest.mark.parametrize("row", PROBES)
def test_transform(row, op, backend, entrance):
    """ "yes": the probe finds the right values. "refused": an error that names the op."""
    if INTERPRETER or COMPILED:
        slow = row.startswith("`func") and op not in ("leaky_average", "relative_logits")
        if slow or (row.startswith("`saved") and "attention" in op):
            pytest.skip("one call an entry takes minutes here; the way there is the same for every op")
    cell = table()[row][op]
    if cell == "yes":
        PROBES[row](op, backend, entrance)
    else:
        first = "" if "traced" in entrance else "^"  # TorchScript's error quotes the op's
        with pytest.raises(RuntimeError, match=rf"{first}retro_kernels\.{op}: .* not implemented"):
            PROBES[row](op, backend, entrance)


# ---------------------------------------------------------------- properties beyond the table


@pytest.mark.parametrize("op, backend", before_the_kernels(EVERY))
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_compiled_transform_is_right_or_refused_by_name(name, op, backend):
    f, primals = function(op, backend)
    torch._dynamo.reset()
    compiled = torch.compile(TRANSFORMS[name](f), backend="aot_eager", fullgraph=True)
    if name != "jvp" or op in FORWARD_MODE:
        close([compiled(*primals)], [TRANSFORMS[name](f)(*primals)])
    else:
        refused(rf"retro_kernels\.{op}: .* not implemented", compiled, *primals, error=RuntimeError)


@every
def test_no_operator_drops_a_tangent(op, backend):
    """The raw operators too, forward and backward: a derivative that is silently 0 is a wrong result."""
    f, primals = function(op, backend)
    with Caught() as caught:
        f(*[x.clone().requires_grad_() for x in primals]).sum().backward()
    raw = caught.found
    assert len(raw) == 2
    for operator, args in raw.items():
        with forward_ad.dual_level(), torch.no_grad():
            dual = [
                forward_ad.make_dual(x.detach().clone(), torch.ones_like(x))
                if isinstance(x, torch.Tensor) and x.is_floating_point()
                else x
                for x in args
            ]
            if op in FORWARD_MODE and "_backward" not in str(operator):
                out = operator(*dual)
                assert forward_ad.unpack_dual(out[0] if isinstance(out, tuple) else out).tangent is not None
                continue
            refused(f"retro_kernels.{op}.*not implemented", operator, *dual, error=RuntimeError)


@pytest.mark.skipif(INTERPRETER or COMPILED, reason="of the reference")
@pytest.mark.parametrize("op", FORWARD_MODE)
def test_forward_mode_agrees_with_differences(op):
    """In float64, of every input: finite differences share no code with the rule."""
    kw = inputs.cast(CALLS[op](3), torch.float64)
    names = floats(kw)
    primals = tuple(kw[n] for n in names)

    def f(*values):
        out = outputs(op, kw | dict(zip(names, values)), "reference")[0]
        return torch.where(out.isfinite(), out, 0)

    tangents = tangents_of(primals)
    pushed = torch.func.jvp(f, primals, tangents)[1]
    step = 1e-6
    ahead, behind = (f(*[x + s * t for x, t in zip(primals, tangents)]) for s in (step, -step))
    torch.testing.assert_close(pushed, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-7)
    assert pushed.abs().max() > 0.1


@pytest.mark.skipif(INTERPRETER or COMPILED, reason="of the host")
@pytest.mark.parametrize("op", ["relative_logits", "leaky_average"])
def test_reverse_over_forward_gives_second_derivatives_of_what_has_a_rule(op):
    f, primals = function(op, "reference")
    primals = tuple(x.double() for x in primals)
    tangents = tangents_of(primals)

    def pushed(*values):
        return torch.func.jvp(f, values, tangents)[1].square().sum()

    got = torch.func.grad(pushed, argnums=tuple(range(len(primals))))(*primals)
    step = 1e-6
    for i, grad in enumerate(got):
        move = [torch.zeros_like(x) for x in primals]
        move[i] = tangents_of(primals, 9)[i]
        ahead, behind = (pushed(*[x + s * m for x, m in zip(primals, move)]) for s in (step, -step))
        torch.testing.assert_close((grad * move[i]).sum(), (ahead - behind) / (2 * step), rtol=1e-5, atol=1e-6)


CHANGED = {
    "another type": lambda x: x.half() if x.is_floating_point() else x.float(),
    "another shape": lambda x: x[..., :-1] if x.dim() else x,
    "another device": lambda x: x.to("meta"),
    "another layout": lambda x: x.to_sparse(),
}


@every
@pytest.mark.parametrize("listening", [False, True], ids=["alone", "under a mode"])
@pytest.mark.parametrize("name", CHANGED)
def test_a_hook_that_returns_another_tensor_is_refused(op, backend, name, listening):
    """The error names the argument, for each saved tensor alone, also after a correct backward pass."""
    kw = inputs.differentiable(CALLS[op](1))

    def output(pack):
        mode = FlopCounterMode(display=False) if listening else torch.enable_grad()
        with mode, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            return outputs(op, kw, backend)[0]

    saved: list[torch.Tensor] = []
    output(lambda x: saved.append(x) or x)
    assert len(saved) >= len(leaves(kw))
    output(lambda x: x).nan_to_num(0, 0, 0).sum().backward()
    for at in range(len(saved)):
        count = iter(range(len(saved)))
        out = output(lambda x, at=at, count=count: CHANGED[name](x) if next(count) == at else x)
        with pytest.raises(RuntimeError, match=rf"^retro_kernels\.{op}: a saved-tensor hook returned \w+ as "):
            torch.where(out.isfinite(), out, 0).sum().backward()


def test_a_hook_that_returns_a_float16_copy_of_the_query():
    kw = inputs.differentiable(CALLS["leaky_average"](1))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.half() if x.is_floating_point() else x, lambda x: x):
        y = rk.leaky_average(**kw)
    with pytest.raises(
        RuntimeError,
        match=r"^retro_kernels\.leaky_average: a saved-tensor hook returned x as torch.float16 \[1, 4, 2, 2\] on "
        r"cpu .*; it was saved as torch.float32 \[1, 4, 2, 2\] on cpu",
    ):
        y.sum().backward()
