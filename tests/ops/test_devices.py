"""Tests for GPUs put every tensor on the device; checked on a stand-in that refuses to mix devices."""

import inspect

import pytest
import torch

from retro_kernels.testing import inputs
from tests import standin
from tests.conftest import COMPILED, INTERPRETER
from tests.ops import test_leaky_average, test_relative_attention, test_topk_chunks

pytestmark = pytest.mark.skipif(INTERPRETER or COMPILED, reason="the stand-in needs no kernels")

MODULES = (test_topk_chunks, test_leaky_average, test_relative_attention)


def with_first(module):
    """Return a module's tests that take a backend, each with the first of its parameters."""
    for name, function in vars(module).items():
        if not name.startswith("test_") or hasattr(function, "hypothesis"):
            continue
        first = {}
        for mark in getattr(function, "pytestmark", ()):
            if mark.name == "parametrize":
                names, value = mark.args[0], next(iter(mark.args[1]))
                names = names.replace(" ", "").split(",") if isinstance(names, str) else names
                value = value.values if isinstance(value, type(pytest.param())) else value if names[1:] else (value,)
                first |= zip(names, value, strict=True)
        if inspect.signature(function).parameters.keys() == {"backend", *first}:
            yield pytest.param(function, first, id=f"{module.__name__.rpartition('.')[2]}-{name}")


@pytest.mark.parametrize(("function", "first"), [one for module in MODULES for one in with_first(module)])
def test_no_tensor_is_left_on_the_host(function, first, monkeypatch):
    monkeypatch.setattr(inputs, "DEVICE", standin.DEVICE)
    with standin.standing_in():
        function("triton", **first)


def test_the_stand_in_refuses_to_mix():
    with standin.standing_in():
        far = torch.ones(3, device=standin.DEVICE)
        assert torch.equal((far * 2).cpu(), torch.full((3,), 2.0))
        with pytest.raises(RuntimeError, match="expected all tensors on one device"):
            far + torch.ones(3)


def test_the_stand_in_counts_what_the_host_waits_for():
    with standin.standing_in() as waits:
        far = torch.arange(4.0, device=standin.DEVICE)
        torch.where(far > 1, far, 0).sum()
        assert not waits
        far.sum().item(), bool((far > 1).any()), far[far > 1], far.tolist(), far.cpu()
        torch.tensor([1, 2], device=standin.DEVICE)
        assert len(waits) == 6, waits
