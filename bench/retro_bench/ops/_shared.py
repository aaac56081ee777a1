"""Parts that the harness's ops share: constants of cases, the work of an attention, functions of baselines.

Importing it loads no torch, because `list` and `--help` read every op.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..registry import DTYPES, Case, Contender, Later, Lazy, Work

if TYPE_CHECKING:
    from torch import Tensor

torch, inputs = Lazy("torch"), Lazy("retro_kernels.testing.inputs")

CPU, CUDA = ("cpu",), ("cuda",)
FORWARD, DECODE = ("fwd",), ("decode",)
BIASES = ("rel_key", "rel_query", "content_bias", "position_bias")
TRANSFORMER_XL = ("rel_key", "content_bias", "position_bias")
#: types in which retrieval scores stored embeddings
EMBEDDINGS = {"cpu": ("float32",), "cuda": DTYPES["cuda"]}
#: fields of a case of a kernel that serves only float32 on CPUs
FLOAT32_ON_CPU = {"dtypes": {"cpu": ("float32",), "cuda": ("float32",)}, "devices": CPU}
RETRO, RPT = "arXiv 2112.04426", "arXiv 2306.13421"
MOSAICS = "arXiv 2405.06394"

BIAS_SCALE = 0.5  # so that no logit dominates
SHARE = 0.9  # share of True entries in a mask
LSE_BYTES = 4  # float32
CONTENT_BACKWARD = 2.5  # recomputed logits, dP, dV, dQ, dK for logits and output
POSITION_BACKWARD = 3.0  # recomputed logits, d(query), d(rel_key)


def letters(text: str) -> dict[str, int]:
    """Parse the sizes of a shape.

    >>> letters("B=1 S=100_000")
    {'B': 1, 'S': 100000}
    """
    return {name: int(size) for name, size in (word.split("=") for word in text.split())}


def product(case: Case, letters: str) -> int:
    """Multiply sizes of a case's shape."""
    return math.prod(case.shape[letter] for letter in letters)


def case(op: str, name: str, source: str, shape: str | dict[str, int], *, gpu: int | None = None, **more) -> Case:
    """Make a case. gpu: GiB of memory that it needs on a GPU; CPUs leave it out by default."""
    if gpu is not None:
        more |= {"devices": CUDA, "memory_gib": gpu}
    return Case(op, name, letters(shape) if isinstance(shape, str) else shape, source, **more)


def public(name: str, **fixed) -> Later:
    """Return an op of `retro_kernels` with some arguments fixed."""
    return Later(f"retro_kernels:{name}", tuple(fixed.items()))


def outputs(name: str, **fixed) -> Callable[..., tuple]:
    """Return `call` of an operator."""

    def call(arguments: dict[str, Any], backend: str) -> tuple:
        outs = public(name, backend=backend, **fixed)(**arguments)
        return outs if isinstance(outs, tuple) else (outs,)

    return call


def drawn(builder: str, letters: str) -> Callable[..., dict[str, Any]]:
    """Return `build` of an operator: a builder of `retro_kernels.testing.inputs` draws the letters of a case."""
    return lambda case, draw: (
        getattr(inputs, builder)(**{x: case.shape[x] for x in letters}, draw=draw) | dict(case.options)
    )


def position_arguments(case, rel: str, rows: int | None = None, start: int | None = None) -> dict[str, Any]:
    """Return the options of the position logits and biases in `case.extras`, with `rows` of the table from `start`."""
    width = case.shape.get("E", case.shape["D"]) if "rel_query" in case.extras else None
    kwargs = {"E": width, "biases": tuple(name for name in BIASES if name in case.extras), "bias_scale": BIAS_SCALE}
    return kwargs | ({"rel": rel, "T": rows, "rel_start": start} if "rel_key" in case.extras else {"rel": None})


def attention_work(mode: str, content: float, position: float, query: int, memory: int, table: int, lse: int) -> Work:
    """Return the work of an attention from its forward FLOPs and its tensors' bytes. `memory`: of the keys alone."""
    forward = Work(content + position, 2 * query + 2 * memory + table)
    if mode != "fwdbwd":
        return forward
    # reads q, k, v, rel_key, out, d(out), lse; writes the gradients of the first four
    moved = 4 * query + 4 * memory + 2 * table + lse
    return forward + Work(CONTENT_BACKWARD * content + POSITION_BACKWARD * position, moved + lse)


def cut(arguments: dict[str, Any], names: tuple[str, ...], first: int, last: int) -> dict[str, Any]:
    """Cut the tensors `names` to queries first .. last-1."""
    return arguments | {name: arguments[name][:, first:last] for name in names if arguments.get(name) is not None}


def compiled(op: str, eager: Callable[..., Any], **more) -> Contender:
    """Return `eager` under `torch.compile`, on request only: each case takes tens of seconds to compile."""

    @functools.cache
    def compiler():
        return torch.compile(eager, dynamic=False)

    return Contender(op, "eager_compiled", lambda **arguments: compiler()(**arguments), default_on=(), **more)


def hidden(dtype) -> float:
    """Return a logit that softmax turns into 0. It is finite, so that a row without a visible key holds no NaN."""
    return -6e4 if dtype == torch.float16 else -1e30


def skewed(band: Tensor, keys: int) -> Tensor:
    """Skew a band [..., n, n+keys-1] of pairs (i, j) in column n-1-i+j to [..., n, keys], as Transformer-XL does."""
    n, width = band.shape[-2:]
    if n == 1:
        return band  # the columns of a single query are its keys
    flat = band.flatten(-2)[..., n - 1 :]
    return flat[..., : n * (width - 1)].unflatten(-1, (n, width - 1))[..., :keys]


@dataclasses.dataclass
class Attention:
    """Arguments of both attentions that the baselines serve, and the tensors that they materialise from them."""

    query: Tensor
    key: Tensor
    value: Tensor
    rel_key: Tensor | None = None
    rel_query: Tensor | None = None
    rel_start: int | None = None
    content_bias: Tensor | None = None
    position_bias: Tensor | None = None
    scale: float | None = None

    @property
    def factor(self) -> float:
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def content(self) -> Tensor:
        """Query of the content logits, with its bias."""
        return self.query if self.content_bias is None else self.query + self.content_bias

    @property
    def position(self) -> Tensor:
        """Query of the position logits, with its bias."""
        rel_query = self.query if self.rel_query is None else self.rel_query
        return rel_query if self.position_bias is None else rel_query + self.position_bias


def position_bias(rel_query: Tensor, rel_key: Tensor, keys: int, lowest: int, rel_start: int | None) -> Tensor:
    """Return the position logits [..., H, n, keys] of rel_query [..., n, H, E]. The displacement of the pair (i, j) is
    lowest+keys-1+i-j; the table is cut or zero-padded to those that occur.
    """
    n, h = rel_query.shape[-3:-1]
    before = 0 if rel_start is None else rel_start - lowest
    table = torch.nn.functional.pad(rel_key, (0, 0, before, n + keys - 1 - before - rel_key.shape[1]))
    return skewed(torch.einsum("...nhe,hte->...hnt", rel_query, table.flip(1).expand(h, -1, -1)), keys)


def repeat_groups(tensor: Tensor, heads: int) -> Tensor:
    """Repeat the heads of groups, [..., G, D], to [..., H, D]."""
    groups = tensor.shape[-2]
    return tensor if groups == heads else tensor.repeat_interleave(heads // groups, dim=-2)


def attend(logits: Tensor, visible: Tensor | None, value: Tensor, equation: str) -> Tensor:
    """Attend the visible keys, with the softmax in the tensors' own type. A row without a visible key is 0."""
    if visible is None:
        return torch.einsum(equation, logits.softmax(-1), value)
    probabilities = logits.masked_fill(~visible, hidden(logits.dtype)).softmax(-1)
    return torch.einsum(equation, probabilities * visible.any(-1, keepdim=True), value)


@functools.cache
def flex_attention():
    """Return FlexAttention, compiled: uncompiled it materialises the scores."""
    from torch.nn.attention import flex_attention as flex

    return torch.compile(flex.flex_attention, dynamic=False)


def attention_baselines(op: str, functions: tuple, score_bytes: Callable, mask: str) -> tuple[Contender, ...]:
    """Return the baselines of an attention: eager, compiled, torch's SDPA with a bias, FlexAttention."""
    eager, sdpa_bias, flex = functions

    def no_mask(case, dtype, device) -> str | None:
        return f"this FlexAttention baseline has no {mask}" if mask in case.extras else None

    return (
        Contender(op, "eager", eager, peak_bytes=score_bytes),
        compiled(op, eager, peak_bytes=score_bytes),
        Contender(op, "sdpa_bias", sdpa_bias, peak_bytes=score_bytes),
        Contender(op, "flex", flex, devices=("cuda",), reason=no_mask),
    )
