"""Fixtures of the ops' tests."""

import pytest

from retro_kernels import extensions


@pytest.fixture
def kernels():
    """The CPU extension; the test may set its instruction set."""
    kernels = extensions.extension("_cpu")
    yield kernels
    kernels.set_isa("")
