"""Decode steps as CUDA graphs: a replayed step costs the host little."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

WARM_RUNS = 2  # runs of a kind of step before its capture: they compile kernels and fill caches


class CudaGraph:
    """CUDA graph of a function. Each replay writes the result to the same memory."""

    @staticmethod
    def warm(run: Callable[[], Tensor], device: torch.device) -> Tensor:
        """Run the function uncaptured, on a side stream, as a later capture requires."""
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
    """Decoder of a model and its cache, token by token, by the model's `decode_step(cache)` (see `RetroStep`).

    Each kind of step is captured when it comes the third time.

    Example:
        decode = Captured(model, cache)   # after model.last_logits(prompts, cache=cache)
        logits = decode(token)            # [B,1] -> [B,V]; the next call overwrites them
    """

    graph: type[Any] = CudaGraph

    def __init__(self, model, cache):
        self.model, self.cache = model, cache
        self.step = model.decode_step(cache)
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
            self.graphs[way] = self.graph(run, device)  # a capture runs no launch: the replay below does
        return self.graphs[way].replay()


def check(model, device: torch.device) -> None:
    """Raise ValueError, naming `cuda_graph`, if the model's steps can't be captured."""
    if not hasattr(model, "decode_step"):
        wanted = f"False for a model without a decode_step of fixed shapes ({type(model).__name__})"
        raise ValueError(f"cuda_graph: expected {wanted}; got True")
    if device.type != "cuda":
        raise ValueError(f"cuda_graph: expected a model on a CUDA device; got one on {device}")
