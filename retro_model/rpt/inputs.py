"""Checks of an RPT's tokens and neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

from retro_model.base import checks

from .config import OWN


def check_tokens(model, tokens: Tensor, cache) -> None:
    """Raise TypeError or ValueError unless tokens are int64 [B,N] of the vocabulary and fit the cache."""
    checks.tokens(tokens, model.config, model.embedding.weight.device, cache)
    if cache is not None and cache.capacity is not None:
        checks.room(tokens.shape[1], max(cache.positions), cache.capacity)


def neighbour_count(config, num_neighbours: int | None) -> int:
    """Return the number of neighbours of a call; None: the configuration's. Raises: TypeError, ValueError."""
    return config.num_neighbours if num_neighbours is None else checks.integer("num_neighbours", num_neighbours, low=1)


def check_index(model, tokens: Tensor, index: Tensor | None, retrieval: bool, cache) -> None:
    """Raise TypeError or ValueError unless index is int64 [B,L,K] of earlier chunks, -1 or `OWN`.

    index None: the model must have a retriever.
    """
    config = model.config
    chunks = tokens.shape[1] // config.chunk_len if cache is None else cache.completes(tokens.shape[1])
    if index is None:
        if retrieval and not config.retriever and chunks:
            raise ValueError("index: expected [B,L,K] or retrieval=False, because the model has no retriever; got None")
        return
    if not retrieval:
        why = "retrieval=False" if config.uses_neighbours else "a model without neighbours (cca_layers=())"
        raise ValueError(f"index: expected None with {why}; got a tensor")
    checks.shape("index", index, "B,L,K", {"B": tokens.shape[0]})
    if index.dtype != torch.int64:
        raise TypeError(f"index: expected torch.int64 chunk numbers; got {index.dtype}")
    if index.device != tokens.device:
        raise ValueError(f"index: expected the device of the tokens, {tokens.device}; got {index.device}")
    if index.shape[1] != chunks:
        wanted = f"L = {chunks} chunks of {config.chunk_len} that complete within these N={tokens.shape[1]} tokens"
        raise ValueError(f"index: expected [B,L,K] with {wanted}; got L={index.shape[1]}")
    if cache is not None and index.shape[2] != cache.num_neighbours:
        k = cache.num_neighbours
        raise ValueError(f"index: expected [B,L,K] with K = {k}, the cache's; got K={index.shape[2]}")
    if index.device.type != "cpu" or not index.numel() or torch.compiler.is_compiling():
        return
    own = torch.arange(chunks).view(1, -1, 1)
    if cache is not None:
        own = own + torch.tensor([p // config.chunk_len for p in cache.positions]).view(-1, 1, 1)
    if len(late := (index >= own).nonzero()):
        at = late[0].tolist()
        wanted = "chunks before the retrieving one (a neighbour is a chunk and its successor)"
        raise ValueError(f"index: expected {wanted}; got {int(index[tuple(at)])} at {at}")
    least, named = (OWN, " or -2 (OWN)") if config.retriever else (-1, "")
    if int(index.min()) < least:
        raise ValueError(f"index: expected chunk numbers, -1 (none){named}; got {int(index.min())}")
