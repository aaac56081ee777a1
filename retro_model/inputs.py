"""What every model here checks of its tokens and neighbours before it computes anything."""

from __future__ import annotations

import torch
from torch import Tensor

from retro_kernels import _validate

from .config import RetroConfig


def check_inputs(config: RetroConfig, tokens: Tensor, neighbours: Tensor | None, mask: Tensor | None, device: torch.device) -> None:
    """tokens [B,N] with N <= max_len, neighbours [B,N//M,K,R] and their mask, for a model on `device`; else TypeError or ValueError."""
    sizes: dict[str, int] = {}
    _validate.shape("tokens", tokens, "B,N", sizes)
    _check_ids("tokens", tokens, config, device)
    if tokens.shape[1] > config.max_len:
        raise ValueError(f"tokens: expected N <= max_len = {config.max_len}; got N={tokens.shape[1]}")
    if neighbours is None:
        if mask is not None:
            raise ValueError("neighbour_mask: expected None where neighbours is None; got a value")
        return
    if not config.retrieves:
        raise ValueError("neighbours: expected None for a model without retrieval (cca_layers=()); got a tensor")
    _validate.shape("neighbours", neighbours, "B,L,K,R", sizes)
    complete = tokens.shape[1] // config.chunk_len
    if sizes["L"] != complete:
        raise ValueError(
            f"neighbours: expected [B,L,K,R] with L = N//chunk_len = {complete} complete chunks for N={tokens.shape[1]}, "
            f"chunk_len={config.chunk_len}; got L={sizes['L']}"
        )
    _check_ids("neighbours", neighbours, config, device)
    if mask is not None:
        check_neighbour_mask(mask, neighbours)


def check_neighbour_mask(mask: Tensor, neighbours: Tensor) -> None:
    """bool [B,L,K] or [B,L,K,R] for neighbours [B,L,K,R]; TypeError or ValueError otherwise."""
    _validate.tensor("neighbour_mask", mask)
    if mask.dtype is not torch.bool:
        raise TypeError(f"neighbour_mask: expected torch.bool, True = attend; got {mask.dtype}")
    if mask.shape not in (neighbours.shape, neighbours.shape[:3]):
        expected = list(neighbours.shape)
        raise ValueError(f"neighbour_mask: expected [B,L,K]={expected[:3]} or [B,L,K,R]={expected}; got shape {list(mask.shape)}")
    if mask.device != neighbours.device:
        raise ValueError(f"neighbour_mask: expected the device of neighbours, {neighbours.device}; got {mask.device}")


def check_tokens(name: str, ids: Tensor, vocab_size: int) -> None:
    """ValueError, naming `name`, unless all ids are in the vocabulary. Waits for the device."""
    if ids.numel():
        low, high = (int(v) for v in ids.aminmax())
        if low < 0 or high >= vocab_size:
            worst = low if low < 0 else high
            raise ValueError(f"{name}: expected token ids from 0 to V-1 = {vocab_size - 1}; got {worst}")


def _check_ids(name: str, ids: Tensor, config: RetroConfig, device: torch.device) -> None:
    """Type, device and, where that costs nothing, range."""
    if ids.dtype != torch.int64:
        raise TypeError(f"{name}: expected torch.int64 token ids; got {ids.dtype}")
    if ids.device != device:
        raise ValueError(f"{name}: expected the device of the model, {device}; got {ids.device}")
    if device.type == "cpu" and not torch.compiler.is_compiling():
        check_tokens(name, ids, config.vocab_size)
