"""Checks of arguments: the functions of `retro_kernels.checks`, and checks of tokens and neighbours.

Every message names the argument, the expected value and the value that came.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from retro_kernels.checks import flag, head_dim, integer, number, probability, readable, shape, tensor

__all__ = ["RETRIEVED", "flag", "head_dim", "integer", "neighbour_mask", "number", "probability", "readable"]
__all__ += ["room", "shape", "takes", "tensor", "token_ids", "token_mask", "token_range", "tokens", "usable_device"]

#: Arguments of a model that hold retrieved neighbours.
RETRIEVED = ("neighbours", "neighbour_mask")


def neighbour_mask(mask: Tensor, neighbours: Tensor, name: str = "neighbour_mask", dims: str = "B,L,K,R") -> None:
    """Check that a mask is bool and has the shape of `neighbours`, with or without the last dimension.

    name, dims: of the mask and its dimensions, as the error prints them.
    Raises: TypeError, ValueError.
    """
    tensor(name, mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"{name}: expected torch.bool, True = attend; got {mask.dtype}")
    if mask.shape not in (neighbours.shape, neighbours.shape[:-1]):
        whole, each = list(neighbours.shape), dims.rpartition(",")[0]
        raise ValueError(f"{name}: expected [{each}]={whole[:-1]} or [{dims}]={whole}; got shape {list(mask.shape)}")
    if mask.device != neighbours.device:
        raise ValueError(f"{name}: expected the device of the neighbours, {neighbours.device}; got {mask.device}")


def token_mask(mask: Tensor | None, neighbours: Tensor) -> Tensor:
    """Return a mask of neighbours or of their tokens as one of tokens, in the shape of `neighbours`; None: all True."""
    if mask is None:
        return torch.ones_like(neighbours, dtype=torch.bool)
    return mask if mask.dim() == neighbours.dim() else mask.unsqueeze(-1).expand(neighbours.shape)


def token_range(name: str, ids: Tensor, vocab_size: int) -> None:
    """Raise ValueError unless all ids are in the vocabulary. Waits for the device."""
    if ids.numel():
        low, high = (int(v) for v in ids.aminmax())
        if low < 0 or high >= vocab_size:
            worst = low if low < 0 else high
            raise ValueError(f"{name}: expected token ids from 0 to V-1 = {vocab_size - 1}; got {worst}")


def token_ids(name: str, ids: Tensor, vocab_size: int, device: torch.device) -> None:
    """Check type and device of token ids. On a CPU, where it is cheap, check their range too, unless compiling."""
    if ids.dtype != torch.int64:
        raise TypeError(f"{name}: expected torch.int64 token ids; got {ids.dtype}")
    if ids.device != device:
        raise ValueError(f"{name}: expected the device of the model, {device}; got {ids.device}")
    if device.type == "cpu" and not torch.compiler.is_compiling():
        token_range(name, ids, vocab_size)


def tokens(tokens: Tensor, config, device: torch.device, cache=None) -> dict[str, int]:
    """Check tokens int64 [B,N] and a cache against a model's configuration; return {"B": B, "N": N}."""
    sizes: dict[str, int] = {}
    if cache is not None:
        own_cache(cache, config)
        sizes["B"] = cache.batch
    shape("tokens", tokens, "B,N", sizes)
    token_ids("tokens", tokens, config.vocab_size, device)
    return sizes


def own_cache(cache, config) -> None:
    """Raise ValueError unless the cache was made for this configuration."""
    if getattr(cache, "config", None) != config:
        got = f"a {type(cache).__name__} of another"
        raise ValueError(f"cache: expected one of this model's configuration, from its make_cache; got {got}")


def room(count: int, held: int, capacity: int, name: str = "capacity") -> None:
    """Raise ValueError if `held` + `count` tokens exceed `capacity`; the error calls the capacity `name`."""
    if held + count > capacity:
        after = f" after the {held} held" if held else ""
        raise ValueError(f"tokens: expected N <= {capacity - held} ({name} = {capacity}{after}); got N={count}")


def usable_device(device: torch.device | str) -> torch.device:
    """Return the device. Raise ValueError if torch cannot use it here."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device: expected one that torch can use here; got {device!r} ({reason})") from None


def takes(function: Callable, keywords: Iterable[str], wanted: str) -> None:
    """Raise TypeError unless a model's method takes all keywords.

    wanted: the expected signature and the protocol that it belongs to, as the error prints them.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # without a signature, like a function of C: its call reports the error
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if lacking := [keyword for keyword in keywords if keyword not in named]:
        owner = type(getattr(function, "__self__", function)).__name__
        got = f"{owner}.{getattr(function, '__name__', 'forward')} without {', '.join(lacking)}"
        raise TypeError(f"model: expected {wanted}; got {got}")
