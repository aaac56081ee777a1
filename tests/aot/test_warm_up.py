"""`warm_up` compiles in other processes the kernels that the calls then launch: nothing is compiled again."""

from pathlib import Path

import pytest
import torch

import retro_kernels as rk
from retro_kernels.testing import inputs, stub
from tests.conftest import COMPILED, INTERPRETER
from tests.refusals import refused

if INTERPRETER or COMPILED:
    pytest.skip("launches are replaced in this process", allow_module_level=True)
pytest.importorskip("triton")


@pytest.mark.parametrize(("arch", "kind"), [(90, "cubin"), pytest.param("gfx942", "hsaco", marks=pytest.mark.nightly)])
def test_nothing_is_left_to_compile(tmp_path, monkeypatch, arch, kind):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    heard, seen = [], []
    leaky, attention = inputs.leaky(1), inputs.self_attention(1, N=1, causal=True, key_mask=True)
    x = leaky["x"].bfloat16().requires_grad_()
    leaky |= {"x": x, "initial": None}
    shifted = torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)  # not aligned to 16 bytes

    def step():
        y = rk.leaky_average(**leaky, backend="triton")
        seen.append(y)
        torch.autograd.grad(y, x, torch.ones_like(y))
        rk.leaky_average(**leaky | {"x": shifted}, backend="triton")
        rk.relative_attention(**attention, backend="triton")

    with stub.device(arch, heard.append):
        count = rk.warm_up(step, jobs=2)
        assert not heard and (seen[0] == 0).all()
        compiled = sorted(Path(tmp_path).rglob(f"*.{kind}"))
        assert len(compiled) == count >= 4
        for _ in range(3):
            step()
        assert heard and sorted(Path(tmp_path).rglob(f"*.{kind}")) == compiled


def test_what_is_no_call_is_refused_and_no_triton_is_no_work():
    refused("calls: expected functions", rk.warm_up, 3, error=TypeError)
    refused("jobs: expected", rk.warm_up, jobs=0)
    if not torch.cuda.is_available():
        assert rk.warm_up(lambda: 1 / 0) == 0


@pytest.mark.parametrize("op", ["chunked_cross_attention", "relative_attention"])
def test_training_launches_what_was_compiled_ahead_of_time(op):
    """With a loss of `out` alone lse has no gradient; kernels without that argument have other registers."""
    from retro_kernels.compile import aot
    from retro_kernels.compile.target import KNOWN
    from retro_kernels.triton_lib.launch import launches_to

    def leaf(*sizes):
        return torch.empty(*sizes, dtype=torch.bfloat16, requires_grad=True)

    names = ("query", "key", "value", "rel_key", "content_bias", "position_bias")
    if op == "relative_attention":
        keys, rows, options = (1, 2048, 16, 64), 4095, dict(rel_start=-2047, causal=True)
    else:
        keys, rows, options = (1, 32, 2, 128, 16, 64), 191, dict(rel_start=-127, chunk_len=64)
    leaves = leaf(1, 2048, 16, 64), leaf(*keys), leaf(*keys), leaf(16, rows, 64), leaf(16, 64), leaf(16, 64)
    launched = []
    with stub.device(90), launches_to(launched.append):
        out = getattr(rk, op)(**dict(zip(names, leaves, strict=True)), **options, backend="triton")[0]
        torch.autograd.grad(out.sum(), leaves)
    made = {aot._key(aot.CompileCase("", "", launch), KNOWN[90]): launch for launch in launched}
    shipped = {aot._key(case, KNOWN[90]) for _, case in aot.cases(KNOWN[90], f"{op}/")}
    assert len(made) >= 4 and not [launch.name for key, launch in made.items() if key not in shipped]
