"""A contender's timed calls: their inputs are rewritten before each call, and their results are compared.

A call is either `known`, with values whose float64 answer is sealed away, or new, with values that no call has had.
Only new calls count as samples, because a remembered result is not a time. A known call is mixed into every sample, and
its result is compared. After the last sample one more result for new values is compared. A contender cannot tell which
of its calls count and which are compared.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..check import inputs as checked_inputs
from ..check import numerics
from ..check.inputs import Inputs, Sealed
from ..check.oracle import Oracle
from ..registry import Contender, Operator

KNOWN = 1  # the set of values whose answers timed calls are compared with
NEW_CALLS, CHEAP_S = 3, 0.1  # last calls on new values that are compared, if one takes less than these seconds
COMPARED_S = 0.1  # comparisons may take these seconds, however short the timed calls are


Draws = list[dict[str, numerics.Errors]]  # errors of each tensor for the values of several seeds


class WrongResult(Exception):
    """Raised if the result of a call differs from its float64 answer, or lies in memory that it must not use."""


@dataclass
class Answers:
    """Float64 answers of one case, with which the results of its contenders are compared.

    A case has two fixed sets of values. Their answers are computed once and kept in the files of `sealed`, where a
    contender cannot read them. `solve(backward)` computes the answer for the values that the inputs hold now.
    `upstream` holds, for each set, the gradient of output 0. `more(contender, like)` returns the errors of a
    contender for the values of other seeds and, with `like`, the errors of the yardstick.
    """

    operator: Operator
    dtype: str
    inputs: Inputs
    arguments: dict[str, Any]
    kinds: tuple[torch.dtype, ...]
    solve: Callable[[bool], Oracle]
    sealed: dict[int, Sealed] = field(default_factory=dict)
    upstream: dict[int, Tensor | None] = field(default_factory=dict)
    yardstick: dict[str, numerics.Errors] | None = None
    more: Callable[[Contender, bool], tuple[Draws, Draws]] | None = None

    def fault(self, contender: Contender, results: list[Tensor], others: list[Tensor]) -> str | None:
        """Return why outputs are refused whatever their values are; None for outputs that can be compared.

        They have another form than the reference's, or they share memory with an input or an earlier result. A baseline
        may return other types than the reference, as torch's own functions do.
        """
        given = [t for _, t in checked_inputs.tensors(self.arguments)]
        device = given[0].device if given else torch.device("cpu")
        kinds = [None] * len(results) if contender.role == "baseline" else self.kinds
        if why := checked_inputs.fault(self.operator, results, kinds, device):
            return why
        if checked_inputs.shared(results, given):
            return "the result shares memory with an input"
        return (
            "the result shares memory with that of an earlier call" if checked_inputs.shared(results, others) else None
        )

    def add(self, number: int, truth: Oracle) -> None:
        """Seal the answers for a set of values."""
        self.sealed[number], self.upstream[number] = Sealed(truth), truth.upstream

    def measured(self, results, grads, truth: Oracle, few: bool = False) -> dict[str, numerics.Errors]:
        """Compare results that another call or the contender can no longer change."""
        results = tuple(t.detach().clone() for t in results)
        return numerics.compared(self.operator, self.arguments, results, grads, truth, few)

    def verdict(self, contender: Contender, measured: dict[str, numerics.Errors], checked: str) -> numerics.Verdict:
        """Judge errors. An error slightly above its limit is judged again, together with errors for further values.

        The errors of both the contender and the yardstick depend on chance, most of all their worst row, and those of
        few elements. Their means over many draws do not.
        """
        yardstick = None if contender.role == "baseline" else self.yardstick
        found = numerics.judge(measured, yardstick, self.dtype, checked)
        if found.passed or self.more is None or numerics.gross(found):
            return found
        own, eager = self.more(contender, yardstick is not None)
        judged_by = yardstick and numerics.together([yardstick, *eager])
        return numerics.judge(numerics.together([measured, *own]), judged_by, self.dtype, checked)


class Trial:
    """The call of one contender that is timed, with the rewriting of its inputs and the comparison of its results.

    `call()` returns (outputs, gradients or None). Its backward pass starts from `upstream`, the gradient of output 0.
    `static` is true for a CUDA graph, which writes every result to the same memory.
    """

    def __init__(self, contender: Contender, answers: Answers, call: Callable[[], tuple], upstream: Tensor | None):
        self.contender, self.answers, self.call, self.upstream = contender, answers, call, upstream
        self.static, self.timed, self.compared = False, 0.0, 0.0
        self._last: list[Tensor] = []
        known = answers.upstream[KNOWN]
        # The answers may cover a part of the queries only. Timed calls then get gradients for all queries.
        self._new_upstream = None if upstream is None else drawn_like(known)

    def __call__(self) -> tuple:
        return self.call()

    def affords(self) -> bool:
        """Whether comparisons took at most 0.1 seconds or the time of timed calls, so that the next sample has one."""
        return self.compared <= max(self.timed, COMPARED_S)

    def before(self, known: bool) -> None:
        """Rewrite the inputs, and the upstream gradient."""
        if known:
            self.answers.inputs.write(KNOWN)
        else:
            self.answers.inputs.edit()
        if self.upstream is not None:
            self.upstream.copy_(self.answers.upstream[KNOWN] if known else self._new_upstream)
        if self.contender.renew is not None:
            self.contender.renew()

    def first(self) -> float:
        """Compare a known call and return its seconds."""
        self.before(True)
        begun = time.perf_counter()
        result = self.call()
        taken = time.perf_counter() - begun
        self.after(result)
        return taken

    def after(self, result: tuple) -> None:
        """Compare the result of a known call. Raises WrongResult."""
        begun = time.perf_counter()
        self._compare(result, "timed call", lambda: self.answers.sealed[KNOWN].open())
        if why := self.answers.inputs.overwritten():
            raise WrongResult(f"timed call: {why}")
        self.compared += time.perf_counter() - begun

    def finish(self) -> None:
        """Compare one more call, on values that no call has had. Raises WrongResult.

        A cheap comparison is repeated, because an edit may touch the values by which a contender recognises a call.
        """
        self._last = [] if self.static else list(self.call()[0])
        for _ in range(NEW_CALLS):
            begun = time.perf_counter()
            self._compare_new()
            if time.perf_counter() - begun > CHEAP_S:
                break
        self._last = []

    def _compare_new(self) -> None:
        self.before(False)
        if self.upstream is not None:
            truth = self.answers.solve(True)
            self.upstream.copy_(truth.upstream)
            sealed = Sealed(truth)
            del truth
            self._compare(self.call(), "call on new values", sealed.open)
        else:
            self._compare(self.call(), "call on new values", lambda: self.answers.solve(False))

    def _compare(self, result: tuple, what: str, answer: Callable[[], Oracle]) -> None:
        outputs, grads = result
        why = self.answers.fault(self.contender, list(outputs), self._last)
        if not why:
            truth = answer()
            measured = self.answers.measured(outputs, grads, truth, few=True)
            why = self.answers.verdict(self.contender, measured, truth.checked).complaint()
        if why:
            raise WrongResult(f"{what}: {why}")


def drawn_like(tensor: Tensor) -> Tensor:
    """Return Gaussian values in the shape, type and place of a tensor."""
    return torch.randn(tensor.shape, device=tensor.device, dtype=torch.float32).to(tensor.dtype)
