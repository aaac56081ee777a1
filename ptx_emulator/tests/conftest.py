"""The tests of ptx_emulator, which compile kernels. They are left out if Triton interprets kernels in this process."""

import os

import pytest
import torch

collect_ignore_glob = ["test_*.py"] if os.environ.get("TRITON_INTERPRET") == "1" else []


@pytest.fixture(autouse=True)
def _afresh():
    torch.manual_seed(0)
