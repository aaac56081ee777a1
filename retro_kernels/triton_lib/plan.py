"""What every op of this backend makes of a call, and how it is run: the same for all of them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from ..compile.aot import Case
from ..compile.target import Target, current_target
from .launch import Launch
from .tape import active


@dataclasses.dataclass
class Plan:
    """One pass of a call, not run yet: nothing has been launched, and nothing waits for the device.

    launches   fill the outputs, or what the gradients are made of
    outputs    of a forward pass, in the op's order
    gradients  of a backward pass, once the launches have run: one an entry of DIFFERENTIABLE, None where not needed.
               What is left to sum is summed there, by torch's own reductions, in a fixed order.
    """

    launches: list[Launch]
    outputs: tuple[Tensor, ...] = ()
    gradients: Callable[[], list[Tensor | None]] | None = None

    def run(self) -> Plan:
        tape = active()
        for launch in self.launches:
            launch.run() if tape is None else tape.launch(launch)
        return self


#: where a context of `collecting` is open: the launches that were left out, and for which target
_collected: list[tuple[Launch, Target]] | None = None


@contextlib.contextmanager
def collecting() -> Iterator[list[tuple[Launch, Target]]]:
    """Inside, nothing is launched: launches are collected, outputs and gradients are zeros. Not for threads."""
    global _collected
    _collected = launches = []
    try:
        yield launches
    finally:
        _collected = None


def _executed(plan: Plan, target: Target, results: Callable[[], Iterable[Tensor | None]]):
    """What `results` gives once the plan has run."""
    if _collected is None:
        plan.run()
        return results()
    _collected.extend((launch, target) for launch in plan.launches)
    return [None if tensor is None else torch.zeros_like(tensor) for tensor in results()]


def run_forward(plan: Callable[..., Plan], call) -> tuple[Tensor, ...]:
    """The outputs of `plan(call, target)`."""
    target = current_target(call[0].device)
    made = plan(call, target)
    return tuple(_executed(made, target, lambda: made.outputs))


def run_backward(plan: Callable[..., Plan], call, outputs, grads, needs) -> list[Tensor | None]:
    """The gradients of `plan(call, outputs, grads, needs, target)`; zeros where no gradient comes in."""
    if not any(needs) or all(grad is None for grad in grads):
        return [
            torch.zeros_like(getattr(call, name)) if need else None
            for name, need in zip(call.DIFFERENTIABLE, needs, strict=True)
        ]
    target = current_target(call[0].device)
    made = plan(call, outputs, grads, needs, target)
    return list(_executed(made, target, made.gradients))


def needed(call, need: dict[str, bool], input_grads: dict[str, Tensor | None]) -> list[Tensor | None]:
    """One gradient an entry of `need`; zeros for an input that the call makes no use of (a relative query without
    relative keys).
    """
    return [
        None if not wanted else torch.zeros_like(getattr(call, name)) if grad is None else grad
        for name, wanted, grad in ((name, wanted, input_grads.get(name)) for name, wanted in need.items())
    ]


def cases_of(
    name: str, call, target: Target, forward: Callable[..., Plan], backward: Callable[..., Plan] | None
) -> Iterator[Case]:
    """The launches of a call on the meta device, as training makes them: only the first output has a gradient."""
    plan = forward(call, target)
    launches = list(plan.launches)
    if backward is not None:
        needs = [getattr(call, field) is not None for field in call.DIFFERENTIABLE]
        grads = (plan.outputs[0], *[None] * (len(plan.outputs) - 1))
        launches += backward(call, plan.outputs, grads, needs, target).launches
    for launch in launches:
        yield Case(name, str(call[0].dtype).removeprefix("torch."), launch)
