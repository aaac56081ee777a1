"""What every model here checks of its tokens and neighbours before it computes anything."""

from __future__ import annotations

import torch
from torch import Tensor

from retro_model import checks

from .cache import ChunkCache
from .config import RetroConfig


def check_inputs(
    config: RetroConfig,
    tokens: Tensor,
    neighbours: Tensor | None,
    mask: Tensor | None,
    device: torch.device,
    cache: ChunkCache | None = None,
) -> None:
    """tokens [B,N] that fit, neighbours [B,L,K,R] of the chunks they complete, and their mask; else TypeError or ValueError."""
    sizes: dict[str, int] = {} if cache is None else {"B": cache.batch}
    checks.shape("tokens", tokens, "B,N", sizes)
    checks.token_ids("tokens", tokens, config.vocab_size, device)
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
    checks.token_ids("neighbours", neighbours, config.vocab_size, device)
    if mask is not None:
        checks.neighbour_mask(mask, neighbours)


def _check_neighbours(config: RetroConfig, neighbours: Tensor, sizes: dict[str, int], cache: ChunkCache | None) -> None:
    if cache is not None and cache.neighbour_mask is not None:
        sizes["K"], sizes["R"] = cache.neighbour_mask.shape[-2:]  # what the cache holds
    checks.shape("neighbours", neighbours, "B,L,K,R", sizes)
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
