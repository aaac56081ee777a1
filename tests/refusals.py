"""Calls that must be refused, one line each."""

from collections.abc import Callable

import pytest


def refused(match: str, call: Callable, *arguments, error: type[Exception] = ValueError, **named) -> None:
    """Call with these arguments and expect this error; `match` is a regular expression of its message."""
    with pytest.raises(error, match=match):
        call(*arguments, **named)
