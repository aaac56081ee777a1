"""What every model here checks of its tokens and neighbours before it computes anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from retro_kernels import _validate

from .config import RetroConfig

if TYPE_CHECKING:
    from .cache import RetroCache
    from .retrofit import RetrofitCache


def check_inputs(
    config: RetroConfig,
    tokens: Tensor,
    neighbours: Tensor | None,
    mask: Tensor | None,
    device: torch.device,
    cache: RetroCache | RetrofitCache | None = None,
) -> None:
    """tokens [B,N] that fit, neighbours [B,L,K,R] of the chunks they complete, and their mask; else TypeError or ValueError."""
    sizes: dict[str, int] = {} if cache is None else {"B": cache.batch}
    _validate.shape("tokens", tokens, "B,N", sizes)
    check_ids("tokens", tokens, config.vocab_size, device)
    if cache is not None and cache.config != config:
        raise ValueError("cache: expected one of this model's configuration; got another's")
    held, room, name = (0, config.max_len, "max_len") if cache is None else (cache.length, cache.capacity, "capacity")
    if held + sizes["N"] > room:
        after = f" after the {held} held" if held else ""
        raise ValueError(f"tokens: expected N <= {room - held} ({name} = {room}{after}); got N={sizes['N']}")
    if neighbours is None:
        if mask is not None:
            raise ValueError("neighbour_mask: expected None where neighbours is None; got a value")
        return
    if not config.retrieves:
        raise ValueError("neighbours: expected None for a model without retrieval (cca_layers=()); got a tensor")
    _check_neighbours(config, neighbours, sizes, cache)
    check_ids("neighbours", neighbours, config.vocab_size, device)
    if mask is not None:
        check_neighbour_mask(mask, neighbours)


def _check_neighbours(config: RetroConfig, neighbours: Tensor, sizes: dict[str, int], cache: RetroCache | RetrofitCache | None) -> None:
    if cache is not None and cache.neighbour_mask is not None:
        sizes["K"], sizes["R"] = cache.neighbour_mask.shape[-2:]  # what the cache holds
    _validate.shape("neighbours", neighbours, "B,L,K,R", sizes)
    n, m = sizes["N"], config.chunk_len
    if cache is None and sizes["L"] != n // m:
        raise ValueError(
            f"neighbours: expected [B,L,K,R] with L = N//chunk_len = {n // m} complete chunks for N={n}, chunk_len={m}; got L={sizes['L']}"
        )
    if cache is not None and sizes["L"] != cache.completes(n):
        raise ValueError(
            f"neighbours: expected [B,L,K,R] with L = {cache.completes(n)} chunks that complete within these N={n} tokens, "
            f"chunk_len={m}, after {cache.positions} tokens; got L={sizes['L']}"
        )


def check_neighbour_mask(mask: Tensor, neighbours: Tensor, name: str = "neighbour_mask", dims: str = "B,L,K,R") -> None:
    """bool, of the shape of `neighbours` [`dims`] or without its last dimension; TypeError or ValueError, naming `name`, otherwise."""
    _validate.tensor(name, mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"{name}: expected torch.bool, True = attend; got {mask.dtype}")
    if mask.shape not in (neighbours.shape, neighbours.shape[:-1]):
        whole, each = list(neighbours.shape), dims.rpartition(",")[0]
        raise ValueError(f"{name}: expected [{each}]={whole[:-1]} or [{dims}]={whole}; got shape {list(mask.shape)}")
    if mask.device != neighbours.device:
        raise ValueError(f"{name}: expected the device of the neighbours, {neighbours.device}; got {mask.device}")


def check_tokens(name: str, ids: Tensor, vocab_size: int) -> None:
    """ValueError, naming `name`, unless all ids are in the vocabulary. Waits for the device."""
    if ids.numel():
        low, high = (int(v) for v in ids.aminmax())
        if low < 0 or high >= vocab_size:
            worst = low if low < 0 else high
            raise ValueError(f"{name}: expected token ids from 0 to V-1 = {vocab_size - 1}; got {worst}")


def check_ids(name: str, ids: Tensor, vocab_size: int, device: torch.device) -> None:
    """Type, device and, where that costs nothing, range."""
    if ids.dtype != torch.int64:
        raise TypeError(f"{name}: expected torch.int64 token ids; got {ids.dtype}")
    if ids.device != device:
        raise ValueError(f"{name}: expected the device of the model, {device}; got {ids.device}")
    if device.type == "cpu" and not torch.compiler.is_compiling():
        check_tokens(name, ids, vocab_size)
