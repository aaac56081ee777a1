"""Host time of a call: checks, choice of backend, plan, arguments and autograd.

The time is CPU time of this thread, the least of several batches: other work disturbs it little. The Triton backend
runs on a stub of a GPU (`retro_kernels.testing.stub`) that launches nothing. CPU kernels compute, on small calls.
`floor` is the time of an empty autograd function with six inputs.
"""

import contextlib
import itertools
import time
import timeit
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import retro_kernels as rk

BATCHES, CALLS = 9, 300
CHUNKS = 512  # so that the position can differ in each call
M, R, D = 8, 16, 16
#: calls with a mode "step", in which this argument grows by one each time, as in a decoder
MOVES = {"chunked_cross_attention/decode": "query_start", "relative_attention/decode": "query_offset"}


def measure(backends: tuple[str, ...] = ("cpu", "triton"), ops: tuple[str, ...] = ()) -> dict[str, float]:
    """Return {"op/backend/call/mode": seconds of a call}, with "floor/fwdbwd"."""
    times: dict[str, float] = {}
    for backend in backends:
        with _serving(backend) as serves:
            if not serves:
                continue
            for name, kw in _calls(torch.float32 if backend == "cpu" else torch.bfloat16):
                op = name.partition("/")[0]
                # `ab` measures trees that lack an op
                if (ops and op not in ops) or not rk.backends().get(op, {}).get(backend):
                    continue
                for mode, run in _modes(getattr(rk, op), kw, backend, name):
                    times[name.replace("/", f"/{backend}/") + f"/{mode}"] = seconds(run)
    times["floor/fwdbwd"] = seconds(_floor())
    return times


def seconds(run: Callable[[], Any]) -> float:
    timer = timeit.Timer(run, "import gc; gc.enable()", time.thread_time)
    timer.timeit(20)
    return min(timer.repeat(BATCHES, CALLS)) / CALLS


@contextlib.contextmanager
def _serving(backend: str) -> Iterator[bool]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if backend == "triton":
            try:
                from retro_kernels.testing import stub
            except ImportError:
                yield False
                return
            with stub.device(90):
                yield True
        else:
            yield bool(rk.backends()["leaky_average"][backend])
    finally:
        torch.set_num_threads(threads)


def _calls(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    def new(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    def biases(rows: int) -> dict[str, Tensor]:
        return {"rel_key": new(2, rows, D), "content_bias": new(2, D), "position_bias": new(2, D)}

    for name, n, start in (("decode", 1, 2 * M - 1), ("training", 2 * M, 0)):
        shape = (1, CHUNKS if n == 1 else 2, 2, R, 2, D)
        neighbours = {"key": new(*shape), "value": new(*shape), "chunk_len": M, "query_start": start}
        yield f"chunked_cross_attention/{name}", {"query": new(1, n, 2, D), **neighbours, **biases(M + R - 1)}
    for name, n in (("decode", 1), ("training", 16)):
        keys = {"key": new(1, 16, 2, D), "value": new(1, 16, 2, D), "causal": True, "rel_start": 1 - n}
        yield f"relative_attention/{name}", {"query": new(1, n, 2, D), **keys, **biases(n + 15)}
    yield "relative_logits/training", {"query": new(1, 4, 2, D), "rel_key": new(2, 7, D), "key_len": 4}
    yield "topk_chunks/decode", {"query": new(1, 4, D), "key": new(1, 64, D), "k": 2}
    yield "leaky_average/training", {"x": new(1, 16, 2, D), "decay": torch.rand(2)}
    yield "merge_attention/training", {"outs": new(2, 1, 16, 2, D), "lses": torch.randn(2, 1, 2, 16)}
    yield "rms_norm/training", {"input": new(16, D), "weight": new(D)}
    yield "cross_entropy/training", {"input": new(4, D), "target": torch.arange(4), "reduction": "none"}


def _modes(op: Callable, kw: dict[str, Any], backend: str, name: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "fwd", lambda: op(**kw, backend=backend)
    if "decode" in name:
        if moves := MOVES.get(name):
            position = itertools.count(M - 1)
            yield "step", lambda: op(**kw | {moves: next(position)}, backend=backend)
        return
    floats = {name: value for name, value in kw.items() if isinstance(value, Tensor) and value.is_floating_point()}
    leaves = {name: value.clone().requires_grad_() for name, value in floats.items()}

    def out(kw: dict[str, Any]) -> Tensor:
        outs = op(**kw, backend=backend)
        return outs[0] if isinstance(outs, tuple) else outs

    grad = torch.ones_like(out(kw))
    yield "fwdbwd", lambda: torch.autograd.grad(out(kw | leaves), tuple(leaves.values()), grad)


def _floor() -> Callable[[], Any]:
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.save_for_backward(*tensors)
            return torch.empty(1), torch.empty(1)

        @staticmethod
        def backward(ctx, *grads):
            return ctx.saved_tensors

    tensors = [torch.ones(1, requires_grad=True) for _ in range(6)]
    grad = torch.ones(1)
    return lambda: torch.autograd.grad(Nothing.apply(*tensors)[0], tensors, grad)
