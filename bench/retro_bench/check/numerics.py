"""Judge a contender's errors against the float64 oracle.

A kernel passes iff the relative Frobenius error of every output and gradient is at most twice that of eager PyTorch in
the same type, plus a floor. `retro_kernels.testing.tolerances` has the floors. Inputs are fresh every time. Memory that
a kernel allocates holds NaN before the kernel writes it.
"""

import contextlib
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from retro_kernels.testing import Error, error, poisoned, tolerances

from ..registry import Contender, Operator
from .oracle import Oracle

#: Largest error of a baseline that computes the op's own function. Half types have a large one, because baselines
#: round every intermediate result.
SAME_FUNCTION = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 1e-1, "float64": 1e-9}
GRADIENT = "d_"  # first letters of a gradient's name


@dataclass(frozen=True)
class Verdict:
    """Result of a check. `tensors`: name -> {frobenius, maximum, yardstick, limit, passed}."""

    passed: bool
    checked: str
    tensors: dict[str, dict[str, Any]]

    def complaint(self) -> str:
        """Name the worst tensor and its error."""
        bad = {name: t for name, t in self.tensors.items() if not t["passed"]}
        if not bad:
            return ""
        name = max(bad, key=lambda n: bad[n]["frobenius"] if bad[n]["frobenius"] is not None else float("inf"))
        error = bad[name]["frobenius"]
        shown = "not comparable (NaN, or another shape)" if error is None else f"error {error:.2e}"
        return f"{name}: {shown}, limit {bad[name]['limit']:.2e}; {len(bad)} of {len(self.tensors)} tensors fail"


def differentiate(
    contender: Contender, arguments: dict[str, Any], names: list[str], upstream: Tensor
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Return the outputs, and the gradients of output 0 for `names` by autograd through the contender."""
    leaves = {name: arguments[name].detach().requires_grad_() for name in names}
    with torch.enable_grad():
        result = contender.function(**(arguments | leaves))
    outs = (result,) if isinstance(result, Tensor) else tuple(result)
    grads = torch.autograd.grad(outs[0], list(leaves.values()), upstream.to(outs[0].dtype), allow_unused=True)
    grads = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(grads, leaves.values(), strict=True)]
    return tuple(out.detach() for out in outs), grads


def errors(operator: Operator, contender: Contender, arguments: dict[str, Any], oracle: Oracle) -> dict[str, Error]:
    """Return the errors of every output, and of every gradient where the oracle has an upstream gradient."""
    backward = oracle.upstream is not None and contender.differentiable
    with contextlib.nullcontext() if contender.role == "baseline" else poisoned():
        outputs, names, grads = None, operator.floating(arguments), []
        if backward:
            outputs, grads = differentiate(contender, arguments, names, oracle.upstream)
        if not backward or contender.role != "baseline":  # a kernel may take another path, and return more outputs
            with torch.no_grad():
                outputs = (contender.outputs or contender.function)(**arguments)
            outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    measured = _output_errors(operator, arguments, outputs, oracle)
    if backward:
        expected = list(oracle.gradients.values())
        if operator.gradients is not None:
            expected = operator.gradients(arguments, (oracle.upstream,), outputs)
        measured |= {GRADIENT + name: error(g, e) for name, g, e in zip(names, grads, expected, strict=True)}
    return measured


def _output_errors(
    operator: Operator, arguments: dict[str, Any], outputs: tuple[Tensor, ...], oracle: Oracle
) -> dict[str, Error]:
    if oracle.rows is not None:  # a baseline may return `out` alone
        rows, axes = oracle.rows.to(outputs[0].device), operator.row_axes
        outputs = tuple(t.index_select(axis, rows) for t, axis in zip(outputs, axes, strict=False))
    if operator.compare is not None:
        pairs = operator.compare(arguments, oracle.rows, outputs, oracle.outputs)
        return {name: error(*pair) for name, pair in pairs.items()}
    return {name: error(*pair) for name, *pair in zip(operator.outputs, outputs, oracle.outputs, strict=False)}


def judge(measured: dict[str, Error], yardstick: dict[str, Error] | None, dtype: str, checked: str) -> Verdict:
    """Hold each error to its limit.

    The limit comes from the tolerance table and the yardstick's error. Without a yardstick it is SAME_FUNCTION: for a
    baseline, if eager did not fit in memory, and for gradients if eager was too slow to run its backward pass. An
    output that eager does not return (`lse`) has the limit of the first.
    """
    tensors = {}
    for name, norms in measured.items():
        like = (yardstick or {}).get(name)
        if like is None and yardstick and not name.startswith(GRADIENT):
            like = next(iter(yardstick.values()))
        eager = like.frobenius if like else None
        limit = SAME_FUNCTION[dtype] if eager is None else tolerances.allowed(eager, getattr(torch, dtype))
        passed = norms.frobenius is not None and norms.frobenius <= limit
        tensors[name] = asdict(norms) | {"yardstick": eager, "limit": limit, "passed": passed}
    return Verdict(bool(tensors) and all(t["passed"] for t in tensors.values()), checked, tensors)
