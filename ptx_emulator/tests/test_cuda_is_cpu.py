"""The device "cuda" as the CPU: ordinary programs run, tensors know where they are, and a mix of devices fails."""

import concurrent.futures
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
    x.cpu().add_(1)
    assert not torch.equal(x, x.cpu() + 1)  # a copy


def test_a_default_device_ends_with_the_emulation():
    """A mode that stays on the stack breaks torch.compile in every later test of the process."""
    with ptx_emulator.gpu(90, cuda=True):
        for default in ("cuda", None, "cuda"):
            torch.set_default_device(default)
            assert torch.zeros(3).is_cuda == bool(default)
    assert torch.get_default_device().type == "cpu" and not torch.overrides._get_current_function_mode_stack()


class Doubled(torch.autograd.Function):
    """A program that calls a kernel on tensors made elsewhere."""

    @staticmethod
    def forward(ctx, x):
        assert x.is_cuda and x.device.type == "cuda"
        out = torch.empty(x.shape, device=x.device)
        double_kernel[(1,)](x, out, x.numel())
        return out

    @staticmethod
    def backward(ctx, grad):
        assert grad.is_cuda
        return Doubled.forward(ctx, grad.contiguous().to("cuda:0"))


def test_a_kernel_in_a_backward_pass():
    with ptx_emulator.gpu(90, cuda=True):
        x = torch.randn(1024, device="cuda", requires_grad=True)
        module = torch.nn.Linear(1024, 2).to(torch.device("cuda", 0))
        out = module(Doubled.apply(x))
        out.sum().backward()
        assert out.device == torch.device("cuda", 0) == x.grad.device
        (again,) = torch.autograd.grad(Doubled.apply(x).sum(), x)
        with torch.cuda.device(x.device), torch.device("cuda"):
            assert torch.zeros(3).is_cuda and torch.zeros(3).cpu().device.type == "cpu"
        torch.randn(3, generator=torch.Generator(device="cuda").manual_seed(1), device=x.device)
    assert x.device.type == "cpu" and torch.equal(again, torch.full((1024,), 2.0))
    assert torch.allclose(x.grad, 2 * module.weight.sum(0))


def test_training(gpu):
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 4)).cuda()
    optimizer, scaler = torch.optim.AdamW(model.parameters(), 1e-2), torch.amp.GradScaler("cuda")
    x, losses = torch.randn(16, 4).cuda(), []
    for _ in range(8):
        with torch.autocast("cuda"):
            y = model(x)
            assert y.dtype == torch.get_autocast_dtype("cuda") == torch.float16
            loss = functional.mse_loss(y, x)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and all(one.is_cuda for one in model.parameters())


def test_ordinary_programs(gpu, tmp_path):
    module, x = torch.nn.Linear(8, 8, device="cuda"), torch.randn(2, 8, device="cuda", requires_grad=True)
    for reentrant in (True, False):
        torch.utils.checkpoint.checkpoint(module, x, use_reentrant=reentrant).sum().backward()
    assert torch.allclose(x.grad, 2 * module.weight.sum(0))
    torch.save(module.state_dict(), tmp_path / "state.pt")
    for place in ("cuda", "cuda:0", torch.device("cuda"), {"cpu": "cuda:0"}, None, lambda data, _: data.cuda()):
        assert torch.load(tmp_path / "state.pt", map_location=place)["weight"].is_cuda
    made = torch.cuda.FloatTensor(3)
    assert isinstance(made, torch.cuda.FloatTensor) and made.type() == "torch.cuda.FloatTensor"
    assert x.type("torch.cuda.HalfTensor").dtype == torch.float16
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: torch.ones(3, device="cuda").is_cuda).result()
    assert isinstance(torch.cuda.device(0), torch.cuda.device)
    with pytest.raises(ptx_emulator.PtxError, match="CUDA graphs"):
        torch.cuda.CUDAGraph()
    torch.distributed.init_process_group("nccl", f"file://{tmp_path}/store", world_size=1, rank=0)
    torch.distributed.all_reduce(made.fill_(1))
    torch.distributed.destroy_process_group()
