"""Fixtures of the ops' tests."""

import pytest

from retro_kernels.core import native


@pytest.fixture
def kernels():
    """The CPU extension; the test may set its instruction set."""
    kernels = native.extension("_cpu")
    yield kernels
    kernels.set_isa("")
