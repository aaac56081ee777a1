"""Plan of one pass of a call, and its runs: the same for every op of this backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..compile.aot import Case
from ..compile.target import Target, current_target
from ..core import steps
from .launch import Launch


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

    def run(self, target: Target) -> Plan:
        listing = steps.active()
        for launch in self.launches:
            launch.run() if listing is None else listing.launch(launch, target)
        return self


def run_forward(plan: Callable[..., Plan], call) -> tuple[Tensor, ...]:
    """The outputs of `plan(call, target)`."""
    target = current_target(steps.device_of(call[0]))
    return plan(call, target).run(target).outputs


def run_backward(plan: Callable[..., Plan], call, outputs, grads, needs) -> list[Tensor | None]:
    """The gradients of `plan(call, outputs, grads, needs, target)`; zeros where no gradient comes in."""
    if not any(needs) or all(grad is None for grad in grads):
        return [
            torch.zeros_like(getattr(call, name)) if need else None
            for name, need in zip(call.DIFFERENTIABLE, needs, strict=True)
        ]
    target = current_target(steps.device_of(call[0]))
    return plan(call, outputs, grads, needs, target).run(target).gradients()


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
