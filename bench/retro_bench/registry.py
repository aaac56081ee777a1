"""Tables of operators, cases and contenders: declarative values that the rest of the harness reads.

An operator says how its inputs are drawn, what its float64 definition is and how much work a case is. A case is one
shape. A contender computes the operator: a backend of `retro_kernels`, a baseline, or a user's own function.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

#: default types of a case; float16 has no fast kernels on CPUs
DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "float16", "bfloat16")}
MODES = ("fwd", "fwdbwd", "decode")
ROLES = ("baseline", "ours", "reference")


@dataclass(frozen=True)
class Later:
    """Function `module:name` with some arguments `fixed`, imported at its first call.

    >>> Later("math:sqrt")(4.0)
    2.0
    """

    place: str
    fixed: tuple[tuple[str, Any], ...] = ()

    @functools.cached_property
    def function(self) -> Callable[..., Any]:
        module, _, name = self.place.partition(":")
        return functools.partial(getattr(importlib.import_module(module), name), **dict(self.fixed))

    def __call__(self, *arguments, **named):
        return self.function(*arguments, **named)


class Lazy(ModuleType):
    """Module that is imported when an attribute is first read, so that `list` and `--help` need no torch."""

    # `sys.modules` does not hold it, because matplotlib looks there for torch
    def __getattr__(self, name: str):
        module = importlib.import_module(self.__name__)
        self.__dict__.update(module.__dict__)
        return getattr(module, name)


def resolved(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a `Later`, so that a timer does not measure the indirection."""
    return function.function if isinstance(function, Later) else function


@dataclass(frozen=True)
class Case:
    """One shape of one operator. `shape` uses the letters of the op's docstring; `options` are passed to the op."""

    op: str
    name: str
    shape: Mapping[str, int]
    source: str
    options: Mapping[str, Any] = field(default_factory=dict)
    extras: tuple[str, ...] = ()  # optional tensor inputs to draw
    modes: tuple[str, ...] = ("fwd", "fwdbwd")
    devices: tuple[str, ...] = ("cpu", "cuda")  # devices whose default selection has the case
    dtypes: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: DTYPES)
    memory_gib: float = 1.0  # for inputs, gradients and one slice of the oracle; with less free the case is skipped

    def make(self, seed: int, device: str, dtype) -> dict[str, Any]:
        """Return the keyword arguments of one call: fresh Gaussian inputs from `seed`, never zeros."""
        import torch

        from retro_kernels.testing.inputs import Draw

        try:
            return OPERATORS[self.op].build(self, Draw(seed, dtype, device, torch.float32))
        except KeyError as e:
            raise ValueError(self.lacks(e)) from e

    def content(self) -> dict[str, Any]:
        """Return the parts of a record that tell this case from another one of its name."""
        return {"shape": dict(self.shape), "options": dict(self.options), "extras": list(self.extras)}

    def lacks(self, letter: KeyError) -> str:
        return f"case {self.name!r}: {self.op} needs {letter} in its shape; got {dict(self.shape)}"


@dataclass(frozen=True)
class Work:
    """Least FLOPs and bytes of a case, for any implementation.

    FLOPs are those of the matrix products over the visible pairs, 2 a multiply-add; softmax and rotations are left out.
    The backward counts a fused kernel's recomputation, as is customary for attention: 5 products for the 2 of the
    forward, and 3 for the 1 of the position logits. Bytes: every needed input read once, every output written once.
    """

    flops: float
    bytes: float

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)


@dataclass(frozen=True)
class Operator:
    """Op of the harness. `call(arguments, backend)` returns all outputs. `rows(arguments, first, last)` cuts a call to
    a range of queries with the same results; None if the op can't be cut.
    """

    name: str
    outputs: tuple[str, ...]
    differentiable: tuple[str, ...]
    build: Callable[..., dict[str, Any]]
    call: Callable[..., tuple]
    work: Callable[..., Work]
    rows: Callable[..., dict[str, Any]] | None = None
    row_axes: tuple[int, ...] = ()
    row_elements: Callable[[Case], float] | None = None  # elements of the score matrix per query; None: B * H * S
    oracle_cost: float = 1.0  # time of an element in the reference, over its time in a matrix product
    compare: Callable[..., dict] | None = None  # None: error norms output by output
    gradients: Callable[..., list] | None = None  # None: autograd of `call` with the reference backend

    def queries(self, arguments: dict[str, Any]) -> int:
        return arguments[self.differentiable[0]].shape[1]

    def floating(self, arguments: dict[str, Any]) -> list[str]:
        """Return the differentiable inputs of this call that are floating tensors."""
        return [n for n in self.differentiable if arguments.get(n) is not None and arguments[n].is_floating_point()]


@dataclass(frozen=True)
class Contender:
    """Implementation of an op. `function(**arguments)` returns the first output, or several outputs in order."""

    op: str
    name: str
    function: Callable[..., Any]
    role: str = "baseline"  # baseline | ours | reference
    devices: tuple[str, ...] = ("cpu", "cuda")
    default_on: tuple[str, ...] = ("cpu", "cuda")
    differentiable: bool = True
    triton: bool = False  # launches Triton kernels, which `static`, `emulate` and `estimate` read without a GPU
    reason: Callable[..., str | None] = lambda case, dtype, device: None  # why it can't serve a case
    peak_bytes: Callable[..., float] = lambda case, itemsize, backward: 0.0  # memory it needs beyond the inputs
    outputs: Callable[..., tuple] | None = None  # all outputs, for the check; None: `function` alone
    renew: Callable[[], None] | None = None  # indexes new values, for a baseline that indexes its inputs once


OPERATORS: dict[str, Operator] = {}
CASES: dict[tuple[str, str], Case] = {}
CONTENDERS: dict[tuple[str, str], Contender] = {}
#: plug-in -> operators of the items that it registered, in order
BY_PLUGIN: dict[str, list[str]] = {}
_loading: list[str] = []


def register(item: Operator | Case | Contender, *, replace: bool = False) -> None:
    """Add an operator, a case or a contender. A taken name needs `replace=True`.

    Raises: TypeError for anything else; ValueError for a name that is taken or holds a slash, an unknown operator,
        mode, role or device, a case without a letter that its operator's work formula reads, and an operator that has
        rows, or a case that has gradients, without a differentiable input.
    """
    table = {Operator: OPERATORS, Case: CASES, Contender: CONTENDERS}.get(type(item))
    if table is None:
        raise TypeError(f"register: expected an Operator, a Case or a Contender; got {type(item).__name__}")
    op = item.name if isinstance(item, Operator) else item.op
    key = item.name if isinstance(item, Operator) else (op, item.name)
    if op not in OPERATORS and not isinstance(item, Operator):
        raise ValueError(f"register: op {op!r} is not an operator; known: {', '.join(OPERATORS)}")
    if not item.name or "/" in item.name:
        parts = "which separates the parts of a record's id"
        raise ValueError(f"register: expected a name without '/', {parts}; got {item.name!r}")
    if isinstance(item, Operator) and item.rows is not None and not item.differentiable:
        raise ValueError(
            f"register: operator {item.name!r} has rows, which cut the first differentiable input; it has none"
        )
    if key in table and not replace:
        raise ValueError(f"register: {key!r} is taken; pass replace=True to replace it")
    if isinstance(item, Case):
        _check_case(item)
    if isinstance(item, Contender):
        _known("role", (item.role,), ROLES, item)
        _known("device", (*item.devices, *item.default_on), tuple(DTYPES), item)
        if item.renew is not None and item.role != "baseline":
            raise ValueError(f"register: renew of {item.name!r}: only a baseline is told that its inputs changed")
    table[key] = item
    for name in _loading[-1:]:
        BY_PLUGIN[name] = list(dict.fromkeys([*BY_PLUGIN[name], op]))


@contextlib.contextmanager
def plugin(name: str) -> Iterator[None]:
    """Assign the items that are registered inside to a plug-in."""
    BY_PLUGIN.setdefault(name, [])
    _loading.append(name)
    try:
        yield
    finally:
        _loading.pop()


def of_plugins(names: Iterable[str]) -> tuple[str, ...]:
    """Return the operators of the items that these plug-ins registered, each once."""
    return tuple(dict.fromkeys(op for name in names for op in BY_PLUGIN[name]))


def _check_case(case: Case) -> None:
    _known("mode", case.modes, MODES, case)
    _known("device", case.devices, tuple(DTYPES), case)
    if "fwdbwd" in case.modes and not OPERATORS[case.op].differentiable:
        why = f"but {case.op} has no differentiable input; pass modes=('fwd',)"
        raise ValueError(f"register: case {case.name!r} has the mode fwdbwd, {why}")
    try:
        for mode in case.modes[:1]:
            OPERATORS[case.op].work(case, 4, mode)
    except KeyError as e:
        raise ValueError(f"register: {case.lacks(e)}") from e


def _known(what: str, names: tuple[str, ...], known: tuple[str, ...], item: Case | Contender) -> None:
    if bad := [name for name in names if name not in known]:
        whose = f"{type(item).__name__} {item.name!r}"
        raise ValueError(f"register: {whose} names an unknown {what}, {', '.join(bad)}; known: {', '.join(known)}")


def cases_of(op: str) -> list[Case]:
    return [case for (name, _), case in CASES.items() if name == op]


def contenders_of(op: str) -> list[Contender]:
    return [contender for (name, _), contender in CONTENDERS.items() if name == op]
