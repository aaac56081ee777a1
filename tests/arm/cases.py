"""Calls of every op at the edges of its kernels: tiles of 4 lanes, blocks of keys and queries, single rows."""

from collections.abc import Iterator
from typing import Any

import torch

from retro_kernels.testing import inputs
from tests.ops.test_cpu_kernels import CASES

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def small(dtype: torch.dtype) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (description, op, keyword arguments) of the ops that compile within seconds."""
    yield "odd sizes", "leaky_average", inputs.leaky(4, dtype=dtype)
    yield "odd sizes", "relative_logits", inputs.relative_logits(4, dtype=dtype, B=1, N=70, H=2, key_len=90, E=5)
    if dtype == torch.float32:
        yield "odd sizes", "rms_norm", inputs.rms(4, N=35, D=43)
        yield "odd sizes", "cross_entropy", inputs.entropy(4, N=5, V=139)
    for metric in ("dot", "l2"):
        arguments = inputs.topk(4, dtype=dtype, B=2, Q=19, S=150, D=37, k=5)
        yield f"by {metric}", "topk_chunks", arguments | {"metric": metric}


def every() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (description, op, keyword arguments) of all ops, in every type."""
    for dtype in DTYPES:
        for name, sizes in CASES["chunked_cross_attention"].items():
            yield f"{name}, {dtype}", "chunked_cross_attention", inputs.cross_attention(3, dtype=dtype, **sizes)
        for name, sizes in CASES["relative_attention"].items():
            yield f"{name}, {dtype}", "relative_attention", inputs.self_attention(4, dtype=dtype, **sizes)
        for name, op, arguments in small(dtype):
            yield f"{name}, {dtype}", op, arguments
