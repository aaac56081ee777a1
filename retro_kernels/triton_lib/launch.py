"""Launches of Triton kernels: `launch` runs one, or hands it to the sink of an open `launches_to`."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from triton import JITFunction

from ..compile.aot import CompileCase
from ..compile.target import Target, current_target
from ..compile.tiles import Tile

#: open contexts of `launches_to`, as (sink, zeros); the last one receives the launches
_sinks: list[tuple[Callable[[Launch], object], bool]] = []


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel over one grid. `arguments` has every parameter, constants too; tensors may be on the meta device."""

    kernel: JITFunction
    grid: tuple[int, ...]
    arguments: dict[str, Tensor | int | float | bool | str | tuple[int, ...] | None]
    num_warps: int = 4
    num_stages: int = 2
    max_registers: int | None = None

    @property
    def name(self) -> str:
        return self.kernel.__name__.strip("_").removesuffix("_kernel")

    @property
    def options(self) -> dict[str, int]:
        """Options of Triton's compiler. Products are fused with sums, because Triton's default is about to change."""
        limit = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True, **limit}

    def run(self):
        """Launch through Triton's launcher, and return the compiled kernel; None under Triton's interpreter."""
        return self.kernel[self.grid](**self.arguments, **self.options)


class Scalars:
    """The part of a launch that the layout of a call determines: grid, options, and the arguments that stay the same
    for every launch. It holds no tensor.

    arguments: may have names that the kernel lacks.
    """

    def __init__(
        self, grid: tuple[int, ...], arguments: dict, num_warps: int = 4, num_stages: int = 2, max_registers=None
    ):
        self.grid, self.arguments = grid, arguments
        self.options = num_warps, num_stages, max_registers
        self.compiled: Callable | None = None

    def bind(self, made: Launch, given: dict[str, Tensor | int | None]) -> None:
        """Run the first launch, and keep the handle of the compiled kernel and where its given arguments are.

        The handle takes a tenth of the time of Triton's launcher, and checks nothing: `layouts` gives it only calls of
        one layout, with the alignment that the kernel is specialised to. The interpreter returns no handle.
        """
        names = made.kernel.arg_names
        self.places = [(at, name) for at, name in enumerate(names) if name in given]
        self.values = [None if name in given else self.arguments[name] for name in names]
        compiled = made.run()
        if compiled is not None:
            self.compiled = compiled[tuple((*self.grid, 1, 1)[:3])]

    @classmethod
    def of_tile(cls, grid: tuple[int, ...], arguments: dict, tile: Tile) -> Scalars:
        """Return the scalars of a kernel with a tile's blocks and options."""
        blocks = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "PRECISION": tile.precision}
        return cls(grid, arguments | blocks, tile.num_warps, tile.num_stages, tile.max_registers)


def launch(kernel: JITFunction, given: dict[str, Tensor | int | None], scalars: Scalars) -> None:
    """Launch a kernel.

    given: the tensors by name, and the numbers that differ between calls of one layout; the kernel must not be
    specialised to these numbers. Names that the kernel lacks are ignored.
    """
    if scalars.compiled is not None and not _sinks:
        values = scalars.values.copy()
        for at, name in scalars.places:
            values[at] = given[name]
        scalars.compiled(*values)
        return
    arguments = {name: given[name] if name in given else scalars.arguments[name] for name in kernel.arg_names}
    made = Launch(kernel, scalars.grid, arguments, *scalars.options)
    if _sinks:
        _sinks[-1][0](made)
    elif kernel.pre_run_hooks:
        made.run()
    else:
        scalars.bind(made, given)


@contextlib.contextmanager
def launches_to(sink: Callable[[Launch], object], zeros: bool = False) -> Iterator[None]:
    """Inside, each launch is handed to `sink` instead of running.

    The sink serves every thread, because autograd runs the backward pass of a GPU in a thread of its own. zeros: the
    backend returns zeros, because a sink that runs nothing leaves outputs and gradients unfilled.
    """
    _sinks.append((sink, zeros))
    try:
        yield
    finally:
        _sinks.pop()


def filled(results: Sequence[Tensor | None]):
    """Return the outputs or gradients of a pass; under `launches_to(..., zeros=True)` they become zeros."""
    if _sinks and _sinks[-1][1]:
        for x in results:
            if x is not None:
                x.zero_()
    return results


def power_of_two(n: int, least: int = 16) -> int:
    """Return the smallest power of two >= n and >= least. A tensor-core product takes sides of at least 16."""
    return max(least, 1 << (n - 1).bit_length())


def settled(grad: Tensor, lse: Tensor) -> Tensor:
    """Return a copy of the gradient [B,N,H,D] of `out` with zeros in rows that attend nothing.

    A merge of partial attentions may return NaN there (exp(lse - lse) is NaN), and the kernels would multiply NaN by
    probabilities of 0.
    """
    return grad.masked_fill((lse == -torch.inf).transpose(1, 2).unsqueeze(-1), 0)


def _named(letters: str, values: Sequence[int]) -> tuple[int, ...]:
    """Return a named tuple with one field per letter."""
    return _type(letters)(*values)


@functools.cache
def _type(letters: str) -> type:
    made = collections.namedtuple("Strides", tuple(letters))
    made.__reduce__ = lambda self: (_named, (letters, tuple(self)))  # so that launches can be pickled
    return made


def strides(tensor: Tensor | None, name: str, letters: str, shared: bool = False) -> dict[str, tuple[int, ...]]:
    """Return {"stride_<name>": strides of the leading dimensions}, 0 for None and for missing dimensions.

    A kernel reads them by their letters: `stride_q.b`. Triton specialises each of them to 1 and to multiples of 16,
    even if `do_not_specialize` has the name. shared: a first dimension of one entry gets the stride 0, because that
    entry serves all batch entries or heads.
    """
    found = () if tensor is None else tensor.stride()[: len(letters)]
    if shared and tensor is not None and tensor.shape[0] == 1:
        found = (0, *found[1:])
    return {f"stride_{name}": _named(letters, (*found, *[0] * (len(letters) - len(found))))}


def rel_table(rel_key: Tensor | None) -> dict[str, int | tuple[int, ...]]:
    """Return the scalars of the relative keys."""
    return {**strides(rel_key, "r", "ht", shared=True), "T": 0 if rel_key is None else rel_key.shape[1]}


def needed(call, need: dict[str, bool], input_grads: dict[str, Tensor | None]) -> list[Tensor | None]:
    """Return one gradient for each entry of `need`, None where it is False.

    An input without a gradient gets zeros: the call does not use it, like a relative query without relative keys.
    """
    return [
        None if not wanted else torch.zeros_like(getattr(call, name)) if grad is None else grad
        for name, wanted, grad in ((name, wanted, input_grads.get(name)) for name, wanted in need.items())
    ]


def run_forward(forward: Callable[..., tuple[Tensor, ...]], call) -> tuple[Tensor, ...]:
    """Run `forward(call, target)` for the device of the call, and return its outputs."""
    return filled(forward(call, current_target(call[0].device)))


def run_backward(backward: Callable[..., list[Tensor | None]], call, outputs, grads, needs) -> list[Tensor | None]:
    """Run `backward(call, outputs, grads, needs, target)` for the device of the call, and return its gradients."""
    return filled(backward(call, outputs, grads, needs, current_target(call[0].device)))


def cases_of(
    name: str,
    call,
    target: Target,
    forward: Callable[..., tuple[Tensor, ...]],
    backward: Callable[..., list[Tensor | None]] | None,
) -> Iterator[CompileCase]:
    """Yield the launches of a call on the meta device, as in training: only the first output has a gradient."""
    launches: list[Launch] = []
    with launches_to(launches.append):
        outputs = forward(call, target)
        if backward is not None:
            needs = tuple([getattr(call, field) is not None for field in call.DIFFERENTIABLE])
            backward(call, outputs, (outputs[0], *[None] * (len(outputs) - 1)), needs, target)
    for launch in launches:
        yield CompileCase(name, str(call[0].dtype).removeprefix("torch."), launch, call)
