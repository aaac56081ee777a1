"""`ptx_emulator.gpu`: Triton's own launch path on CPU tensors."""

import pytest
import torch
import triton
import triton.language as tl

import ptx_emulator


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out_ptr + at, tl.load(x_ptr + at, inside) + tl.load(y_ptr + at, inside), inside)


@triton.autotune(
    [triton.Config({"BLOCK": 64}, num_stages=7), triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 16})], key=["n"]
)
@triton.heuristics({"EVEN": lambda given: given["n"] % given["BLOCK"] == 0})
@triton.jit
def rows_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """out = x @ y, [n, n] each; seven stages of 64 x 64 float32 exceed sm_80's shared memory."""
    rows, columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, n, BLOCK):
        a = tl.load(x_ptr + rows[:, None] * n + start + columns[None, :])
        b = tl.load(y_ptr + (start + columns)[:, None] * n + tl.program_id(1) * BLOCK + columns[None, :])
        acc = tl.dot(a, b, acc, input_precision="ieee")
    tl.store(out_ptr + rows[:, None] * n + tl.program_id(1) * BLOCK + columns[None, :], acc)
    tl.static_assert(EVEN)


def vectors():
    return torch.randn(1024), torch.randn(1024), torch.empty(1024)


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_a_kernel_as_it_is_called(arch):
    x, y, out = vectors()
    with ptx_emulator.gpu(arch) as log:
        add_kernel[lambda meta: (triton.cdiv(1024, meta["BLOCK"]),)](x, y, out, 1024, BLOCK=256, num_warps=2)
        assert torch.cuda.get_device_capability() == divmod(arch, 10)
        assert torch.cuda.get_device_properties(0).multi_processor_count > 100
    assert torch.equal(out, x + y)
    (launch,) = log.launches
    assert (launch.name, launch.grid, launch.options["num_warps"], launch.arch) == ("add_kernel", (4, 1, 1), 2, arch)
    assert launch.arguments["x_ptr"] is x and launch.arguments["BLOCK"] == 256
    assert launch.counters()["ctas"] == 4 and launch.counters()["global_bytes"] == 3 * 4096 and launch.notes == []
    assert {line.line.partition(":")[0] for line in launch.lines()} == {"test_gpu.py"}


def test_nothing_stays_behind():
    before = triton.runtime.driver._active, torch.cuda.is_available(), torch.cuda.device_count()
    with ptx_emulator.gpu(80):
        assert torch.cuda.is_available()
    assert (triton.runtime.driver._active, torch.cuda.is_available(), torch.cuda.device_count()) == before
    assert "data_ptr" not in torch.Tensor.__dict__


def test_what_is_wrong_is_reported_with_argument_and_line():
    x, y, out = vectors()
    with ptx_emulator.gpu(90) as log, pytest.raises(ptx_emulator.EmulationError, match="x_ptr: byte 4096 of 4096") as e:
        add_kernel[(5,)](x, y, out, 2000, BLOCK=256)
    assert "argument x_ptr" in str(e.value) and "test_gpu.py:" in str(e.value)
    with pytest.raises(ValueError, match="did not finish"):
        log.launches[0].counters()


@pytest.mark.parametrize("arch", [80, 90])
def test_an_autotuner_takes_the_first_configuration_that_fits_for_every_key_and_in_every_session(arch):
    """sm_90 has more shared memory. Triton raises OutOfResources only the first time that a process loads a kernel."""
    for _ in range(2):
        with ptx_emulator.gpu(arch) as log:
            for n in (128, 192, 128):
                x, y, out = torch.randn(n, n), torch.randn(n, n), torch.empty(n, n)
                rows_kernel[lambda meta, n=n: (triton.cdiv(n, meta["BLOCK"]),) * 2](x, y, out, n)
                assert (out - x @ y).abs().max() < 1e-3
        taken = [launch.configuration.partition(",")[0] for launch in log.launches]
        assert taken == 3 * ["BLOCK: 32" if arch == 80 else "BLOCK: 64"]


def test_launch_hooks_are_called(monkeypatch):
    seen = []
    monkeypatch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [lambda data: seen.append(data.get()["name"])])
    for _ in range(2):  # Triton keeps the kernel and its launcher
        with ptx_emulator.gpu(80) as log:
            add_kernel[(4,)](*vectors(), 1024, BLOCK=256)
        assert seen == ["add_kernel"] and len(log.launches) == 1
        monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", None)


def test_the_time_model_takes_a_launch():
    x, y, out = vectors()
    with ptx_emulator.gpu(90) as log:
        add_kernel[(4,)](x, y, out, 1024, BLOCK=256)
        found = log.launches[0].estimate("H200")
    kept = out.clone()
    assert found.seconds > 2e-6 and torch.equal(kept, out)
    with pytest.raises(ValueError, match="machine: expected one of"):
        log.launches[0].estimate("H300")


def test_an_access_beside_a_view_says_that_it_is_inside_the_storage():
    whole, out = torch.randn(2048), torch.empty(1024)
    view = whole[512:1024]
    with ptx_emulator.gpu(90):
        with pytest.raises(ptx_emulator.EmulationError, match='byte 2048 of 2048, inside its storage: bounds="s'):
            add_kernel[(4,)](view, whole, out, 1024, BLOCK=256)
        with pytest.raises(ptx_emulator.EmulationError, match=r"x_ptr: byte 8192 of 8192 \("):
            add_kernel[(9,)](whole, torch.randn(4096), torch.empty(4096), 2304, BLOCK=256)
    with ptx_emulator.gpu(90, bounds="storage") as log:
        add_kernel[(4,)](view, whole, out, 1024, BLOCK=256)
        assert torch.equal(out, whole[512:1536] + whole[:1024])
        with pytest.raises(ptx_emulator.EmulationError, match="byte 8192 of 8192"):
            add_kernel[(8,)](view, torch.randn(4096), torch.empty(4096), 2048, BLOCK=256)
        add_kernel[(0,)](view, whole, out, 1024, BLOCK=256)
    assert log.launches[-1].notes == ["the grid is empty: nothing was executed"]
    with pytest.raises(ValueError, match="bounds: expected one of tensor, storage"), ptx_emulator.gpu(90, bounds="all"):
        pass
    with pytest.raises(ValueError, match="arch: expected one of"), ptx_emulator.gpu(75):
        pass
