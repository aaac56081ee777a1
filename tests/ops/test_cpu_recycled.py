"""Freed memory of outputs and gradients is reused; memory in use never is."""

import pytest
import torch

import retro_kernels as rk
from retro_kernels import cpu_lib as cpu
from retro_kernels.cpu_lib import recycled
from retro_kernels.testing import inputs

SHAPE = (recycled.FROM // 4,)


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(recycled, "_blocks", [])


def made():
    return cpu.empty(SHAPE, torch.float32)


def test_memory_given_back_is_taken_again():
    first = made()
    place = first.data_ptr()
    del first
    second = cpu.empty((2, recycled.FROM // 4), torch.bfloat16)  # as many bytes
    assert second.data_ptr() == place and second.is_contiguous() and not second._is_view()


@pytest.mark.parametrize("user", [lambda x: x, lambda x: x[5:], lambda x: x.numpy(), lambda x: x.untyped_storage()])
def test_memory_in_use_is_left_alone(user):
    first = made()
    place, held = first.data_ptr(), user(first)
    del first
    assert made().data_ptr() != place
    del held


def test_shared_memory_is_left_to_its_other_process():
    first = made()
    first.share_memory_()
    place = first.data_ptr()
    del first
    assert made().data_ptr() != place


def test_no_more_is_kept_than_promised(monkeypatch):
    monkeypatch.setattr(recycled, "KEPT", 3 * recycled.FROM)
    held = [made() for _ in range(5)]
    assert len(recycled._blocks) == 3
    places = {x.data_ptr() for x in held}
    del held
    other = [cpu.empty((recycled.FROM // 2,), torch.float32), made()]  # twice the bytes: two blocks go
    assert sum(block.nbytes() for block in recycled._blocks) <= recycled.KEPT and other[1].data_ptr() in places


def test_gradients_that_are_kept_keep_their_values(monkeypatch):
    monkeypatch.setattr(recycled, "FROM", 1)
    kw = inputs.self_attention(0)
    leaves = [kw[name].requires_grad_() for name in ("query", "key", "value")]

    def gradients(scale):
        return torch.autograd.grad(rk.relative_attention(**kw).sum() * scale, leaves)

    first = gradients(1.0)
    copies = [x.clone() for x in first]
    gradients(2.0), gradients(3.0)
    assert all(torch.equal(a, b) for a, b in zip(first, copies))
