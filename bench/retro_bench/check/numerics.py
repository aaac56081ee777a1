"""Judge a contender's errors against the float64 oracle.

A kernel passes iff the relative Frobenius error of every output and gradient is at most twice that of eager PyTorch in
the same type, plus a floor. `retro_kernels.testing.tolerances` has the floors. Inputs are fresh every time. Memory that
a kernel allocates holds NaN before the kernel writes it.

The norm alone would hide one wrong row among many, and wrong values that are small. Two more limits see them: the error
of the worst row, and the relative error of the worst element. The second holds only where eager resolves every element,
as in a softmax; a zero or a wrong sign then fails. Outputs that cross zero have elements without any right digit.
"""

import contextlib
import math
import random
import statistics
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
#: the worst row may have twice eager's error and two floors, because a single row rounds worse than the norm of all
ROW_FLOORS = 2.0
ELEMENT_FACTOR, ELEMENT_FLOORS = 4.0, 8.0  # the same for the worst element
BLOCK, FEW_BLOCKS = 2**16, 8  # elements that a cache holds in float64; blocks of a timed result that are compared
LEAST_ELEMENTS = 256  # the greatest error of fewer elements depends on chance
RESOLVED = 0.5  # eager resolves every element if no relative error is greater ...
EVEN = 32.0  # ... and the greatest is at most this multiple of the median: elements near zero have a heavy tail
GROSS = 4.0  # an error above this multiple of its limit fails at once; further draws judge a smaller one
ZERO_OR_SIGN = 0.99  # a zero where the exact value is not zero has a relative error of 1, a wrong sign a greater one


@dataclass(frozen=True)
class Errors(Error):
    """Relative errors of one tensor.

    `row` is the error of the worst row. It is divided by the norm of that row or by the mean norm of all rows,
    whichever is greater. `element` and `typical` are the greatest and the median relative error of single elements.
    Both leave out elements below the normal range of the type. `size` is the norm of the exact tensor.
    """

    row: float | None = None
    element: float | None = None
    typical: float | None = None
    size: float | None = None


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
        shown += f", limit {bad[name]['limit']:.2e}"
        for part in ("row", "element"):
            limit, found = bad[name].get(f"{part}_limit"), bad[name].get(part)
            if error is not None and error <= bad[name]["limit"] and limit and found and found > limit:
                shown = f"worst {part} off by {found:.2e}, limit {limit:.2e}"
        return f"{name}: {shown}; {len(bad)} of {len(self.tensors)} tensors fail"


def differentiate(
    contender: Contender, arguments: dict[str, Any], names: list[str], upstream: Tensor
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Return the outputs, and the gradients of output 0 for `names` by autograd through the contender."""
    leaves = {name: arguments[name].detach().requires_grad_() for name in names}
    with torch.enable_grad():
        result = contender.function(**(arguments | leaves))
    outs = as_tuple(result)
    grads = torch.autograd.grad(outs[0], list(leaves.values()), upstream.to(outs[0].dtype), allow_unused=True)
    grads = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(grads, leaves.values(), strict=True)]
    return tuple(out.detach() if type(out) is Tensor else out for out in outs), grads


def called(
    operator: Operator, contender: Contender, arguments: dict[str, Any], upstream: Tensor | None, poison: bool = True
) -> tuple[tuple[Tensor, ...], list[Tensor] | None, tuple[Tensor, ...]]:
    """Call a contender. Return its outputs, its gradients for `upstream` or None, and the outputs of a second call.

    A kernel is called twice if it has gradients, because a call without autograd may take another path and return more
    outputs. poison: memory that a kernel allocates holds NaN.
    """
    backward = upstream is not None and contender.differentiable and bool(operator.floating(arguments))
    with poisoned() if poison and contender.role != "baseline" else contextlib.nullcontext():
        outputs, grads, earlier = None, None, ()
        if backward:
            outputs, grads = differentiate(contender, arguments, operator.floating(arguments), upstream)
        if not backward or contender.role != "baseline":
            with torch.no_grad():
                earlier, outputs = outputs or (), as_tuple((contender.outputs or contender.function)(**arguments))
    return outputs, grads, earlier


def as_tuple(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def errors(operator: Operator, contender: Contender, arguments: dict[str, Any], oracle: Oracle) -> dict[str, Errors]:
    """Return the errors of every output, and of every gradient where the oracle has an upstream gradient."""
    outputs, grads, _ = called(operator, contender, arguments, oracle.upstream)
    return compared(operator, arguments, outputs, grads, oracle)


def compared(
    operator: Operator,
    arguments: dict[str, Any],
    outputs: tuple[Tensor, ...],
    grads: list[Tensor] | None,
    oracle: Oracle,
    few: bool = False,
) -> dict[str, Errors]:
    """Return the errors of outputs and gradients against the oracle of these arguments; few: of parts of large ones."""
    measured = _output_errors(operator, arguments, outputs, oracle, few)
    if grads is not None:
        expected, names = list(oracle.gradients.values()), operator.floating(arguments)
        if operator.gradients is not None:
            expected = operator.gradients(arguments, (oracle.upstream,), outputs)
        measured |= {GRADIENT + name: error_of(g, e, few) for name, g, e in zip(names, grads, expected, strict=True)}
    return measured


def error_of(got: Tensor, want: Tensor, few: bool = False) -> Errors:
    """Return the norms of `retro_kernels.testing.error`, and the errors of the worst row and element.

    few: compare some blocks of rows of a large tensor, chosen at random.
    """
    if got.shape != want.shape or not got.numel():
        return Errors(*vars(error(got, want)).values())
    width = got.shape[-1] if got.dim() else 1
    rows, truth = got.detach().reshape(-1, width), want.detach().reshape(-1, width)
    step = max(BLOCK // width, 1)
    blocks = range(0, rows.shape[0], step)
    tiny = torch.finfo(got.dtype).tiny if got.dtype.is_floating_point else 1.0
    gaps, sizes, medians, greatest, worst, resolved = [], [], [], 0.0, 0.0, 0
    for first in random.sample(blocks, FEW_BLOCKS) if few and len(blocks) > FEW_BLOCKS else blocks:
        g, w = (t[first : first + step].double() for t in (rows, truth))
        gap = g - w
        if not bool(gap.isfinite().all()):
            same = (g == w) & w.isinf()
            gap, w = (torch.where(same, 0.0, t) for t in (gap, w))
            if not bool(gap.isfinite().all()):
                return Errors(None, None)
        gaps.append(gap.norm(dim=1))
        sizes.append(w.norm(dim=1))
        gap, w = gap.abs(), w.abs()  # `double` may have returned the tensor itself
        greatest = max(greatest, float(gap.max()))
        normal = w >= tiny
        if worst <= 1.0 and bool(normal.any()):  # a greater error decides nothing more
            relative = torch.where(normal, gap / w, 0.0)
            resolved += int(normal.sum())
            worst = max(worst, float(relative.max()))
            if len(medians) < FEW_BLOCKS:
                medians.append(relative[normal].median())
    off, size = torch.cat(gaps), torch.cat(sizes)
    row = float((off / torch.maximum(size, size.square().mean().sqrt()).clamp_min(tiny)).max())
    whole = float(size.norm())
    norms = float(off.norm()) / (whole or 1.0), greatest, row
    if not got.dtype.is_floating_point or resolved < LEAST_ELEMENTS:
        return Errors(*norms, size=whole)
    return Errors(*norms, worst, float(torch.stack(medians).median()), whole)


def worse(a: dict[str, Errors] | None, b: dict[str, Errors] | None) -> dict[str, Errors] | None:
    """Return the greater of each error of a yardstick on two sets of values."""
    if not a or not b:
        return a or b

    def greater(one: Errors, other: Errors) -> Errors:
        pairs = zip(vars(one).values(), vars(other).values(), strict=True)
        return Errors(*(max((x for x in pair if x is not None), default=None) for pair in pairs))

    return {name: greater(a[name], b[name]) if name in a and name in b else (a | b)[name] for name in a | b}


def together(draws: list[dict[str, Errors]]) -> dict[str, Errors]:
    """Return the errors of several draws of values as if they were one tensor's. The worst row and element are means.

    A gradient of few elements may be nearly 0 in one draw by chance, where any error is large relative to it. Among
    further draws its error is relative to their common norm.
    """

    def of(found: list[Errors]) -> Errors:
        if any(e.frobenius is None for e in found):
            return Errors(None, None)
        gap = math.hypot(*(e.frobenius * (e.size or 1.0) for e in found))
        norm = gap / (math.hypot(*(e.size or 0.0 for e in found)) or 1.0)
        parts = ([getattr(e, name) for e in found] for name in ("row", "element", "typical"))
        row, element, typical = (None if None in part else statistics.fmean(part) for part in parts)
        return Errors(norm, max(e.maximum for e in found), row if element is not None else norm, element, typical)

    return {name: of([errors[name] for errors in draws if name in errors]) for name in draws[0]}


def gross(verdict: Verdict) -> bool:
    """Whether an error is so far above its limit that further draws need not be compared.

    The error of few elements depends on chance, so that it never is.
    """

    def beyond(tensor: dict[str, Any]) -> bool:
        if tensor["frobenius"] is None:
            return True
        pairs = [(tensor["frobenius"], tensor["limit"])]
        pairs += [(tensor[part], tensor[f"{part}_limit"]) for part in ("row", "element")]
        return tensor["element"] is not None and any(
            limit is not None and found is not None and found > GROSS * limit for found, limit in pairs
        )

    return any(beyond(tensor) for tensor in verdict.tensors.values() if not tensor["passed"])


def _output_errors(
    operator: Operator, arguments: dict[str, Any], outputs: tuple[Tensor, ...], oracle: Oracle, few: bool
) -> dict[str, Errors]:
    if oracle.rows is not None:  # a baseline may return `out` alone
        rows, axes = oracle.rows.to(outputs[0].device), operator.row_axes
        outputs = tuple(t.index_select(axis, rows) for t, axis in zip(outputs, axes, strict=False))
    if operator.compare is not None:
        pairs = operator.compare(arguments, oracle.rows, outputs, oracle.outputs)
        return {name: error_of(*pair, few) for name, pair in pairs.items()}
    return {name: error_of(*pair, few) for name, *pair in zip(operator.outputs, outputs, oracle.outputs, strict=False)}


def further_limits(like: Errors | None, dtype: str) -> dict[str, float | None]:
    """Return the limits of the worst row and of the worst element; None where the yardstick gives none."""
    limits: dict[str, float | None] = {"row_limit": None, "element_limit": None}
    if like is None or like.row is None:
        return limits
    floor = tolerances.FLOOR[getattr(torch, dtype)]
    limits["row_limit"] = tolerances.EAGER_FACTOR * like.row + ROW_FLOORS * floor
    if like.element is not None and like.element <= min(RESOLVED, EVEN * like.typical):
        limits["element_limit"] = min(ELEMENT_FACTOR * like.element + ELEMENT_FLOORS * floor, ZERO_OR_SIGN)
    return limits


def judge(measured: dict[str, Errors], yardstick: dict[str, Errors] | None, dtype: str, checked: str) -> Verdict:
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
        more = further_limits((yardstick or {}).get(name), dtype)
        passed = norms.frobenius is not None and norms.frobenius <= limit
        for part in ("row", "element"):
            most, found = more[f"{part}_limit"], getattr(norms, part)
            passed = passed and (most is None or found is None or found <= most)
        tensors[name] = asdict(norms) | {"yardstick": eager, "limit": limit, **more, "passed": passed}
    return Verdict(bool(tensors) and all(t["passed"] for t in tensors.values()), checked, tensors)
