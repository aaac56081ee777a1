"""An int that moves from call to call, in a call that is recorded: what a plan makes of it and decides by it."""

from __future__ import annotations

from collections.abc import Callable


class Moving:
    """Stands for an int: arithmetic gives an expression, a decision leaves a guard, under which it falls so again.

    What is taken for a number (a size, a place in a table) leaves a guard too, that it is this number.

    >>> guards = []
    >>> start = Moving("t3", 9, guards)
    >>> first = (start + 1) // 4 - 1
    >>> first.expression, first.value
    ('(((t3 + 1) // 4) - 1)', 1)
    >>> max(first, 0) is first, guards
    (True, ['not ((((t3 + 1) // 4) - 1) < 0)'])
    """

    __slots__ = ("expression", "guards", "value")

    def __init__(self, expression: str, value: int, guards: list[str]):
        self.expression, self.value, self.guards = expression, value, guards

    def __neg__(self) -> Moving:
        return Moving(f"(-{self.expression})", -self.value, self.guards)

    def __index__(self) -> int:
        self._decided(f"{self.expression} == {self.value}", True)
        return self.value

    __int__ = __index__

    def __bool__(self) -> bool:
        return self._decided(f"{self.expression} != 0", self.value != 0)

    def __hash__(self) -> int:
        return hash(self.__index__())

    def _decided(self, condition: str, holds: bool) -> bool:
        guard = condition if holds else f"not ({condition})"
        if guard not in self.guards:
            self.guards.append(guard)
        return holds


def _arithmetic(sign: str, compute: Callable[[int, int], int]) -> tuple[Callable, Callable]:
    def forward(self: Moving, other):
        if not isinstance(other, (int, Moving)):
            return NotImplemented
        return Moving(f"({self.expression} {sign} {said(other)})", compute(self.value, settled(other)), self.guards)

    def reflected(self: Moving, other):
        if not isinstance(other, int):
            return NotImplemented
        return Moving(f"({other} {sign} {self.expression})", compute(other, self.value), self.guards)

    return forward, reflected


def _comparison(sign: str, compute: Callable[[int, int], bool]) -> Callable:
    def compare(self: Moving, other):
        if not isinstance(other, (int, Moving)):
            return NotImplemented
        return self._decided(f"{self.expression} {sign} {said(other)}", compute(self.value, settled(other)))

    return compare


for _name, _sign, _compute in (
    ("add", "+", int.__add__),
    ("sub", "-", int.__sub__),
    ("mul", "*", int.__mul__),
    ("floordiv", "//", int.__floordiv__),
    ("mod", "%", int.__mod__),
):
    _forward, _reflected = _arithmetic(_sign, _compute)
    setattr(Moving, f"__{_name}__", _forward)
    setattr(Moving, f"__r{_name}__", _reflected)
for _name, _sign in (("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="), ("eq", "=="), ("ne", "!=")):
    setattr(Moving, f"__{_name}__", _comparison(_sign, getattr(int, f"__{_name}__")))


def said(value) -> str:
    """How a line of Python says it."""
    return value.expression if isinstance(value, Moving) else repr(value)


def settled(value):
    """The number for which it stands now."""
    return value.value if isinstance(value, Moving) else value


def condition(guards: list[str], given: int) -> Callable[[list], bool]:
    """Whether all guards hold of the values, the first `given` of which are called t0, t1, ..."""
    names = "".join(f"t{slot}, " for slot in range(given))
    holds = " and ".join(guards) or "True"
    return eval(compile(f"lambda values: (lambda {names}: {holds})(*values)", "<moving>", "eval"))


def evaluated(value, values: list):
    """What it comes to where t0, t1, ... stand for `values`."""
    if not isinstance(value, Moving):
        return value
    return eval(value.expression, {f"t{slot}": given for slot, given in enumerate(values)})
