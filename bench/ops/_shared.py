"""Shared parts of the harness's ops: words of their cases, work of an attention, pieces of the baselines.

Importing it takes no torch: `list` and `--help` read every op.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..registry import DTYPES, Contender, Later, Lazy, Work

if TYPE_CHECKING:
    from torch import Tensor

torch = Lazy("torch")

CPU, CUDA, BOTH = ("cpu",), ("cuda",), ("cpu", "cuda")
FORWARD, DECODE = ("fwd",), ("decode",)
BIASES = ("rel_key", "rel_query", "content_bias", "position_bias")
TRANSFORMER_XL = ("rel_key", "content_bias", "position_bias")
#: retrieval scores are wanted in the type of the stored embeddings: float32 on CPUs, all three on GPUs
EMBEDDINGS = {"cpu": ("float32",), "cuda": DTYPES["cuda"]}
#: ops whose kernels are for one type
FLOAT32 = {"cpu": ("float32",), "cuda": ("float32",)}
RETRO, RPT = "arXiv 2112.04426", "arXiv 2306.13421"
MOSAICS = "arXiv 2405.06394"

BIAS_SCALE = 0.5  # so that no logit dominates
SHARE = 0.9  # of a mask that is True
LSE_BYTES = 4  # float32
CONTENT_BACKWARD = 2.5  # recomputed logits, dP, dV, dQ, dK for logits and output
POSITION_BACKWARD = 3.0  # recomputed logits, d(query), d(rel_key)


def gpu(memory_gib: int) -> dict[str, Any]:
    """Fields of a case for GPUs alone that needs so much memory."""
    return {"devices": CUDA, "memory_gib": memory_gib}


def public(name: str, **fixed) -> Later:
    """An op of `retro_kernels` with some arguments given."""
    return Later(f"retro_kernels:{name}", tuple(fixed.items()))


def attention(name: str) -> Callable[..., tuple]:
    """`call` of an operator that returns its output and the log-sum-exp."""
    return lambda arguments, backend: public(name, return_lse=True, backend=backend)(**arguments)


def single(name: str) -> Callable[..., tuple]:
    """`call` of an operator with one output."""
    return lambda arguments, backend: (public(name, backend=backend)(**arguments),)


def position_arguments(case, rel: str, rows: int | None = None, start: int | None = None) -> dict[str, Any]:
    """Position logits and biases that `case.extras` names; `rows` of the table from displacement `start`."""
    width = case.shape.get("E", case.shape["D"]) if "rel_query" in case.extras else None
    kwargs = {"E": width, "biases": tuple(name for name in BIASES if name in case.extras), "bias_scale": BIAS_SCALE}
    return kwargs | ({"rel": rel, "T": rows, "rel_start": start} if "rel_key" in case.extras else {"rel": None})


def attention_work(
    mode: str, content: float, position: float, query: float, memory: float, table: float, lse: float
) -> Work:
    """Work of an attention from its forward FLOPs, on content and on positions, and its tensors' bytes.

    memory: bytes of the keys; the values have as many.
    """
    forward = Work(content + position, 2 * query + 2 * memory + table)
    if mode != "fwdbwd":
        return forward
    # reads q, k, v, rel_key, out, d(out), lse; writes the gradients of the first four
    moved = 4 * query + 4 * memory + 2 * table + lse
    return forward + Work(CONTENT_BACKWARD * content + POSITION_BACKWARD * position, moved + lse)


def cut(arguments: dict[str, Any], names: tuple[str, ...], first: int, last: int) -> dict[str, Any]:
    """Queries first .. last-1 of the tensors `names`."""
    return arguments | {name: arguments[name][:, first:last] for name in names if arguments.get(name) is not None}


def no_mask(name: str) -> Callable[..., str | None]:
    """`reason` of a FlexAttention baseline without the mask `name`."""
    return lambda case, dtype, device: f"this FlexAttention baseline has no {name}" if name in case.extras else None


def compiled(op: str, eager: Callable[..., Any], **more) -> Contender:
    """`eager` under `torch.compile`. On request only: a case takes tens of seconds to compile, all of them hours."""
    return Contender(op, "eager_compiled", CompiledTwin(eager), default_on=(), **more)


def hidden(dtype) -> float:
    """A logit that softmax turns into 0. It is finite, so a row that sees no key holds no NaN."""
    return -6e4 if dtype == torch.float16 else -1e30


def full_table(rel_key: Tensor, rel_start: int | None, lowest: int, rows: int) -> Tensor:
    """The table cut or zero-padded to displacements lowest .. lowest+rows-1: [H or 1, rows, E]."""
    before = (lowest if rel_start is None else rel_start) - lowest
    return torch.nn.functional.pad(rel_key, (0, 0, before, rows - before - rel_key.shape[1]))


def skewed(band: Tensor, keys: int) -> Tensor:
    """band [..., n, n+keys-1], column n-1-i+j for the pair (i, j) ->
    [..., n, keys]: Transformer-XL's shift by reshaping.
    """
    n, width = band.shape[-2:]
    if n == 1:
        return band  # one query: its columns are its keys, and there is nothing to shift
    flat = band.flatten(-2)[..., n - 1 :]
    return flat[..., : n * (width - 1)].unflatten(-1, (n, width - 1))[..., :keys]


def position_bias(rel_query: Tensor, rel_key: Tensor, keys: int, lowest: int, rel_start: int | None) -> Tensor:
    """rel_query [..., n, H, E] against every displacement i-j+const ->
    [..., H, n, keys]; pair (i, j) has displacement lowest+keys-1+i-j.
    """
    n, h = rel_query.shape[-3:-1]
    table = full_table(rel_key, rel_start, lowest, n + keys - 1).flip(1).expand(h, -1, -1)
    return skewed(torch.einsum("...nhe,hte->...hnt", rel_query, table), keys)


def repeat_groups(tensor: Tensor, heads: int) -> Tensor:
    """[..., G, D] -> [..., H, D]."""
    groups = tensor.shape[-2]
    return tensor if groups == heads else tensor.repeat_interleave(heads // groups, dim=-2)


def attend(logits: Tensor, visible: Tensor | None, value: Tensor, equation: str) -> Tensor:
    """Softmax over the visible keys in the tensors' own type; a row that sees nothing gives 0."""
    if visible is None:
        return torch.einsum(equation, logits.softmax(-1), value)
    probabilities = logits.masked_fill(~visible, hidden(logits.dtype)).softmax(-1)
    return torch.einsum(equation, probabilities * visible.any(-1, keepdim=True), value)


class CompiledTwin:
    """The same function under `torch.compile`: compiled at its first call, and again for every new shape; the runner
    resets the compiler between cases.
    """

    def __init__(self, function):
        self.function = function

    @functools.cached_property
    def compiled(self):
        return torch.compile(self.function, dynamic=False)

    def __call__(self, **arguments):
        return self.compiled(**arguments)


@functools.cache
def flex_attention():
    """FlexAttention, compiled (uncompiled it materialises the scores)."""
    from torch.nn.attention import flex_attention as flex

    return torch.compile(flex.flex_attention, dynamic=False)


def attention_baselines(op: str, functions: tuple, score_bytes: Callable, mask: str) -> tuple[Contender, ...]:
    """Baselines of an attention: eager, compiled, torch's own with and without a bias, and FlexAttention."""
    eager, sdpa_bias, sdpa_plain, flex = functions
    return (
        Contender(op, "eager", eager, peak_bytes=score_bytes),
        compiled(op, eager, peak_bytes=score_bytes),
        Contender(op, "sdpa_bias", sdpa_bias, peak_bytes=score_bytes),
        Contender(op, "sdpa_plain", sdpa_plain, without_positions=True),
        Contender(op, "flex", flex, devices=("cuda",), reason=no_mask(mask)),
    )
