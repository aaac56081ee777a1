"""Bound of a model's training step on a CPU: its products, and the bytes that all else must move.

Everything but products and the package's kernels reads and writes memory once at least: norms, activations, residual
sums, the loss's softmax, the optimiser. Counted are the floats of a step in float32 where each of these is one pass,
none of them found in a cache; at the machine's bandwidth they take the least that a step can add to products and
kernels.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn

import retro_kernels as rk
from retro_model import training
from retro_model.layers import FeedForward

FLOAT = 4  # bytes
#: floats a parameter: AdamW reads weight, gradient and two moments and writes all but the gradient
ADAMW = 7
#: floats a parameter: the norm reads a gradient, clipping reads and writes it
CLIPPING = 3
#: floats an element of a norm: x and y, then x, dy and dx
NORM = 5
#: floats an element of a GELU, as a norm's; of silu(a) * b: a, b and y, then a, b, dy, da and db
GELU, SWIGLU = 5, 8
#: floats an element of a residual update: two terms and their sum, and so for the gradient
RESIDUAL = 6
#: floats a logit: read once, and written as its gradient
LOGIT = 2

Product = tuple[int, int, int, bool]  # rows, columns read, columns made; whether the input has a gradient


def products(model: nn.Module, batch: training.Batch) -> Counter[Product]:
    """The linear maps of a step, the readout among them, and how many there are of each."""
    found: Counter[Product] = Counter()

    def count(module: nn.Linear, inputs: tuple[Tensor], out: Tensor):
        rows = out.numel() // module.out_features
        found[rows, module.in_features, module.out_features, inputs[0].requires_grad] += 1

    _forward(model, batch, {m: count for m in model.modules() if isinstance(m, nn.Linear)})
    vocabulary, width = _embedding(model).weight.shape
    # the readout is multiplied inside the loss and never called as a module
    found[batch.tokens.numel(), width, vocabulary, True] += 1
    return found


def flops(found: Counter[Product]) -> int:
    """Operations of linear maps forward, and of a product for each gradient."""
    return sum(2 * rows * read * made * (2 + asks) * times for (rows, read, made, asks), times in found.items())


def seconds_alone(found: Counter[Product], repeats: int = 5) -> float:
    """Time the products, each shape by itself: the least of some calls."""
    total = 0.0
    for (rows, read, made, asks), times in found.items():
        x, weight, grad = torch.randn(rows, read), torch.randn(made, read), torch.randn(rows, made)
        calls = [lambda x=x, w=weight: rk.linear(x, w), lambda x=x, g=grad: rk.linear(g.T, x.T)]
        if asks:
            calls.append(lambda w=weight, g=grad: rk.linear(g, w.T))
        total += times * sum(_least(call, repeats) for call in calls)
    return total


def moved_bytes(model: nn.Module, batch: training.Batch) -> dict[str, int]:
    """Bytes that a step in float32 must read and write outside its products and kernels, by what moves them."""
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    tables = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding))
    floats = Counter(
        {
            "AdamW": ADAMW * parameters,
            "clipping": CLIPPING * parameters,
            "gradients of embeddings": tables,
            "loss": LOGIT * batch.tokens.numel() * len(_embedding(model).weight),
        }
    )

    def adds(part: str, each: int) -> Callable:
        return lambda module, inputs, out: floats.update({part: each * out.numel()})

    hooks: dict[nn.Module, Callable] = {}
    for module in model.modules():
        if isinstance(module, (nn.RMSNorm, nn.LayerNorm)):
            hooks[module] = adds("norms", NORM)
        if isinstance(module, FeedForward):
            hooks[module.inner] = adds("activations", GELU if module.gate is None else SWIGLU)
        if isinstance(getattr(module, "output", None), nn.Linear):
            hooks[module.output] = adds("residual sums", RESIDUAL)
    _forward(model, batch, hooks)
    return {part: FLOAT * count for part, count in floats.items()}


def _forward(model: nn.Module, batch: training.Batch, hooks: dict[nn.Module, Callable]) -> None:
    handles = [module.register_forward_hook(hook) for module, hook in hooks.items()]
    training.batch_loss(model, batch)
    for handle in handles:
        handle.remove()


def _embedding(model: nn.Module) -> nn.Embedding:
    return next(m for m in model.modules() if isinstance(m, nn.Embedding))


def _least(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return min(times[1:])
