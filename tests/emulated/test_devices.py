"""Where tensors are on an emulated GPU: a mix of devices fails as on a GPU."""

import copy

import numpy
import pytest
import torch
import triton
import triton.language as tl

import ptx_emulator

functional = torch.nn.functional


@triton.jit
def double_kernel(x_ptr, y_ptr, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(y_ptr + at, 2 * tl.load(x_ptr + at))


@pytest.fixture
def gpu():
    with ptx_emulator.gpu(90, cuda=True):
        yield


MIXED = {
    "sum": lambda x, c: x + c,
    "product in place": lambda x, c: c.mul_(x),
    "matrix product": lambda x, c: x @ c,
    "cat": lambda x, c: torch.cat([x, c]),
    "linear": lambda x, c: functional.linear(x, c),
    "where": lambda x, c: torch.where(x > 0, x, c),
    "a module on the CPU": lambda x, c: torch.nn.Linear(4, 4)(x),
}


@pytest.mark.parametrize("name", MIXED)
def test_tensors_of_two_devices_are_refused(gpu, name):
    words = r"^Expected all tensors to be on the same device, but found at least two dev"
    with pytest.raises(RuntimeError, match=words):
        MIXED[name](torch.randn(4, 4, device="cuda"), torch.randn(4, 4))


@pytest.mark.parametrize("convert", [torch.Tensor.numpy, numpy.asarray, lambda x: (x + 1).numpy()])
def test_a_tensor_of_the_gpu_is_no_array(gpu, convert):
    with pytest.raises(TypeError, match=r"^can't convert cuda:0 device type tensor to numpy\. Use Tensor\.cpu"):
        convert(torch.randn(4, device="cuda"))


def test_a_kernel_refuses_a_tensor_of_the_cpu(gpu):
    x, y = torch.randn(16), torch.empty(16, device="cuda")
    with pytest.raises(ValueError, match=r"^Pointer argument \(at 0\) cannot be accessed from Triton \(cpu tensor\?\)"):
        double_kernel[(1,)](x, y, 16)
    double_kernel[(1,)](x.cuda(), y, 16)
    assert torch.equal(y.cpu(), 2 * x)
    z = torch.empty(16)
    double_kernel[(1,)](x, z, 16)  # a script without a GPU runs here
    assert torch.equal(z, 2 * x)


def test_tensors_are_where_they_were_put(gpu):
    x, c = torch.randn(4, 4, device="cuda"), torch.randn(4, 4)
    there = [c.cuda(), c.to(x), c.to(0), c.to("cuda"), c.to(x.device, torch.half), copy.deepcopy(x)]
    there += [x[0], x.T, x.half(), torch.zeros_like(x), x.new_zeros(3), torch.arange(4, device=x.device)]
    there += [x + torch.tensor(2.0), x[torch.arange(2)]]
    assert all(one.is_cuda and one.device == torch.device("cuda", 0) for one in there)
    here = [c, x.cpu(), x.to(c), x.to("cpu"), torch.zeros_like(x, device="cpu"), torch.from_numpy(numpy.ones(3))]
    assert not any(one.is_cuda or one.device.type != "cpu" for one in here)
    torch.set_default_device("cuda")
    assert torch.zeros(3).is_cuda
    torch.set_default_device(None)
    assert not torch.zeros(3).is_cuda
    x.cpu().add_(1)
    assert not torch.equal(x, x.cpu() + 1)  # a copy


def test_a_default_device_ends_with_the_emulation():
    """A mode that stays on the stack breaks torch.compile in every later test of the process."""
    with ptx_emulator.gpu(90, cuda=True):
        torch.set_default_device("cuda")
        assert torch.zeros(3).is_cuda
    assert torch.get_default_device().type == "cpu" and not torch.overrides._get_current_function_mode_stack()


def test_a_training_step(gpu):
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 4)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    x, losses = torch.randn(16, 4).cuda(), []
    for _ in range(8):
        loss = functional.mse_loss(model(x), x)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and all(one.is_cuda for one in model.parameters())
