"""A kernel launch as a value: `run` executes it on a GPU, and `aot` compiles it without one."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from triton import JITFunction

from ..compile.configs import Tile


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel over one grid. `arguments` has every parameter, constants too; tensors may be on the meta device."""

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


def of_tile(kernel: JITFunction, grid: tuple[int, ...], arguments: dict, tile: Tile) -> Launch:
    """Return the launch of a kernel with a tile's blocks and options. `arguments` may have others, which it drops."""
    given = arguments | {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "PRECISION": tile.precision}
    taken = {name: given[name] for name in kernel.arg_names}
    return Launch(kernel, grid, taken, tile.num_warps, tile.num_stages, tile.max_registers)


def power_of_two(n: int, least: int = 16) -> int:
    """Return the smallest power of two >= n and >= least. A tensor-core product takes sides of at least 16."""
    return max(least, 1 << (n - 1).bit_length())


def settled(grad: Tensor, lse: Tensor) -> Tensor:
    """Return a copy of the gradient [B,N,H,D] of `out` with zeros in rows that attend nothing.

    A merge of partial attentions may return NaN there (exp(lse - lse) is NaN), and the kernels would multiply NaN by
    probabilities of 0.
    """
    return grad.masked_fill((lse == -torch.inf).transpose(1, 2).unsqueeze(-1), 0)


def strided(name: str, tensor: Tensor | None, prefix: str, letters: str) -> dict[str, Tensor | int | None]:
    """Return {"<name>_ptr": tensor, "stride_<prefix><letter>": stride} of the leading dimensions, 0 for None."""
    tensor_strides = (0,) * len(letters) if tensor is None else tensor.stride()[: len(letters)]
    return {f"{name}_ptr": tensor, **{f"stride_{prefix}{x}": s for x, s in zip(letters, tensor_strides, strict=True)}}


def table(rel_key: Tensor | None) -> dict[str, Tensor | int | None]:
    """Return the arguments of the relative keys. One table for all heads has stride 0 from head to head."""
    shared = {"stride_rh": 0} if rel_key is not None and rel_key.shape[0] == 1 else {}
    return {**strided("rel", rel_key, "r", "ht"), "T": 0 if rel_key is None else rel_key.shape[1], **shared}
