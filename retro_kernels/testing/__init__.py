"""Tools to test a kernel: one table of tolerances, random inputs, guard bands, poisoned memory and errors. They need no
test framework.

>>> from retro_kernels.testing import compare, inputs
>>> # returns outputs and gradients; the AssertionError of a failed check says where and by how much
>>> got = compare.check("leaky_average", inputs.leaky(N=64), backend="cpu")
"""

from . import inputs, tolerances
from .errors import Error, assert_passes, error, relative_error
from .guard_bands import guarded, poisoned, sliced, spread, stepped

__all__ = [
    "Error",
    "assert_passes",
    "error",
    "guarded",
    "inputs",
    "poisoned",
    "relative_error",
    "sliced",
    "spread",
    "stepped",
    "tolerances",
]
