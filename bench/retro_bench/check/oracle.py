"""The float64 answer to one call. The reference computes it for one range of queries after
another, because all queries may not fit in memory.

Where a whole case would take minutes, the answer covers only the first and last queries, and the upstream gradient of
the others is zero. The record's `checked` says so. The answer is exact for every query that it covers.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..registry import Case, Operator

#: float64 elements of one slice of the score matrix; about ten temporaries of this size live at once
SLICE_ELEMENTS = {"cpu": 2**20, "cuda": 2**27}
#: elements of the score matrix computed for one case: a few seconds
TOTAL_ELEMENTS = {"cpu": 2**22, "cuda": 2**33}


@dataclass(frozen=True)
class Oracle:
    """Exact answer for the queries `rows` (None: all). `gradients`, by input, follow from `upstream` of output 0."""

    rows: Tensor | None
    checked: str
    outputs: tuple[Tensor, ...]
    upstream: Tensor | None
    gradients: dict[str, Tensor]


def solve(
    operator: Operator,
    case: Case,
    arguments: dict[str, Any],
    seed: int,
    backward: bool,
    share: float = 1.0,
    row: int | None = None,
) -> Oracle:
    """Return the float64 outputs; with `backward` also the gradients for a fresh Gaussian upstream gradient.

    share: part of the usual budget of elements. Below 1 fewer queries of a large case are covered. row: a query that is
    covered in any case.
    """
    floats = {n: x.double() for n, x in arguments.items() if isinstance(x, Tensor) and x.is_floating_point()}
    arguments64 = arguments | floats
    names = operator.floating(arguments) if backward and operator.gradients is None else []
    leaves = [arguments64[name].requires_grad_() for name in names]
    ranges, rows, checked = _ranges(operator, case, arguments, share, row)
    upstream, outputs, totals = None, [], [torch.zeros_like(leaf) for leaf in leaves]
    for first, last in ranges:
        part = arguments64 if operator.rows is None else operator.rows(arguments64, first, last)
        with torch.set_grad_enabled(bool(names)):
            results = operator.call(part, "reference")
        outputs.append([t.detach() for t in results])
        if not backward:
            continue
        if upstream is None:
            upstream = _upstream(operator, results[0], arguments, seed, rows)
        if names:
            piece = upstream if operator.rows is None else upstream.narrow(operator.row_axes[0], first, last - first)
            grads = torch.autograd.grad(results[0], leaves, piece.double(), allow_unused=True)
            for total, grad in zip(totals, grads, strict=True):
                if grad is not None:
                    total += grad
    if operator.rows is None:
        joined = tuple(outputs[0])
    else:
        joined = tuple(map(torch.cat, zip(*outputs, strict=True), operator.row_axes))
    return Oracle(rows, checked, joined, upstream, dict(zip(names, totals, strict=True)))


def _upstream(operator: Operator, output: Tensor, arguments: dict[str, Any], seed: int, rows: Tensor | None) -> Tensor:
    """Draw a Gaussian gradient in the type of output 0. It is zero for queries that are not checked."""
    shape = list(output.shape)
    if rows is not None:
        axis = operator.row_axes[0]
        shape[axis] = operator.queries(arguments)
    generator = torch.Generator(device=output.device).manual_seed(seed + 1)
    drawn = torch.randn(shape, generator=generator, device=output.device, dtype=torch.float32)
    if rows is not None:
        kept = torch.zeros(shape[axis], dtype=torch.bool, device=output.device).index_fill_(0, rows, True)
        drawn = drawn * kept.view([-1 if a == axis else 1 for a in range(len(shape))])
    return drawn if operator.name == "topk_chunks" else drawn.to(arguments[operator.differentiable[0]].dtype)


def kinds(operator: Operator, arguments: dict[str, Any]) -> tuple[torch.dtype, ...]:
    """Return the types of the outputs of the reference, called with these arguments in their own types."""
    part = arguments if operator.rows is None else operator.rows(arguments, 0, min(operator.queries(arguments), 1))
    with torch.no_grad():
        try:
            meta = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in part.items()}
            return tuple(t.dtype for t in operator.call(meta, "reference"))
        except Exception:  # the reference reads values or has no such kernel: its results have the types too
            return tuple(t.dtype for t in operator.call(part, "reference"))


def _ranges(
    operator: Operator, case: Case, arguments: dict[str, Any], share: float, row: int | None
) -> tuple[list[tuple[int, int]], Tensor | None, str]:
    """Return the ranges of queries to compute, their rows, and the record's `checked`."""
    if operator.rows is None:  # the op can't cut out queries
        return [(0, 0)], None, "every element"
    first_input = arguments[operator.differentiable[0]]
    n, device = operator.queries(arguments), first_input.device
    if n == 0:
        return [(0, n)], torch.arange(n, device=device), "every element"
    s = case.shape
    # elements of the score matrix per query, over the whole batch
    width = s.get("B", 1) * s.get("H", 1) * s.get("S", s.get("N", 1))
    if operator.row_elements is not None:
        width = operator.row_elements(case)
    step = max(int(SLICE_ELEMENTS[device.type] / width), 1)
    affordable = int(min(max(share * TOTAL_ELEMENTS[device.type] / (width * operator.oracle_cost), 8), n))
    if affordable >= n:
        spans, checked = [(0, n)], "every element"
    else:
        half = affordable // 2
        spans = [(0, half), (n - half, n)]
        if row is not None and half <= row < n - half:
            spans.insert(1, (row, row + 1))
        checked = f"the first and last {half} of {n} queries, the others' gradient zero"
    ranges = [(a, min(a + step, last)) for first, last in spans for a in range(first, last, step)]
    return ranges, torch.cat([torch.arange(*span, device=device) for span in spans]), checked
