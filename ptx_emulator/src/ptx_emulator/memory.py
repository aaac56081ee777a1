"""Arguments of a launch as a kernel's parameters: bytes, and the regions of memory that their addresses mean."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .parse import PtxError
from .program import Region

#: how `struct` packs a scalar of Triton's types; an integer is cut to its bytes
_FORMATS = {"fp16": "e", "fp32": "f", "f32": "f", "fp64": "d"}
_INTEGERS = {"i1": 1, "u1": 1, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "i64": 8, "u64": 8}
#: what of a tensor an argument may access
BOUNDS = ("tensor", "storage")
_TF32 = 11  # as a tensor map counts types


def elements(tensor: Tensor) -> int:
    """Return the elements of memory from a tensor's first to its last, whatever its strides."""
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride())) if tensor.numel() else 0


def replaced(launch, make: Callable[[Tensor], Tensor]):
    """Return a `Launch` with `make(tensor)` instead of each tensor. Arguments that share a tensor share one again."""
    tensors = {id(value): value for value in launch.arguments.values() if isinstance(value, Tensor)}
    made = {key: make(tensor) for key, tensor in tensors.items()}
    arguments = {name: made.get(id(value), value) for name, value in launch.arguments.items()}
    return dataclasses.replace(launch, arguments=arguments)


@dataclasses.dataclass
class Arguments:
    """Parameters of a launch while they are packed, and the regions that their addresses mean."""

    bounds: str = "tensor"
    packed: list[bytes] = dataclasses.field(default_factory=list)
    regions: dict[tuple[int, int], Region] = dataclasses.field(default_factory=dict)  # by address and bytes

    def add(self, kind: Any, value: Any, name: str, descriptors: Iterator) -> None:
        """Pack a value of one of Triton's types; a tuple's parts, and a descriptor with its shape and strides."""
        if kind == "constexpr":
            return
        if isinstance(kind, tuple):
            for part, inner in zip(kind, value, strict=True):
                self.add(part, inner, name, descriptors)
        elif kind.startswith("tensordesc"):
            self._descriptor(value, name, descriptors)
        elif kind.startswith("*") and value is not None and not isinstance(value, int):
            tensor = value if isinstance(value, Tensor) else getattr(value, "base", value)
            self._pack("Q", self.address(tensor, name))
        elif kind.startswith("*") or kind in _INTEGERS:
            value, size = value or 0, _INTEGERS.get(kind, 8)
            self.packed.append((int(value) & (2 ** (8 * size) - 1)).to_bytes(size, "little"))
        elif kind in _FORMATS:
            self._pack(_FORMATS[kind], value)
        elif kind == "bf16":
            self.packed.append(torch.tensor(value, dtype=torch.bfloat16).view(torch.int16).numpy().tobytes())
        else:
            raise PtxError(f"argument {name}: not emulated: type {kind}")

    def _pack(self, kind: str, *values) -> None:
        self.packed += [struct.pack(f"<{kind}", value) for value in values]

    def address(self, tensor: Tensor, name: str) -> int:
        """Return the address of a tensor's first element as the kernel sees it."""
        first, size = tensor.data_ptr(), elements(tensor) * tensor.element_size()
        whole = tensor.untyped_storage()
        offset = first - whole.data_ptr() if size else 0
        place, around = (first, size), (offset, max(0, whole.nbytes() - offset - size))
        if self.bounds == "storage" and size:
            place, around = (whole.data_ptr(), whole.nbytes()), (0, 0)
        region = self.regions.setdefault(place, Region(len(self.regions), *place, name, around))
        return region.address + first - region.host

    def _descriptor(self, value: Any, name: str, descriptors: Iterator) -> None:
        layout, address = next(descriptors, None), self.address(value.base, name)
        if layout is None:
            self._pack("Q", address)
            self._pack("q", *value.shape, *value.strides)
            self._pack("?", value.padding == "nan", getattr(value, "round_f32_to_tf32", False))
        else:
            self.packed.append(descriptor(address, value, layout))
        self._pack("i", *value.shape)
        self._pack("q", *value.strides)


def descriptor(address: int, value: Any, layout: dict[str, Any]) -> bytes:
    """Return a TensorMap of tensor_map.h, dimensions innermost first."""
    for feature in ("is_im2col", "fp4_padded"):
        if layout.get(feature):
            raise PtxError(f"not emulated: a tensor descriptor with {feature}")
    rank = len(value.shape)

    def five(numbers: Sequence[int]) -> list[int]:
        return [*reversed(numbers), *[0] * (5 - rank)]

    return struct.pack(
        "<QII5Q5Q5IIII", address, rank,
        _TF32 if getattr(value, "round_f32_to_tf32", False) else layout["elem_type"], *five(value.shape),
        *five([stride * layout["elem_size"] for stride in value.strides]), *five(layout["block_size"]),
        layout["swizzle"], int(value.padding == "nan"), 1,
    )  # fmt: skip
