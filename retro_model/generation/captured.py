"""Decode steps captured once as CUDA graphs and replayed, which leaves the host little to do for a token."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch
from torch import Tensor

WARM_RUNS = 2  # of each way before it is captured: they fill caches, compile kernels and record their plans


class DecodeStep(Protocol):
    """One token of every row of a cache, as a model's `decode_step(cache)` gives it.

    Attributes:
        tokens: int64 [B,1], the step's input.
    """

    tokens: Tensor

    def begin(self, **inputs) -> Hashable | None:
        """Takes in what else comes with the tokens, and says which way the step goes; None: the model itself is to make
        this one, with the same cache."""

    def run(self, way: Hashable) -> Tensor:
        """Logits [B,V]. A function of tensors that stay where they are: the same shapes and the same memory each time,
        and nothing that the host waits for."""

    def finish(self) -> None:
        """Advance the host's counters after a step has run."""


class CudaGraph:
    """CUDA graph of a function; its result is the same memory each time."""

    @staticmethod
    def warm(run: Callable[[], Tensor], device: torch.device) -> Tensor:
        """The function as it is, on a stream of its own, as capturing asks for."""
        with torch.cuda.device(device):
            stream, caller = torch.cuda.Stream(), torch.cuda.current_stream()
            stream.wait_stream(caller)
            with torch.cuda.stream(stream):
                result = run()
            caller.wait_stream(stream)
        return result

    def __init__(self, run: Callable[[], Tensor], device: torch.device):
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), torch.cuda.graph(self.graph):
            self.result = run()

    def replay(self) -> Tensor:
        self.graph.replay()
        return self.result


class Captured:
    """A model and its cache, decoding token by token: each way that a step goes is captured the third time.

    Example:
        decode = Captured(model, cache)   # after model.last_logits(prompts, cache=cache)
        logits = decode(token)            # [B,1] -> [B,V], to be read before the next call
    """

    graph: type[Any] = CudaGraph

    def __init__(self, model, cache):
        self.model, self.cache = model, cache
        self.step: DecodeStep = model.decode_step(cache)
        self.graphs: dict[Hashable, Any] = {}
        self.met: dict[Hashable, int] = {}

    def __call__(self, tokens: Tensor, **inputs) -> Tensor:
        way = self.step.begin(**inputs)
        if way is None:
            return self.model(tokens, cache=self.cache, **inputs)[:, -1]
        self.step.tokens.copy_(tokens)
        logits = self._run(way)
        self.step.finish()
        return logits

    def _run(self, way: Hashable) -> Tensor:
        device, run = self.step.tokens.device, functools.partial(self.step.run, way)
        if way not in self.graphs:
            self.met[way] = self.met.get(way, 0) + 1
            if self.met[way] <= WARM_RUNS:
                return self.graph.warm(run, device)
            self.graphs[way] = self.graph(run, device)  # a capture records the launches and runs none
        return self.graphs[way].replay()


def check(model, device: torch.device) -> None:
    """ValueError, naming `cuda_graph`, where the model's steps can't be captured."""
    if not hasattr(model, "decode_step"):
        raise ValueError(
            f"cuda_graph: expected False for a model without a decode_step of fixed shapes ({type(model).__name__}); "
            "got True"
        )
    if device.type != "cuda":
        raise ValueError(f"cuda_graph: expected a model on a CUDA device; got one on {device}")
