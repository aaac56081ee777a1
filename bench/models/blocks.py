"""Blocks of whole models as operators of the harness: a Memory Mosaic's, and a transformer's of equal size with the
same attention.

    python -m bench run --plugin bench.models.blocks --kernel mosaics_block,transformer_block --baselines all

A block's forward and backward pass is what a training step repeats; embedding, readout and optimiser are the same for
both.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from retro_model.apps.mosaics.transformer import TransformerBlock, TransformerConfig
from retro_model.memory_mosaics import MosaicsConfig
from retro_model.memory_mosaics.memory import DECAY_MAX, LOG_KEY_SCALE_MAX, RATE
from retro_model.memory_mosaics.model import NORM_EPS, Block

from ..registry import Case, Contender, Operator, Work, register

MOSAICS, TRANSFORMER = "mosaics_block", "transformer_block"
BACKENDS = ("cpu", "triton", "reference")
HEAD_DIM = 64  # of every case here
SCALARS = {
    "stored_decay": (0.05, 0.5),
    "stored_key_scale": (0.05, 0.15),
    "stored_value_scale": (-0.1, 0.0),
    "value_now": (0.0, 1.0),
}
BACKWARD = 2.0  # products of a linear map's backward for the one of its forward
ATTENTION_BACKWARD = 2.5  # as in ops/_shared.py


@cache
def block(kernel: str, d_model: int, heads: int, backend: str | None):
    """The module without memory of its own."""
    with torch.device("meta"):
        if kernel == TRANSFORMER:
            return TransformerBlock(TransformerConfig(1, d_model, heads, 1), backend=backend)
        return Block(MosaicsConfig(1, d_model, heads, 1, persistent_slots=7 * d_model // 2), backend=backend)


def build(case: Case, draw) -> dict[str, Any]:
    """x [B,N,d], the number of heads, and every parameter by name."""
    b, n, h, d = (case.shape[letter] for letter in "BNHD")
    inputs = {"x": draw.normal(b, n, h * d)}
    for name, parameter in block(case.kernel, h * d, h, None).named_parameters():
        ends = SCALARS.get(name.rpartition(".")[2], (0.5, 1.5) if parameter.dim() == 1 else None)
        inputs[name] = (
            draw.uniform(*parameter.shape, low=ends[0], high=ends[1])
            if ends
            else draw.normal(*parameter.shape, scale=parameter.shape[-1] ** -0.5)
        )
    return inputs


def run(kernel: str, backend: str | None):
    """The block on `backend`, as the harness calls it."""

    def call(x: Tensor, **parameters: Tensor) -> Tensor:
        return functional_call(block(kernel, x.shape[-1], x.shape[-1] // HEAD_DIM, backend), parameters, (x,))

    return call


def by_matrices(x: Tensor, **p: Tensor) -> Tensor:
    """The authors' way: leaky averages as products with a [T,T] matrix, twice a block; attention matrices in memory."""
    n, h = x.shape[1], len(p["context.stored_decay"])
    norm = lambda y, name: F.layer_norm(y, y.shape[-1:], p[f"{name}.weight"], None, NORM_EPS)  # noqa: E731
    heads = lambda y, name: F.linear(y, p[f"{name}.weight"]).unflatten(-1, (h, -1)).transpose(1, 2)  # noqa: E731 - [B,h,N,hd]
    scalar = lambda name: p[name].view(h, 1, 1)  # noqa: E731

    def keys(y: Tensor, name: str, power: int) -> Tensor:
        decay = torch.exp(-(RATE * scalar(f"{name}.stored_decay")).abs()).clamp(max=DECAY_MAX)
        steps = torch.arange(n, device=x.device)
        matrix = decay.pow((steps[:, None] - steps).clamp_min(0).to(decay.dtype)).tril()  # [h,T,T]
        scale = torch.exp((RATE * scalar(f"{name}.stored_key_scale")).clamp(max=LOG_KEY_SCALE_MAX)) ** power
        return scale * F.normalize(matrix @ heads(y, f"{name}.key"), dim=-1)

    y = norm(x, "context_norm")
    key, value, c = keys(y, "context", 1), heads(y, "context.value"), scalar("context.value_now")
    value = F.normalize(c * value[:, :, :-1] + (1 - c) * value[:, :, 1:], dim=-1) * torch.exp(
        RATE * scalar("context.stored_value_scale")
    )
    logits = key[:, :, 1:] @ key[:, :, :-1].mT  # the first token has nothing to read
    hidden = torch.ones(n - 1, n - 1, dtype=torch.bool, device=x.device).triu(1)
    read = F.pad(logits.masked_fill(hidden, -math.inf).softmax(-1) @ value, (0, 0, 1, 0))
    x = x + F.linear(read.transpose(1, 2).flatten(-2), p["context.output.weight"])
    y = norm(x, "persistent_norm")
    weights = (keys(y, "persistent", 2) @ p["persistent.keys"].mT).softmax(-1)
    read = weights @ p["persistent.values"] * torch.exp(RATE * scalar("persistent.stored_value_scale"))
    return x + F.linear(read.transpose(1, 2).flatten(-2), p["persistent.output.weight"])


def work(case: Case, itemsize: int, mode: str) -> Work:
    """Products of the linear maps and of the reads; parameters and activations once each way."""
    b, n, h, d = (case.shape[letter] for letter in "BNHD")
    width, tokens = h * d, b * n
    persistent = 4.0 * tokens * (7 * width // 2) * width if case.kernel == MOSAICS else 0.0
    linear = 2.0 * tokens * width * width * (5 if case.kernel == MOSAICS else 12)
    reads = 4.0 * b * n * (n + 1) / 2 * width + persistent
    moved = (12.0 * width * width + 2 * tokens * width) * itemsize
    if mode == "fwdbwd":
        return Work(linear * (1 + BACKWARD) + reads * (1 + ATTENTION_BACKWARD), 3 * moved)
    return Work(linear + reads, moved)


def add() -> None:
    """Register the operators, their cases and contenders."""
    for kernel in (MOSAICS, TRANSFORMER):
        names = tuple(name for name, _ in block(kernel, HEAD_DIM, 1, None).named_parameters())
        register(
            Operator(
                kernel,
                ("y",),
                ("x", *names),
                build,
                lambda inputs, backend, k=kernel: (run(k, backend)(**inputs),),
                work,
            )
        )
        for backend in BACKENDS:
            role = "reference" if backend == "reference" else "kernel"
            register(Contender(kernel, backend, run(kernel, backend), role=role, reason=_unavailable(backend)))
        source = (
            "arXiv 2405.06394, section 5: a block of the small preset"
            if kernel == MOSAICS
            else "a GPT2-small block of equal size, rotary"
        )
        register(Case(kernel, "small", {"B": 2, "N": 512, "H": 12, "D": HEAD_DIM}, source, modes=("fwdbwd",)))
        register(Case(kernel, "tiny", {"B": 2, "N": 24, "H": 2, "D": HEAD_DIM}, source, modes=("fwdbwd",), devices=()))
    register(Contender(MOSAICS, "by_matrices", by_matrices))


def _unavailable(backend: str):
    def reason(case, dtype: str, device: str) -> str | None:
        from retro_kernels import backends

        status = backends()["relative_attention"][backend]
        return None if status else status.reason

    return reason


add()
