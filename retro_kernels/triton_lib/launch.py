"""A kernel launch as a value: what `run` executes on a GPU is what `aot` compiles without one."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from triton import JITFunction


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel over one grid. `arguments` names every parameter,
    constants included; tensors may be on the meta device.
    """

    kernel: JITFunction
    grid: tuple[int, ...]
    arguments: dict[str, Tensor | int | float | bool | str | None]
    num_warps: int = 4
    num_stages: int = 2
    max_registers: int | None = None

    @property
    def name(self) -> str:
        return self.kernel.__name__.strip("_").removesuffix("_kernel")

    @property
    def options(self) -> dict[str, int]:
        """Options of Triton's compiler."""
        limit = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **limit}

    def with_arguments(self, values: list) -> Launch:
        """Return the launch with other arguments, in the kernel's order."""
        return dataclasses.replace(self, arguments=dict(zip(self.kernel.arg_names, values, strict=True)))

    def run(self):
        """Launch, and return the compiled kernel; None under Triton's interpreter."""
        return self.kernel[self.grid](**self.arguments, **self.options)


def power_of_two(n: int, least: int = 16) -> int:
    """Smallest power of two >= n and >= least: a tile's side; 16 is the smallest that a tensor-core product takes."""
    return max(least, 1 << (n - 1).bit_length())


def settled(grad: Tensor, lse: Tensor) -> Tensor:
    """A copy of the gradient [B,N,H,D] of `out`, 0 in rows that attend nothing: a caller who merges partial attentions
    may hand back NaN there (exp(lse - lse) is NaN), and the kernels multiply it by probabilities of 0."""
    return grad.masked_fill((lse == -torch.inf).transpose(1, 2).unsqueeze(-1), 0)


def strides(tensor: Tensor | None, prefix: str, letters: str) -> dict[str, int]:
    """{"stride_<prefix><letter>": stride} for the leading dimensions; zeros where there is no tensor."""
    tensor_strides = (0,) * len(letters) if tensor is None else tensor.stride()[: len(letters)]
    return {f"stride_{prefix}{letter}": s for letter, s in zip(letters, tensor_strides, strict=True)}
