"""Triton's interpreter as users have it, without the repairs of the tests."""

import os
import subprocess
import sys

import pytest

from retro_kernels import triton_lib
from tests.conftest import INTERPRETER

CALLS = """
import torch
import retro_kernels as rk
from retro_kernels.core import dispatch
from tests.ops.calls import BUILDERS

for op in dispatch.OPS:
    if dispatch.exists(op, "triton"):
        kw = BUILDERS[op](1, dtype=torch.bfloat16)
        getattr(rk, op)(**kw)  # another backend serves it
        try:
            getattr(rk, op)(**kw, backend="triton")
        except ValueError as error:
            print(error)
"""


@pytest.mark.skipif(INTERPRETER, reason="the interpreter of this process is repaired")
@pytest.mark.skipif(triton_lib.unavailable() == "triton is not installed", reason="needs triton")
def test_bfloat16_is_refused_by_name():
    """The interpreter takes the bits of bfloat16 for integers, which gives values of 1e8."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, "-c", CALLS], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    refused = run.stdout.splitlines()
    assert len(refused) == 6
    for line in refused:
        assert "backend: 'triton' cannot serve this call of" in line
        assert "is torch.bfloat16, whose bits Triton's interpreter takes for integers; use float32" in line
