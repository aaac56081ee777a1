"""Inputs of a contender's calls, in memory that the harness rewrites without notice, and results kept out of reach.

A training step writes new values into the same memory. A contender that recognises a call by its pointers, or by some
of its values, is wrong after such a write. `Inputs` therefore holds two sets of values, and edits that make every other
call new. It also finds and names the inputs that a contender overwrites.
"""

import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..registry import Operator

EDITED = 256  # an edit halves this part of each tensor: few values, which a sparse fingerprint is likely to miss


def tensors(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the tensor of every tensor argument, including tensors in lists and tuples."""
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from ((f"{name}[{i}]", v) for i, v in enumerate(value) if isinstance(v, Tensor))


class Inputs:
    """Arguments of all calls of one case. Their memory stays the same, and their values are rewritten between calls.

    `write(0)` and `write(1)` write one of two fixed sets of values. `edit()` changes a few values at a random
    place, so that a remembered result is wrong. other: arguments drawn from another seed, whose values become set 1. A
    tensor whose elements overlap in memory keeps its values.
    """

    def __init__(self, operator: Operator, arguments: dict[str, Any], other: dict[str, Any], seed: int):
        self.operator, self.arguments, self.random = operator, arguments, random.Random(seed)
        # `data` shares the memory but not the version counter, so that a write leaves the counter unchanged
        self.memory = {name: t.data for name, t in tensors(arguments) if not overlaps(t)}
        drawn = dict(tensors(other))
        same = all(name in drawn and _alike(drawn[name], t) for name, t in self.memory.items())
        first = {name: t.clone() for name, t in self.memory.items()}
        self.sets = (first, {name: drawn[name] for name in first} if same else first)
        self.number, self.row = 0, 0
        self._undo: list[tuple[Tensor, Tensor]] = []
        names = operator.floating(arguments) or [n for n, t in self.memory.items() if t.is_floating_point()]
        self.edited = [name for name in names if name in self.memory and self.memory[name].numel()]

    def write(self, number: int) -> None:
        """Give every input the values of a set."""
        self._undo = []
        for name, memory in self.memory.items():
            memory.copy_(self.sets[number][name])
        self.number = number

    def edit(self) -> None:
        """Halve a few values of every differentiable input at a random place, and undo the last edit.

        Where queries are independent, one query is halved, whose number is `row`.
        """
        while self._undo:
            part, before = self._undo.pop()
            part.copy_(before)
        for position, name in enumerate(self.edited):
            memory = self.memory[name]
            if position == 0 and self.operator.rows is not None and name == self.operator.differentiable[0]:
                self.row = self.random.randrange(memory.shape[1])
                part = memory[:, self.row]
            elif memory.is_contiguous():
                size = max(memory.numel() // EDITED, 1)
                part = memory.view(-1).narrow(0, self.random.randrange(memory.numel() - size + 1), size)
            else:
                part = memory.select(0, self.random.randrange(memory.shape[0]))
            self._undo.append((part, part.clone()))
            part.mul_(0.5)

    def overwritten(self) -> str | None:
        """Name the inputs that do not hold their set's values, and restore them."""
        bad = [name for name, memory in self.memory.items() if not _equal(memory, self.sets[self.number][name])]
        if not bad:
            return None
        self.write(self.number)
        return f"overwrites its input {', '.join(bad)}"


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits: NaN equals itself."""
    return torch.equal(a, b) or torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (a, b)))


def overlaps(tensor: Tensor) -> bool:
    """Whether elements share memory, as in an expanded tensor."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def fault(
    operator: Operator, results: list[Tensor], kinds: Sequence[torch.dtype | None], device: torch.device
) -> str | None:
    """Return why the results cannot be outputs of the operator, for example their type or device; else None."""
    for name, result, kind in zip(operator.outputs, results, kinds, strict=False):
        if type(result) is not Tensor or result.layout != torch.strided or result.is_conj() or result.is_neg():
            form = f"{type(result).__name__}, {getattr(result, 'layout', 'no layout')}"
            return f"{name}: expected a plain strided tensor; got {form}"
        if result.device != device:
            return f"{name}: expected a tensor on {device}; got one on {result.device}"
        if kind is not None and result.dtype != kind:
            return f"{name}: expected {kind} as the reference returns; got {result.dtype}"
        if overlaps(result):
            return f"{name}: elements of the result share memory"
    return None


def shared(results: list[Tensor], others: list[Tensor]) -> bool:
    """Whether a result lies in the memory of another tensor."""
    places = {t.untyped_storage().data_ptr() for t in others if t.numel()}
    return any(t.numel() and t.untyped_storage().data_ptr() in places for t in results)


class Sealed:
    """Tensors in an anonymous file, where a contender that searches this process's objects does not find them."""

    def __init__(self, value: Any):
        self._file = tempfile.TemporaryFile()  # noqa: SIM115, closed with its last reference
        torch.save(value, self._file)

    def open(self) -> Any:
        self._file.seek(0)
        return torch.load(self._file, weights_only=False)
