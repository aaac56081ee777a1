"""Base of the models' configurations: checked fields, a form for JSON, copies with changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Self

from . import checks

#: annotation -> check of a field's value
CHECKS = {"int": lambda name, value: checks.integer(name, value, low=1), "float": checks.number, "bool": checks.flag}


class Config:
    """Base of frozen dataclasses of sizes, whose annotations must be strings (`from __future__ import annotations`)."""

    def check_fields(self) -> None:
        """Raise TypeError or ValueError, naming the field, unless ints are positive, floats finite and bools bools."""
        for field in dataclasses.fields(self):
            if field.type in CHECKS:
                CHECKS[field.type](field.name, getattr(self, field.name))

    def replace(self, **changes) -> Self:
        """Return a copy with some fields changed; the copy is checked."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict:
        """Return the fields as values of JSON: tuples become lists."""
        fields = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}

    @classmethod
    def from_dict(cls, fields: dict) -> Self:
        """Return the configuration of a dict that `to_dict` made.

        Raises: ValueError for a field that is unknown or missing.
        """
        known = {field.name: field for field in dataclasses.fields(cls)}
        if unknown := sorted(set(fields) - set(known)):
            raise ValueError(f"fields: expected the fields of {cls.__name__}; got the unknown {', '.join(unknown)}")
        missing = [name for name, field in known.items() if field.default is dataclasses.MISSING and name not in fields]
        if missing:
            listed = ", ".join(missing)
            raise ValueError(f"fields: expected at least the fields without a default; got none of {listed}")
        return cls(**fields)


def preset(name: str, presets: Mapping):
    """Return the preset of this name. Raises: ValueError, which lists the known names."""
    if name not in presets:
        raise ValueError(f"name: expected one of {', '.join(presets)}; got {name!r}")
    return presets[name]


def layer_numbers(
    name: str, layers: Sequence[int], last_name: str, last: int, first: int = 1, kind: str = "layers"
) -> tuple[int, ...]:
    """Check that layer numbers ascend and lie between `first` and `last`; return them as a tuple.

    name, last_name, kind: of the argument, of the field that sets `last` and of the layers, for the error.
    Raises: TypeError, ValueError.
    """
    if not isinstance(layers, (tuple, list)) or any(isinstance(i, bool) or not isinstance(i, int) for i in layers):
        raise TypeError(f"{name}: expected a tuple of ints (layers counted from 1); got {layers!r}")
    if list(layers) != sorted(set(layers)) or (layers and not first <= layers[0] <= layers[-1] <= last):
        raise ValueError(f"{name}: expected ascending {kind} from {first} to {last_name}={last}; got {tuple(layers)}")
    return tuple(layers)
