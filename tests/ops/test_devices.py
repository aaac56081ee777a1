"""Tests for GPUs put every tensor on the device; checked on a stand-in that refuses to mix devices."""

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from retro_kernels.testing import inputs
from tests import standin
from tests.conftest import COMPILED, INTERPRETER

pytestmark = pytest.mark.skipif(INTERPRETER or COMPILED, reason="the stand-in needs no kernels")

#: parts of the names of tests that need a feature that the stand-in lacks: torch.compile, autocast, streams,
#: forward-mode gradients, 32 GB; and tests of cross_entropy, which has no Triton kernel
BEYOND = (
    *("compile", "autocast", "cuda_graph", "host_synchronisation", "tangent", "past_32_bits"),
    *("shift_of_the_logits", "infinite_logits", "wrong_target"),
)


def with_first() -> Iterator:
    """Yield the tests of this folder that take a backend, each with the first of its parameters."""
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        if path.name == Path(__file__).name:
            continue
        with contextlib.suppress(pytest.skip.Exception):  # a module that runs only under the interpreter
            yield from _of_module(importlib.import_module(f"tests.ops.{path.stem}"))


def _of_module(module) -> Iterator:
    for name, function in vars(module).items():
        if not name.startswith("test_") or hasattr(function, "hypothesis") or any(part in name for part in BEYOND):
            continue
        first = {}
        for mark in getattr(function, "pytestmark", ()):
            if mark.name == "parametrize":
                names, value = mark.args[0], next(iter(mark.args[1]), None)
                names = names.replace(" ", "").split(",") if isinstance(names, str) else names
                value = value.values if isinstance(value, type(pytest.param())) else value if names[1:] else (value,)
                first |= zip(names, value, strict=True)
        wanted = inspect.signature(function).parameters.keys()
        if "backend" in wanted and wanted <= {"backend", *first}:
            yield pytest.param(function, {**first, "backend": "triton"}, id=f"{module.__name__[10:]}-{name}")


@pytest.mark.parametrize(("function", "arguments"), list(with_first()))
def test_no_tensor_is_left_on_the_host(function, arguments, monkeypatch):
    monkeypatch.setattr(inputs, "DEVICE", standin.DEVICE)
    with standin.standing_in():
        function(**arguments)


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
