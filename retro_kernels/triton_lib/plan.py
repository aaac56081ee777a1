"""Plan of one pass of a call, for every op of this backend, and how it is run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..compile.aot import Case
from ..compile.target import Target, current_target
from ..core import steps
from .launch import Bound, Launch, filled, launches_to, run


@dataclasses.dataclass
class Plan:
    """One pass of a call as a value. Making it launches nothing and does not wait for the device.

    launches   fill the outputs, or the tensors that `gradients` returns or sums
    outputs    of a forward pass, in the op's order
    gradients  of a backward pass: called after the launches, returns a gradient for each entry of DIFFERENTIABLE, None
               where it is not needed. It may sum partial gradients by torch's reductions, in a fixed order.
    """

    launches: list[Launch]
    outputs: tuple[Tensor, ...] = ()
    gradients: Callable[[], list[Tensor | None]] | None = None

    def run(self) -> Plan:
        listing = steps.active()
        for launch in self.launches:
            if listing is None:
                run(launch)
            else:
                listing.launch(launch, Bound(launch))
        return self


def run_forward(plan: Callable[..., Plan], call) -> tuple[Tensor, ...]:
    """Run `plan(call, target)` on the device of the call, and return its outputs."""
    return filled(_ran(plan, call, current_target(steps.device_of(call[0]))))


def run_backward(plan: Callable[..., Plan], call, outputs, grads, needs) -> list[Tensor | None]:
    """Run `plan(call, outputs, grads, needs, target)` on the device of the call, and return its gradients."""
    return filled(_ran(plan, call, outputs, grads, needs, current_target(steps.device_of(call[0]))))


def _ran(plan, *arguments):
    made = plan(*arguments)
    if not isinstance(made, Plan):
        return made
    made.run()
    return made.outputs if made.gradients is None else made.gradients()


def needed(call, need: dict[str, bool], input_grads: dict[str, Tensor | None]) -> list[Tensor | None]:
    """Return one gradient for each entry of `need`, None where it is False.

    An input without a gradient gets zeros: the call does not use it, like a relative query without relative keys.
    """
    return [
        None if not wanted else torch.zeros_like(getattr(call, name)) if grad is None else grad
        for name, wanted, grad in ((name, wanted, input_grads.get(name)) for name, wanted in need.items())
    ]


def cases_of(
    name: str, call, target: Target, forward: Callable[..., tuple], backward: Callable[..., list] | None
) -> Iterator[Case]:
    """Yield the launches of a call on the meta device, as in training: only the first output has a gradient."""
    launches: list[Launch] = []
    with launches_to(launches.append):
        outputs = _ran(forward, call, target)
        if backward is not None:
            needs = [getattr(call, field) is not None for field in call.DIFFERENTIABLE]
            _ran(backward, call, outputs, (outputs[0], *[None] * (len(outputs) - 1)), needs, target)
    for launch in launches:
        yield Case(name, str(call[0].dtype).removeprefix("torch."), launch)
