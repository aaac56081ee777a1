"""The five operators of `retro_kernels`, as the harness sees them, and their backends as contenders."""

from __future__ import annotations

import importlib
import os
from typing import Any

from . import work
from .registry import Contender, Later, Operator

BACKENDS = ("cuda", "triton", "cpu", "reference")
POSITIONS = ("rel_key", "rel_query", "rel_start", "content_bias", "position_bias")


def _public(name: str, **fixed) -> Later:
    return Later(f"retro_kernels:{name}", tuple(fixed.items()))


def _attention(name: str):
    return lambda arguments, backend: _public(name, return_lse=True, backend=backend)(**arguments)


def _single(name: str):
    return lambda arguments, backend: (_public(name, backend=backend)(**arguments),)


def _topk(arguments: dict[str, Any], backend: str | None) -> tuple:
    return _public("topk_chunks", backend=backend)(**arguments)


def _drawn(name: str) -> Later:
    return Later(f"{__package__}.arguments:{name}")


def _cut(arguments: dict[str, Any], names: tuple[str, ...], first: int, last: int) -> dict[str, Any]:
    return arguments | {name: arguments[name][:, first:last] for name in names if arguments.get(name) is not None}


def _cross_rows(arguments: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    """Queries first .. last-1 against the chunks they attend alone: gradients of whole key tensors are what is slow."""
    m = arguments["chunk_len"]
    start = arguments.get("query_start", 0) + first
    low = max((start + 1) // m - 1, 0)
    high = max((start + last - first) // m, low)
    cut = _cut(arguments, ("query", "rel_query"), first, last)
    cut = _cut(cut, ("key", "value", "neighbour_mask", "neighbour_gate"), low, high)
    return cut | {"query_start": start - low * m}


def _attention_rows(arguments: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    n, keys = arguments["query"].shape[1], arguments["key"].shape[1]
    offset = arguments.get("query_offset")
    if offset is None:
        offset = keys - n if arguments.get("causal") else 0
    cut = _cut(arguments, ("query", "rel_query", "query_segment"), first, last) | {"query_offset": offset + first}
    if arguments.get("rel_key") is not None and arguments.get("rel_start") is None:
        cut["rel_start"] = offset - (keys - 1)
    return cut


def _logits_rows(arguments: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    offset = arguments.get("query_offset", 0)
    cut = _cut(arguments, ("query",), first, last) | {"query_offset": offset + first}
    if arguments.get("rel_start") is None:
        cut["rel_start"] = offset - (arguments["key_len"] - 1)
    return cut


def _topk_rows(arguments: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    cut = _cut(arguments, ("query", "query_doc"), first, last)
    if arguments.get("causal_gap") is not None:
        cut["query_offset"] = arguments.get("query_offset", 0) + first
    return cut


def operators() -> list[Operator]:
    biases = ("rel_key", "rel_query", "content_bias", "position_bias")
    cross, self_, logits, topk, leaky = (
        "chunked_cross_attention",
        "relative_attention",
        "relative_logits",
        "topk_chunks",
        "leaky_average",
    )
    attention = {"outputs": ("out", "lse"), "row_axes": (1, 2)}
    return [
        Operator(
            cross,
            differentiable=("query", "key", "value", *biases, "neighbour_gate"),
            build=_drawn("chunked_cross_attention"),
            call=_attention(cross),
            work=work.chunked_cross_attention,
            rows=_cross_rows,
            **attention,
        ),
        Operator(
            self_,
            differentiable=("query", "key", "value", *biases),
            build=_drawn("relative_attention"),
            call=_attention(self_),
            work=work.relative_attention,
            rows=_attention_rows,
            **attention,
        ),
        Operator(
            logits,
            ("logits",),
            ("query", "rel_key", "position_bias"),
            _drawn("relative_logits"),
            _single(logits),
            work.relative_logits,
            rows=_logits_rows,
            row_axes=(2,),
        ),
        Operator(
            topk,
            ("scores", "indices"),
            ("query", "key"),
            _drawn("topk_chunks"),
            _topk,
            work.topk_chunks,
            rows=_topk_rows,
            row_axes=(1, 1),
            compare=Later(f"{__package__}.check.topk:compare"),
            gradients=Later(f"{__package__}.check.topk:gradients"),
        ),
        Operator(leaky, ("y",), ("x", "decay", "initial"), _drawn("leaky_average"), _single(leaky), work.leaky_average),
    ]


def kernels() -> list[Contender]:
    """Every backend of every operator, the reference included; those this machine can't run say why."""
    return [_backend(operator, name) for operator in operators() for name in BACKENDS]


def _backend(operator: Operator, backend: str) -> Contender:
    def reason(case, dtype: str, device: str) -> str | None:
        status = importlib.import_module("retro_kernels").backends()[operator.name][backend]
        return None if status else status.reason

    return Contender(
        operator.name,
        backend,
        _public(operator.name, backend=backend),
        role="reference" if backend == "reference" else "kernel",
        devices=_devices(backend),
        reason=reason,
        outputs=lambda **arguments: operator.call(arguments, backend),
    )


def _devices(backend: str) -> tuple[str, ...]:
    """Where a backend's kernels run; Triton's on CPU tensors only under its interpreter, which is checked but no
    machine to time.
    """
    if backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1":
        return ("cpu",)
    return {"cpu": ("cpu",), "triton": ("cuda",), "cuda": ("cuda",)}.get(backend, ("cpu", "cuda"))


def without_positions(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in POSITIONS}


def rows_in(operator: Operator, arguments: dict[str, Any]) -> int:
    return arguments[operator.differentiable[0]].shape[1]


def floating(arguments: dict[str, Any], names: tuple[str, ...]) -> list[str]:
    """Those of `names` that this call has as floating tensors."""
    return [n for n in names if arguments.get(n) is not None and arguments[n].is_floating_point()]
