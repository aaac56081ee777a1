"""Checks of a model's tokens, neighbours and masks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from retro_model.base import checks

from .config import RetroConfig


class Retrieved(NamedTuple):
    """Neighbours that were retrieved for L complete chunks of each row; all fields are None without retrieval.

    neighbours: int64 [B,L,K,R]. mask: bool [B,L,K] or [B,L,K,R], True = attend; None for all.
    """

    neighbours: Tensor | None = None
    mask: Tensor | None = None


def check_inputs(config: RetroConfig, tokens: Tensor, retrieved: Retrieved, device, cache, starts) -> None:
    """Raise TypeError or ValueError unless tokens [B,N] and the neighbours of the chunks that they complete fit.

    starts: column of each row's first token, see `row_starts`.
    """
    neighbours, mask = retrieved
    sizes = checks.tokens(tokens, config, device, cache)
    if cache is None:
        checks.room(sizes["N"], 0, config.max_len, "max_len")
    else:
        checks.room(sizes["N"], cache.length, cache.capacity)
    if neighbours is None:
        if mask is not None:
            raise ValueError("neighbour_mask: expected None where neighbours is None; got a value")
        return
    if not config.retrieves:
        raise ValueError("neighbours: expected None for a model without retrieval (cca_layers=()); got a tensor")
    if cache is not None and cache.neighbour_mask is not None:
        sizes["K"], sizes["R"] = cache.neighbour_mask.shape[-2:]  # as in the earlier calls
    checks.shape("neighbours", neighbours, "B,L,K,R", sizes)
    n, m = sizes["N"], config.chunk_len
    longest = n - min(starts) if starts else n
    if cache is None and sizes["L"] != longest // m:
        raise ValueError(
            f"neighbours: expected [B,L,K,R] with L = N//chunk_len = {longest // m} complete chunks for N={longest}, "
            f"chunk_len={m}; got L={sizes['L']}"
        )
    if cache is not None and sizes["L"] != cache.completes(n):
        raise ValueError(
            f"neighbours: expected [B,L,K,R] with L = {cache.completes(n)} chunks that complete within these N={n} "
            f"tokens, chunk_len={m}, after {cache.positions} tokens; got L={sizes['L']}"
        )
    checks.token_ids("neighbours", neighbours, config.vocab_size, device)
    if mask is not None:
        checks.neighbour_mask(mask, neighbours)


def row_starts(name: str, mask: Tensor | None, tokens: Tensor) -> list[int] | None:
    """Return the column of each row's first token; None if all rows begin in column 0. Waits for the device.

    mask: [B,N], True (or 1) on a row's tokens. Padding on the right has no effect, because attention is causal.

    Raises: ValueError, naming `name`, for padding between tokens and for a row without tokens.
    """
    if mask is None:
        return None
    checks.shape(name, mask, "B,N", {"B": tokens.shape[0], "N": tokens.shape[1]})
    real = mask.bool().cpu()
    if not real.any(1).all():
        raise ValueError(f"{name}: expected at least one token in every row; got a row of padding")
    if bool((real.int().diff(dim=1) == 1).sum(1).add(real[:, 0].int()).gt(1).any()):
        raise ValueError(f"{name}: expected padding before or after a row's tokens; got some between them")
    starts = real.int().argmax(1).tolist()
    return starts if any(starts) else None


def check_positions(positions: Tensor, tokens: Tensor, mask: Tensor | None) -> None:
    """Check that position_ids [B or 1, N] increase by one from token to token. Waits for the device if N > 1.

    Rows whose positions start again hold several documents. The library attends within each, but a chunk would extend
    over two of them.

    mask: [B,N], True (or 1) on a row's tokens; None if all are.
    Raises: TypeError, ValueError, naming `position_ids`.
    """
    rows, count = tokens.shape
    checks.shape("position_ids", positions, "B,N", {"N": count} if len(positions) == 1 else {"B": rows, "N": count})
    if positions.dtype != torch.int64:
        raise TypeError(f"position_ids: expected torch.int64; got {positions.dtype}")
    if count == 1:
        return
    good = positions.diff(dim=1) == 1
    if mask is not None:
        good = good | ~(mask[:, 1:].bool() & mask[:, :-1].bool())
    if not good.all():
        wanted = "positions that increase by one from token to token of a row"
        raise ValueError(f"position_ids: expected {wanted} in a model that retrieves; got packed rows or gaps")
