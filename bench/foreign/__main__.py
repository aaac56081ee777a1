"""Kernels of other projects on the emulator, compared with formulas in torch: the table of ptx_emulator's README.

    python -m foreign FOLDER [COLLECTION ...] [--arch 80 90 100]

pip downloads the releases named in RELEASES into FOLDER, without what they depend on: a missing package is replaced by
a stub, for a kernel needs none. Each collection runs in a process of its own for each architecture.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import copy
import enum
import functools
import importlib
import importlib.abc
import importlib.machinery
import json
import math
import os
import re
import subprocess
import sys
import tarfile
import types
import warnings
import zipfile
from pathlib import Path
from unittest import mock

import pytest
import torch
import triton

import ptx_emulator

RELEASES = {
    "unsloth": "2026.10.9",
    "bitsandbytes": "0.50.2",
    "gemlite": "0.6.0.post2",
    "vllm": "0.33.0",
    "helion": "1.5.1",
}
ARCHES = (80, 90, 100)
#: largest relative error (Frobenius norm) by the type of the result; products of float32 may use TF32
TOLERANCE = {torch.float32: 2e-3, torch.float16: 4e-3, torch.bfloat16: 2e-2}
CASES: dict[str, dict] = collections.defaultdict(dict)


def case(collection: str, name: str):
    """Register a function that yields (result, expected) pairs."""
    return lambda function: CASES[collection].setdefault(name, function)


def fetched(folder: Path, name: str) -> Path:
    """Return the folder of a release's Python files; pip downloads it once."""
    home = folder / f"{name}-{RELEASES[name]}"
    if not home.exists():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder / "archives")]
        subprocess.run([*command, f"{name}=={RELEASES[name]}"], check=True)
        (archive,) = (folder / "archives").glob(f"{name}-{RELEASES[name]}[-.]*")
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as packed:
                packed.extractall(home, [one for one in packed.namelist() if one.endswith(".py")])
        else:
            with tarfile.open(archive) as packed:
                packed.extractall(folder, filter="data")
    return home


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for every module of the packages whose name begins with a prefix, with some attributes given."""

    def __init__(self, prefixes: tuple[str, ...], given: dict[str, dict], real: tuple[str, ...] = ()):
        self.prefixes, self.given, self.real = prefixes, given, real

    def find_spec(self, name, path, target=None):
        if not name.startswith(self.prefixes) or name.startswith(self.real or ("-",)):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = mock.MagicMock(name=spec.name, __path__=[], __spec__=spec, __name__=spec.name)
        for name, value in self.given.get(spec.name, {}).items():
            setattr(module, name, value)
        return module

    def exec_module(self, module):
        pass


def packages(home: Path, *names: str) -> None:
    """Let modules of packages be imported without the packages' own first lines, which look for a GPU."""
    for name in names:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(home / name.replace(".", "/"))]


def version(text) -> tuple[int, ...]:
    return tuple(int(part) for part in str(text).partition("+")[0].split(".") if part.isdigit())


def random(*shape: int, dtype=torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype).requires_grad_(grad)


def with_gradients(function, formula, *inputs):
    """Yield the result of a function with the result of the formula in float64, then each pair of their gradients."""
    got = function(*inputs)
    exact = [one.detach().double().requires_grad_() if one.is_floating_point() else one for one in inputs]
    want = formula(*exact)
    yield got, want
    gradient = torch.randn_like(got)
    wanted = [one for one in exact if one.requires_grad]
    yield from zip(
        torch.autograd.grad(got, [one for one in inputs if one.requires_grad], gradient),
        torch.autograd.grad(want, wanted, gradient.double()),
    )


def attention(q, k, v, *, causal: bool = False, window: int | None = None):
    """Softmax attention in float64 of [rows, heads, D] queries at the end of [keys, groups, D] keys."""
    q, k, v = (one.double().transpose(0, 1) for one in (q, k, v))
    k, v = (one.repeat_interleave(q.shape[0] // k.shape[0], 0) for one in (k, v))
    logits = q @ k.mT / q.shape[-1] ** 0.5
    behind = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
    hidden = (behind < 0) & causal | (behind >= (window or 1 << 30))
    return (logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1)


# Unsloth


def unsloth(home: Path) -> None:
    sys.path.insert(0, str(home))
    packages(home, "unsloth", "unsloth.kernels", "unsloth.kernels.moe")
    sys.modules["unsloth"].DEVICE_TYPE = "cuda"
    sys.meta_path.insert(0, Stubs(("unsloth_zoo",), {"unsloth_zoo.utils": {"Version": version}}))


def kernels(name: str):
    return importlib.import_module(f"unsloth.kernels.{name}")


def rms(x, w, shift=0.0):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (w + shift)


@case("unsloth", "RMS norm")
def _(gemma=False):
    x, w = random(3, 4, 96, dtype=torch.float16, grad=True), random(96, dtype=torch.float16)
    layer = types.SimpleNamespace(weight=w, variance_epsilon=1e-6)
    run = kernels("rms_layernorm").fast_rms_layernorm
    yield from with_gradients(lambda x: run(layer, x, gemma=gemma), lambda x: rms(x, w.double(), float(gemma)), x)


@case("unsloth", "RMS norm of Gemma")
def _():
    yield from CASES["unsloth"]["RMS norm"](gemma=True)


@case("unsloth", "layer norm")
def _():
    layer = torch.nn.LayerNorm(80)
    torch.nn.init.normal_(layer.weight)
    formula = lambda x: torch.nn.functional.layer_norm(x, (80,), layer.weight.double(), layer.bias.double(), 1e-5)  # noqa: E731
    x = random(2, 5, 80, grad=True)
    yield from with_gradients(lambda x: kernels("layernorm").fast_layernorm(layer, x), formula, x)


def gated(activation, name: str, forward: str, backward: str):
    module = kernels(name)
    gate, up, g = (random(2, 3, 160, dtype=torch.float16) for _ in range(3))
    yield getattr(module, forward)(gate, up), activation(gate.double()) * up.double()
    e, u = gate.double().requires_grad_(), up.double().requires_grad_()
    want = activation(e) * u
    de, _ = torch.autograd.grad(want, (e, u), g.double())
    g, gate, up = (one.reshape(6, 160) for one in (g, gate, up))
    down = g.double() * activation(gate.double())
    h, df, dg = getattr(module, backward)(g.clone(), gate.clone(), up.clone())
    yield from ((h, want.reshape(6, 160)), (df, down), (dg, de.reshape(6, 160)))


@case("unsloth", "SwiGLU")
def _():
    yield from gated(torch.nn.functional.silu, "swiglu", "swiglu_fg_kernel", "swiglu_DWf_DW_dfg_kernel")


@case("unsloth", "GEGLU")
def _():
    yield from gated(torch.nn.functional.gelu, "geglu", "geglu_exact_forward_kernel", "geglu_exact_backward_kernel")


@case("unsloth", "GEGLU, approximate")
def _():
    tanh = lambda x: torch.nn.functional.gelu(x, approximate="tanh")  # noqa: E731
    yield from gated(tanh, "geglu", "geglu_approx_forward_kernel", "geglu_approx_backward_kernel")


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


@case("unsloth", "rotary embedding")
def _():
    q, k = random(2, 4, 6, 32, grad=True), random(2, 2, 6, 32, grad=True)
    angle = random(6, 16).repeat(1, 2)
    run = kernels("rope_embedding").fast_rope_embedding
    both = lambda f: lambda q, k: torch.cat([one.flatten() for one in f(q, k)])  # noqa: E731
    formula = lambda q, k: [rotated(one, angle.cos().double(), angle.sin().double()) for one in (q, k)]  # noqa: E731
    yield from with_gradients(both(lambda q, k: run(q, k, angle.cos(), angle.sin())), both(formula), q, k)


def cross_entropy(vocabulary: int, **options):
    labels = torch.randint(vocabulary, (1, 4))
    labels[0, 1] = -100
    cap = options.get("logit_softcapping")
    soft = (lambda x: cap * torch.tanh(x / cap)) if cap else (lambda x: x)
    formula = lambda x: torch.nn.functional.cross_entropy(soft(x)[0], labels[0])  # noqa: E731
    run = kernels("cross_entropy_loss").fast_cross_entropy_loss
    # its backward pass writes over the logits
    yield from with_gradients(lambda x: run(x.clone(), labels, **options), formula, random(1, 4, vocabulary, grad=True))


@case("unsloth", "cross-entropy")
def _():
    yield from cross_entropy(1000)


@case("unsloth", "cross-entropy, capped")
def _():
    yield from cross_entropy(500, logit_softcapping=30.0)


@case("unsloth", "cross-entropy in chunks")
def _():
    yield from cross_entropy(70_000)


@case("unsloth", "FP8 blocks: weights")
def _():
    w, s = random(256, 128).to(torch.float8_e4m3fn), torch.rand(2, 1)
    want = w.double() * s.double().repeat_interleave(128, 0)
    yield kernels("fp8").weight_dequant_block(w, s), want


@case("unsloth", "FP8 blocks: activations")
def _():
    x = random(4, 256)
    got, scale = kernels("fp8").act_quant(x)
    want = x.view(4, 2, 128).abs().amax(-1) / 448
    yield scale, want
    yield got.float(), (x / want.repeat_interleave(128, 1)).to(torch.float8_e4m3fn)


@case("unsloth", "FP8 blocks: product")
def _():
    a, b = random(16, 256).to(torch.float8_e4m3fn), random(128, 256).to(torch.float8_e4m3fn)
    s, t = torch.rand(16, 2), torch.rand(1, 2)
    wide = lambda x, s: x.double() * s.double().repeat_interleave(128, 1)  # noqa: E731
    got = kernels("fp8").w8a8_block_fp8_matmul_triton(a, b, s, t, [128, 128])
    yield got, wide(a, s) @ wide(b, t.expand(128, 2)).mT


@case("unsloth", "NF4")
def _():
    code, w = torch.randn(16).sort().values, torch.randint(256, (32 * 64 // 2,), dtype=torch.uint8)
    absmax = torch.rand(32)
    values = code[torch.stack((w >> 4, w & 15), -1).long()].view(32, 64).double() * absmax[:, None]
    given = (w, absmax, None, None, None, code, 64, 0, (32, 64))
    yield kernels("nf4").dequantize_nf4(*given, torch.float16), values
    x = random(1, 1, 64, dtype=torch.float16)
    yield kernels("nf4_gemv").gemv_nf4(x, *given, torch.float16), x.double() @ values.mT


@case("unsloth", "NVFP4")
def _():
    packed = torch.randint(256, (64, 64), dtype=torch.uint8)
    scale, whole = torch.rand(64, 8).to(torch.float8_e4m3fn), torch.tensor([2.0])
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    codes = torch.stack((packed & 15, packed >> 4), -1).view(64, 128).long()
    values = table[codes & 7] * (1 - 2 * (codes >> 3)) * (scale.double() / 2).repeat_interleave(16, 1)
    module = kernels("nvfp4")
    yield module.nvfp4_dequantize(packed, scale, whole), values
    x, g = random(16, 128, dtype=torch.bfloat16), random(16, 64, dtype=torch.bfloat16)
    yield module._nvfp4_matmul_fwd_fused(x, packed, scale, whole), x.double() @ values.mT
    yield module._nvfp4_matmul_dx_fused(g, packed, scale, whole), g.double() @ values


@case("unsloth", "addition and RMS norm")
def _():
    x, residual, w = random(4, 1, 96), random(4, 1, 96), random(96)
    total = x.double() + residual.double()
    yield kernels("fused_add_rms_layernorm").fast_add_rms_layernorm_inference(x, residual, w, 1e-6), rms(total, w)
    yield residual, total


@case("unsloth", "norm of queries and keys, rotated")
def _():
    q, k = random(2, 5, 4, 32, dtype=torch.float16), random(2, 5, 2, 32, dtype=torch.float16)
    norms = [types.SimpleNamespace(weight=random(32, dtype=torch.float16), variance_epsilon=1e-6) for _ in range(2)]
    angle = random(5, 16).repeat(1, 2)
    got = kernels("qk_norm_rope").fast_qk_norm_rope(*norms, q, k, angle.cos(), angle.sin())
    for one, x, norm in zip(got, (q, k), norms):
        x = rms(x.double(), norm.weight.double()).transpose(1, 2)
        yield one, rotated(x, angle.cos().double(), angle.sin().double())


@case("unsloth", "attention of large heads")
def _():
    module = kernels("large_head_attention")
    q, k, v = (random(1, h, 48, 256, dtype=torch.float16, grad=True) for h in (2, 1, 1))
    lo, hi = module._dense_intervals(1, 48, True, q.device)
    formula = lambda q, k, v: attention(*(x[0].transpose(0, 1) for x in (q, k, v)), causal=True)  # noqa: E731
    yield from with_gradients(lambda q, k, v: module.large_head_attention(q, k, v, lo, hi)[0], formula, q, k, v)


@case("unsloth", "grouped products of experts")
def _():
    x, w, sizes = random(24, 64, dtype=torch.float16), random(3, 32, 64, dtype=torch.float16), torch.tensor([10, 0, 14])
    grouped = kernels("moe.grouped_gemm.interface")
    config = kernels("moe.grouped_gemm.kernels.tuning").KernelConfigForward(
        BLOCK_SIZE_M=16, BLOCK_SIZE_N=32, BLOCK_SIZE_K=32, num_warps=4, num_stages=2, permute_x=False, permute_y=False
    )
    got = grouped.grouped_gemm(x, w, sizes.int(), 1, torch.arange(24), kernel_config_fwd=config)
    yield got, torch.cat([part @ one.mT for part, one in zip(x.double().split(sizes.tolist()), w.double())])


# bitsandbytes


def bitsandbytes(home: Path) -> None:
    sys.path.insert(0, str(home))
    packages(home, "bitsandbytes", "bitsandbytes.backends")
    sys.meta_path.insert(0, Stubs(("bitsandbytes.functional",), {}))


def bnb():
    return importlib.import_module("bitsandbytes.backends.triton.ops")


@case("bitsandbytes", "blocks of 8 bits")
def _():
    x, code = random(3, 256), torch.linspace(-1, 1, 256, device="cuda")
    got, scale = bnb().quantize_blockwise(x, code, 64)
    want = x.view(-1, 64).abs().amax(1)
    yield scale, want
    nearest = ((x.view(-1, 64) / want[:, None])[..., None] - code).abs().argmin(-1)
    yield (got.view(-1, 64).long() - nearest).abs().clamp(min=1).float(), torch.ones(12, 64)  # ties go either way
    yield (
        bnb().dequantize_blockwise(got, scale, code, 64, torch.float32),
        (code[got.long()].view(-1, 64) * want[:, None]).view(3, 256),
    )


@case("bitsandbytes", "NF4 and FP4")
def _():
    x = random(512)
    for kind, gap in (("nf4", 0.16), ("fp4", 0.18)):
        packed, scale = bnb().quantize_4bit(x, 64, kind, torch.uint8)
        yield scale, x.view(-1, 64).abs().amax(1)
        got = bnb().dequantize_4bit(packed, scale, 64, kind, (512,), torch.float32).view(-1, 64)
        beyond = ((got - x.view(-1, 64)).abs() / scale[:, None] > gap).sum()  # half of the widest gap of the code
        yield 1.0 + beyond, torch.ones(())


def optimizer(name: str, second: bool, formula):
    p, g, m, v = random(300), random(300), random(300), random(300).square()
    want = formula(*(one.double() for one in (p, g, m, v)))
    state = (m, v) if second else (m, None)
    given = (None, 0.0, 0.0, 0.9, 0.99, 0.0, 0.0, 1e-8, 0.01, 3, 0.1, 1.0)  # lr 0.1, weight decay 0.01, third step
    bnb().optimizer_update_32bit(name, g, p, *state, *given)
    yield p, want


@case("bitsandbytes", "Adam")
def _():
    def adam(p, g, m, v):
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        scale = (1 - 0.99**3) ** 0.5
        return (p - 0.1 * scale / (1 - 0.9**3) * m / (v.sqrt() + 1e-8 * scale)) * (1 - 0.1 * 0.01)

    yield from optimizer("adam", True, adam)


@case("bitsandbytes", "Lion")
def _():
    yield from optimizer("lion", False, lambda p, g, m, v: p * (1 - 0.1 * 0.01) - 0.1 * (0.9 * m + 0.1 * g).sign())


@case("bitsandbytes", "momentum")
def _():
    yield from optimizer("momentum", False, lambda p, g, m, v: p - 0.1 * (0.9 * m + g + 0.01 * p))


# GemLite


def gemlite(home: Path) -> None:
    sys.path.insert(0, str(home))


def quantized(name: str, limit: float, inputs: int = 512):
    layer = torch.nn.Linear(inputs, 64, bias=False, device="cuda", dtype=torch.float16)
    weights, helper = layer.weight.detach().double(), importlib.import_module("gemlite.helper")
    made = getattr(helper, name)(device="cuda:0", dtype=torch.float16).from_linear(layer, del_orig=False)
    for rows in (1, 4, 64):  # a kernel each
        x = random(rows, inputs, dtype=torch.float16)
        got, want = made(x), x.double() @ weights.mT
        error = (got.double() - want).norm() / want.norm()
        yield 1.0 + (error > limit).float(), torch.ones(())


for _name, _limit in {
    **{"A16W8_INT8": 0.01, "A16W8_FP8": 0.04, "A8W8_INT8_dynamic": 0.02, "A8W8_FP8_dynamic": 0.05},
    **{"A16W8_MXFP": 0.06, "A16W4_MXFP": 0.2, "A16W4_NVFP": 0.2, "A8W8_MXFP_dynamic": 0.06, "A8W4_MXFP_dynamic": 0.2},
    **{"A4W4_MXFP_dynamic": 0.3, "A4W4_NVFP_dynamic": 0.3},
}.items():
    case("gemlite", _name)(functools.partial(quantized, _name, _limit))
case("gemlite", "A16W8_INT8 of 128 inputs")(functools.partial(quantized, "A16W8_INT8", 0.01, 128))


# vLLM


class Platform:
    """Answers of an NVIDIA platform to questions such as is_rocm()."""

    fp8_dtype = staticmethod(lambda: torch.float8_e4m3fn)
    is_cuda = is_cuda_alike = staticmethod(lambda: True)

    def __getattr__(self, name):
        return lambda *_, **__: False


def vllm(home: Path) -> None:
    import triton.language as tl

    names = ("vllm.v1", "vllm.v1.attention", "vllm.v1.attention.ops", "vllm.model_executor", "vllm.utils")
    packages(home, "vllm", *names, "vllm.model_executor.layers", "vllm.model_executor.layers.fused_moe")
    modes = enum.IntEnum("KVQuantMode", "NONE INT8_PER_TOKEN_HEAD FP8_PER_TOKEN_HEAD INT4_PER_TOKEN_HEAD", start=0)
    given = {
        "vllm.platforms": {"current_platform": Platform()},
        "vllm.triton_utils": {"triton": triton, "tl": tl},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": modes, "is_quantized_kv_cache": lambda name: name != "auto"},
        "vllm.model_executor.layers.quantization.utils.quant_utils": {"get_fp8_min_max": lambda: (-448.0, 448.0)},
        "vllm.model_executor.layers.fused_moe.utils": {"resolve_moe_use_td": lambda: False},
    }
    real = ("vllm.v1.attention.ops.", "vllm.model_executor.layers.fused_moe.fused_moe", "vllm.utils.math_utils")
    real += ("vllm.model_executor.layers.fused_moe.moe_fused_mul_sum",)
    sys.meta_path.insert(0, Stubs(("vllm.",), given, real))


def attends(name: str):
    return importlib.import_module(f"vllm.v1.attention.ops.{name}")


def paged(lengths: list[int], heads: int, dim: int, page: int = 16, spare: int = 1):
    """Return (keys, values, table): pages in a random order, and each sequence's own keys and values."""
    most = -(-max(lengths) // page) + spare
    table = torch.randperm(len(lengths) * most, device="cuda").view(len(lengths), most).int()
    k, v = (random(len(lengths) * most, page, heads, dim, dtype=torch.float16) for _ in range(2))
    rows = lambda x, n: x[table[n].long()].flatten(0, 1)[: lengths[n]]  # noqa: E731
    return k, v, table, [(rows(k, n), rows(v, n)) for n in range(len(lengths))]


def unified(new: list[int], window: int, segments: int | None, spare: int = 1):
    lengths, dim = [40, 33], 64
    k, v, table, own = paged(lengths, 2, dim, spare=spare)
    q = random(sum(new), 4, dim, dtype=torch.float16)
    starts = torch.tensor([0, new[0], sum(new)], dtype=torch.int32, device="cuda")
    out = torch.full_like(q, torch.nan)
    buffers = {}
    if segments:
        shape = (len(q), 4, segments)
        buffers = {
            "seq_threshold_3D": 8,
            "num_par_softmax_segments": segments,
            "softmax_segm_output": random(*shape, dim),
        }
        buffers |= {"softmax_segm_max": random(*shape), "softmax_segm_expsum": random(*shape)}
    attends("triton_unified_attention").unified_attention(
        q,
        k,
        v,
        out,
        starts,
        max(new),
        torch.tensor(lengths, device="cuda").int(),
        max(lengths),
        dim**-0.5,
        True,
        (window - 1, 0) if window else (-1, -1),
        table,
        0.0,
        None,
        None,
        None,
        **buffers,
    )
    parts = q.split(new)
    yield out, torch.cat([attention(part, *one, causal=True, window=window or None) for part, one in zip(parts, own)])


@case("vllm", "unified attention")
def _():
    yield from unified([24, 9], 0, None)


@case("vllm", "unified attention, table without a spare column")
def _():
    yield from unified([24, 9], 0, None, spare=0)


@case("vllm", "unified attention, window")
def _():
    yield from unified([24, 9], 12, None)


@case("vllm", "unified attention, split decoding")
def _():
    yield from unified([1, 1], 0, 4)


@case("vllm", "decoding")
def _():
    for heads in (2, 8):  # alone, and grouped
        lengths = [40, 33]
        k, v, table, own = paged(lengths, 2, 64)
        q, out = (
            random(2, heads, 64, dtype=torch.float16),
            torch.empty(2, heads, 64, dtype=torch.float16, device="cuda"),
        )
        parts, lse = random(2, heads, 4, 65), random(2, heads)
        seen = torch.tensor(lengths, device="cuda").int()
        attends("triton_decode_attention").decode_attention_fwd(q, k, v, out, lse, table, seen, parts, 4, 0.125, 16)
        yield out, torch.cat([attention(row[None], *one) for row, one in zip(q, own)])


@case("vllm", "prefill")
def _():
    q, k, v = (random(50, h, 64, dtype=torch.float16) for h in (4, 2, 2))
    out, starts, lengths = (
        torch.empty_like(q),
        torch.tensor([0, 30], device="cuda"),
        torch.tensor([30, 20], device="cuda"),
    )
    attends("triton_prefill_attention").context_attention_fwd(q, k, v, out, starts, lengths, 30)
    split = [one.split([30, 20]) for one in (q, k, v)]
    yield out, torch.cat([attention(*(one[n] for one in split), causal=True) for n in (0, 1)])


@case("vllm", "merged states")
def _():
    a, b, la, lb, out = (
        random(5, 3, 64),
        random(5, 3, 64),
        random(3, 5),
        random(3, 5),
        torch.empty(5, 3, 64, device="cuda"),
    )
    attends("triton_merge_attn_states").merge_attn_states(out, a, la, b, lb)
    share = torch.sigmoid(la.double() - lb.double()).T[..., None]
    yield out, share * a + (1 - share) * b


@case("vllm", "cache")
def _():
    key, value, cache = random(6, 2, 64), random(6, 2, 64), torch.zeros(2, 4, 16, 2, 64, device="cuda")
    slots, one = torch.randperm(64, device="cuda")[:6], torch.ones((), device="cuda")
    attends("triton_reshape_and_cache_flash").triton_reshape_and_cache_flash(
        key, value, *cache, slots, "auto", one, one
    )
    yield from ((got.flatten(0, 1)[slots], want) for got, want in zip(cache, (key, value)))


@case("vllm", "experts")
def _():
    import triton.language as tl

    x, w = random(20, 64, dtype=torch.float16), random(3, 48, 64, dtype=torch.float16)
    chosen, share = torch.rand(20, 3, device="cuda").topk(2).indices, torch.rand(20, 2, device="cuda")
    rows = [(chosen.flatten() == expert).nonzero().flatten() for expert in range(3)]
    pad = lambda r: torch.nn.functional.pad(r, (0, -len(r) % 16), value=40)  # noqa: E731
    order, experts = (
        torch.cat([pad(r) for r in rows]).int(),
        [e for e, r in enumerate(rows) for _ in range(-(-len(r) // 16))],
    )
    out, count = random(20, 2, 48, dtype=torch.float16), torch.tensor([len(order)], device="cuda").int()
    tiles = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 32}
    tiles |= {"GROUP_SIZE_M": 2, "num_warps": 4, "num_stages": 2}
    module = importlib.import_module("vllm.model_executor.layers.fused_moe.fused_moe")
    module.invoke_fused_moe_triton_kernel(
        x,
        w,
        out,
        None,
        None,
        share,
        order,
        torch.tensor(experts, device="cuda").int(),
        count,
        True,
        2,
        tiles,
        tl.float16,
        False,
        False,
        False,
        False,
        False,
    )
    yield out, torch.einsum("tk,tkno,to->tkn", share.double(), w.double()[chosen], x.double())


# Inductor


def inductor(folder: Path) -> None:
    """Let Inductor compile for the emulated GPU, for tensors on the CPU; its choice of a configuration is not timed."""
    import torch._inductor.config as config
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.runtime import hints, triton_helpers, triton_heuristics

    config.compile_threads, config.cpu_backend = 1, "triton"
    config.use_static_cuda_launcher, config.force_disable_caches = False, True
    device = torch.cuda.get_device_properties(0)
    found = hints.DeviceProperties(
        "cuda",
        0,
        device.multi_processor_count,
        10 * device.major + device.minor,
        device.major,
        device.regs_per_multiprocessor,
        2048,
        1024,
        32,
    )
    hints.DeviceProperties.create = lambda *_: found
    triton_helpers.set_driver_to_gpu = triton_helpers.set_driver_to_cpu = lambda: None
    triton_heuristics.CachingAutotuner.bench = lambda *_, **__: 0.0
    for name in ("exchange_device", "maybe_exchange_device", "current_device", "get_raw_stream"):
        setattr(CudaInterface, name, staticmethod(lambda *_: 0))


def compiled(model, *shape: int):
    double = copy.deepcopy(model).double()
    torch.compiler.reset()
    yield from with_gradients(torch.compile(model), double, torch.randn(shape, requires_grad=True))


@case("inductor", "MLP with normalisation")
def _():
    nn = torch.nn
    yield from compiled(
        nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 32), nn.Softmax(-1)), 16, 64
    )


@case("inductor", "convolution with normalisation")
def _():
    nn = torch.nn
    yield from compiled(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(2)), 2, 3, 10, 10)


@case("inductor", "transformer layer")
def _():
    yield from compiled(torch.nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True), 2, 12, 32)


@case("inductor", "scan, sort and index")
def _():
    def function(x):
        order = x.argsort(-1)
        return x.gather(-1, order).cumsum(-1) * x.var(-1, keepdim=True) + x.logsumexp(-1, keepdim=True)

    torch.compiler.reset()
    yield from with_gradients(torch.compile(function), function, torch.randn(6, 40, requires_grad=True))


# Helion: it writes a kernel for each of these programs

HELION = """
import helion, helion.language as hl, torch

@helion.kernel(config=helion.Config(block_sizes=[16, 32]))
def added(x, y):
    out = torch.empty_like(x)
    for tile in hl.tile(out.size()):
        out[tile] = x[tile] + torch.sigmoid(y[tile])
    return out

@helion.kernel(config=helion.Config(block_sizes=[2]))
def softmax(x):
    out = torch.empty_like(x)
    for rows in hl.tile(x.size(0)):
        out[rows, :] = torch.nn.functional.softmax(x[rows, :].to(torch.float32), dim=1).to(x.dtype)
    return out

@helion.kernel(config=helion.Config(block_sizes=[32, 32, 16], num_stages=3))
def product(x, y):
    m, k = x.size()
    out = torch.empty([m, y.size(1)], dtype=x.dtype, device=x.device)
    for rows, columns in hl.tile([m, y.size(1)]):
        total = hl.zeros([rows, columns], dtype=torch.float32)
        for inner in hl.tile(k):
            total = torch.addmm(total, x[rows, inner], y[inner, columns])
        out[rows, columns] = total.to(x.dtype)
    return out

@helion.kernel(config=helion.Config(block_sizes=[4], reduction_loops=[16]))
def norms(x):
    out = torch.empty([x.size(0)], dtype=torch.float32, device=x.device)
    for rows in hl.tile(x.size(0)):
        part = x[rows, :].to(torch.float32)
        out[rows] = torch.sum(part * part, dim=-1)
    return out
"""


def helion(home: Path) -> None:
    sys.path[:0] = [str(home), str(home.parent)]
    sys.meta_path.insert(0, Stubs(("filecheck",), {}))
    (home.parent / "helion_programs.py").write_text(HELION)


def program(name: str, formula, *shapes):
    given = [random(*shape, dtype=torch.float16) for shape in shapes]
    yield getattr(importlib.import_module("helion_programs"), name)(*given), formula(*(one.double() for one in given))


for _name, _formula, *_shapes in (
    ("added", lambda x, y: x + y.sigmoid(), (40, 70), (40, 70)),
    ("softmax", lambda x: x.softmax(1), (5, 100)),
    ("product", lambda x, y: x @ y, (48, 64), (64, 40)),
    ("norms", lambda x: x.square().sum(-1), (9, 50)),
):
    case("helion", _name)(functools.partial(program, _name, _formula, *_shapes))

# Triton's tutorials: each FOLDER/tutorials-VERSION is the folder python/tutorials of a checkout of that version


@functools.cache
def tutorial(number: str):
    """Return the definitions of a tutorial, without the statements that run or time something."""
    (path,) = TUTORIALS.glob(f"{number}-*.py")
    module = sys.modules[path.stem] = types.ModuleType(path.stem)
    module.__file__ = str(path)
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.Try, ast.If)
    for one in ast.parse(path.read_text()).body:
        first = ast.unparse(one).partition("\n")[0]
        if isinstance(one, kinds) and not re.search(
            r"torch\.(rand|zeros|empty)|__main__|TORCH_HAS|^if supports_tma|^\w+ = [a-z_]+\(\w+, ", first
        ):
            with contextlib.suppress(NameError, AttributeError, RuntimeError, ImportError):  # something is missing
                exec(compile(ast.Module([one], []), str(path), "exec", dont_inherit=True), module.__dict__)
    return module


def tutorials(folder: Path) -> None:
    global TUTORIALS
    TUTORIALS = folder
    sys.meta_path.insert(0, Stubs(("triton.profiler",), {}))
    triton.testing.perf_report = lambda *_: lambda function: function
    for number in sorted(path.name[:2] for path in folder.glob("gluon/[0-9]*.py")):
        tests = {name: one for name, one in vars(tutorial(f"gluon/{number}")).items() if name.startswith("test_")}
        CASES["tutorials"] |= {f"Gluon {number} {name[5:]}": functools.partial(smallest, tests[name]) for name in tests}


def smallest(test):
    """Run the smallest case of a tutorial's own test for this architecture, with products of at most 256^3."""
    marks = getattr(test, "pytestmark", [])
    if any(mark.name == "skipif" and mark.args[0] for mark in marks):
        return
    choices = [{"fresh_knobs": triton.knobs} if "fresh_knobs" in test.__code__.co_varnames else {}]
    for names, values in (mark.args[:2] for mark in marks if mark.name == "parametrize"):
        names = re.findall(r"\w+", str(names))
        choices = [c | dict(zip(names, v if len(names) > 1 else (v,))) for c in choices for v in values]
    pairs = []
    with mock.patch.object(torch.testing, "assert_close", lambda got, want, *_, **__: pairs.append((got, want))):
        for choice in sorted(choices, key=lambda one: math.prod(v for v in one.values() if v and type(v) is int)):
            with contextlib.suppress(pytest.skip.Exception):
                test(**{name: min(value, 256) if name in "MNK" else value for name, value in choice.items()})
                break
    yield from pairs


@case("tutorials", "01 vector addition")
def _():
    x, y = random(3000), random(3000)
    yield tutorial("01").add(x, y), x.double() + y


@case("tutorials", "02 softmax")
def _():
    x = random(300, 781)
    yield tutorial("02").softmax(x), x.double().softmax(1)


@case("tutorials", "03 product")
def _():
    a, b = random(200, 96, dtype=torch.float16), random(96, 130, dtype=torch.float16)
    yield tutorial("03").matmul(a, b), a.double() @ b.double()


@case("tutorials", "04 dropout")
def _():
    x, keep = random(1000), (torch.rand(1000, device="cuda") > 0.5).int()
    yield tutorial("04").dropout(x, keep, 0.5), x.double() * keep * 2
    got = tutorial("04").seeded_dropout(x, 0.5, 123)
    yield got, torch.where(got == 0, 0, x.double() * 2)
    yield (
        (got == 0).double().mean(),
        torch.tensor(0.5).double().clamp(*[(got == 0).double().mean().clamp(0.4, 0.6)] * 2),
    )


@case("tutorials", "05 layer norm")
def _():
    x, w, b = random(70, 200, grad=True), random(200, grad=True), random(200, grad=True)
    formula = lambda x, w, b: torch.nn.functional.layer_norm(x, (200,), w, b, 1e-5)  # noqa: E731
    yield from with_gradients(lambda x, w, b: tutorial("05").layer_norm(x, (200,), w, b, 1e-5), formula, x, w, b)


def fused(causal: bool, specialised: bool):
    q, k, v = (random(1, 2, 256, 64, dtype=torch.float16, grad=True) for _ in range(3))
    formula = lambda *x: attention(*(one[0].transpose(0, 1) for one in x), causal=causal).transpose(0, 1)[None]  # noqa: E731
    run = lambda q, k, v: tutorial("06").attention(q, k, v, causal, 0.125, specialised)  # noqa: E731
    yield from with_gradients(run, formula, q, k, v)


@case("tutorials", "06 attention")
def _():
    yield from fused(False, False)


@case("tutorials", "06 attention, causal")
def _():
    yield from fused(True, False)


@case("tutorials", "06 attention, specialised")
def _():
    if torch.cuda.get_device_capability()[0] > 8:
        yield from fused(False, True)


@case("tutorials", "07 asin of libdevice")
def _():
    x, out = torch.rand(3000, device="cuda"), torch.empty(3000, device="cuda")
    tutorial("07").asin_kernel[(3,)](x, out, 3000, BLOCK_SIZE=1024)
    yield out, x.double().asin()


@case("tutorials", "08 grouped products")
def _(name: str = "group_gemm_fn", turn=lambda y: y):
    sizes = ((128, 64, 128), (256, 96, 128))
    a, b = (
        [random(*s, dtype=torch.float16) for s in shapes]
        for shapes in ([(m, k) for m, k, n in sizes], [(k, n) for m, k, n in sizes])
    )
    found = getattr(tutorial("08"), name)(a, [turn(y) for y in b])
    yield from zip(found, (x.double() @ y.double() for x, y in zip(a, b)))


@case("tutorials", "08 grouped products, descriptors")
def _():
    if torch.cuda.get_device_capability()[0] > 8:
        yield from CASES["tutorials"]["08 grouped products"]("group_gemm_tma_fn", lambda y: y.T.contiguous())


def persistent(name: str, specialised: bool | None = None):
    arch = torch.cuda.get_device_capability()[0]  # for others the tutorial does not call it
    others = specialised is not None and (arch < 9 or (arch == 9 and specialised and "descriptor" not in name))
    if others or ("clc" in name and (arch < 10 or not hasattr(tutorial("09"), name))):
        return
    a, b = random(256, 128, dtype=torch.float16), random(256, 128, dtype=torch.float16)
    options = () if specialised is None else (specialised,)
    yield getattr(tutorial("09"), name)(a, b.T if specialised is None else b, *options), a.double() @ b.double().T


for _name in ("matmul", "matmul_persistent"):
    case("tutorials", f"09 {_name}")(functools.partial(persistent, _name))
for _name in ("matmul_tma", "matmul_tma_persistent", "matmul_descriptor_persistent", "matmul_tma_clc"):
    for _specialised in (False, True):
        _title = f"09 {_name}{', specialised' * _specialised}"
        case("tutorials", _title)(functools.partial(persistent, _name, _specialised))


def scaled(kind: str):
    if torch.cuda.get_device_capability()[0] == 10:
        given = tutorial("10").initialize_block_scaled(128, 256, 256, kind, True)
        yield tutorial("10").block_scaled_matmul(*given[:4], torch.float16, 128, 256, 256, *given[4:8]), given[8]


for _name in ("mxfp8", "mixed", "mxfp4", "nvfp4"):
    case("tutorials", f"10 scaled product, {_name}")(functools.partial(scaled, _name))


@case("tutorials", "11 dependent launch")
def _():
    x, y = random(3000), random(3000)
    yield tutorial("11").add(x, y, torch.cuda.get_device_capability()[0] > 8), x.double() + y


def judged(function) -> tuple[str, str]:
    """Return ("right" | "wrong" | "finding" | "refused" | "failed", the reason)."""
    torch.manual_seed(0)
    try:
        for number, (got, want) in enumerate(function()):
            error = (got.double() - want.double()).norm() / want.double().norm()
            if got.shape != want.shape or not error <= TOLERANCE.get(got.dtype, 0):
                return "wrong", f"result {number}: relative error {error:.2g}, {tuple(got.shape)} {tuple(want.shape)}"
    except ptx_emulator.PtxError as error:
        return "refused", str(error).splitlines()[0]
    except ptx_emulator.EmulationError as error:
        return "finding", " ".join(str(error).splitlines()[:2])
    except triton.CompilationError as error:
        return "refused", f"by Triton: {str(error.__cause__ or error).splitlines()[-1]}"
    except Exception as error:  # of their code: whatever it is goes into the table
        return "failed", f"{type(error).__name__}: {str(error).splitlines()[:1]}"
    return "right", ""


def one_process(folder: Path, name: str, arch: int, only: str | None) -> None:
    """Run a collection's kernels and print one line of JSON for each."""
    with ptx_emulator.gpu(arch, cuda=name not in ("inductor",)) as log:
        warnings.simplefilter("ignore")
        if name != "inductor":
            torch.set_default_device("cuda")
        kind = name.partition("-")[0]
        globals()[kind](fetched(folder, name) if name in RELEASES else folder / name if kind == "tutorials" else folder)
        for title, function in CASES[kind].items():
            if only and only not in title:
                continue
            log.launches.clear()
            verdict, reason = judged(function)
            kernels = sorted({launch.name for launch in log.launches if launch.finished})
            if verdict == "right" and not kernels:
                continue  # not for this architecture
            print(json.dumps([title, verdict, reason, kernels, arch]), flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="keep the releases in this folder")
    parser.add_argument("collections", nargs="*", metavar="COLLECTION", help=f"run these only: {', '.join(CASES)}")
    parser.add_argument("--arch", type=int, nargs="+", default=ARCHES, help="compile for these architectures")
    parser.add_argument("--only", help="run the kernels whose name contains this")
    parser.add_argument("--here", action="store_true", help="run in this process and print JSON")
    given = parser.parse_args(argv)
    if given.here:
        one_process(given.folder, given.collections[0], given.arch[0], given.only)
        return 0
    head = ("release", "kernels", "calls that are right", "findings", "refused", "failed before the emulator")
    versions = sorted(path.name for path in given.folder.glob("tutorials-*"))  # they are in no release
    table = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    for name in given.collections or [*(one for one in CASES if one != "tutorials"), *versions]:
        if name in RELEASES:
            fetched(given.folder, name)
        verdicts: dict[str, dict[str, str]] = collections.defaultdict(dict)
        executed: set[str] = set()
        for arch in given.arch:
            command = [sys.executable, "-m", "foreign", str(given.folder), name, "--here"]
            command += ["--arch", str(arch), *(["--only", given.only] if given.only else [])]
            environ = os.environ | {"TORCHDYNAMO_DISABLE": str(int(name not in ("inductor", "helion")))}
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environ)
            for line in done.stdout.splitlines():
                title, verdict, reason, kernels, _ = json.loads(line)
                verdicts[title][arch] = verdict
                executed |= set(kernels)
                if verdict != "right":
                    print(f"{name}, {title}, sm_{arch}: {verdict}: {reason}", file=sys.stderr)
            if done.returncode:
                print(f"{name}, sm_{arch}: exit code {done.returncode}", file=sys.stderr)
        counts = collections.Counter(one for row in verdicts.values() for one in row.values())
        table.append(
            f"| {name} {RELEASES.get(name, '')} | {len(executed)} | {counts['right']} of {counts.total()} "
            f"| {counts['finding'] + counts['wrong']} | {counts['refused']} | {counts['failed']} |"
        )
    print("\n".join(table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
