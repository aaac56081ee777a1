"""Open-domain questions: passages as neighbours of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from retro_model.data.tokens import PAD

PASSAGE = "title: {title}, source: {source}"  # appendix C.4
NEIGHBOURS = 20  # passages that the paper gives


def passage_neighbours(
    passages: Iterable[tuple[str, str]], encode: Callable[[str], Sequence[int]], length: int, k: int = NEIGHBOURS
) -> tuple[Tensor, Tensor]:
    """Return the first k passages (title, text) as neighbours.

        passages = [("Paris", "Paris is the capital of France.")]
        neighbours, mask = passage_neighbours(passages, tokenizer.encode, length=128, k=20)
        generate(model, [prompt], 16, retrieve=same_for_every_chunk(neighbours, mask))

    Returns: tokens int64 [k,length] and mask bool [k,length]; what is longer is cut, what is missing masked.
    """
    tokens, mask = torch.full((k, length), PAD), torch.zeros(k, length, dtype=torch.bool)
    for row, (title, source) in zip(range(k), passages):
        ids = [int(token) for token in encode(PASSAGE.format(title=title, source=source))][:length]
        ids = torch.tensor(ids, dtype=torch.int64)
        tokens[row, : len(ids)], mask[row, : len(ids)] = ids, True
    return tokens, mask


def same_for_every_chunk(neighbours: Tensor, mask: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Make a `retrieve` that gives the neighbours [K,R] of one question to every chunk."""
    return lambda chunks: (neighbours.expand(len(chunks), *neighbours.shape), mask.expand(len(chunks), *mask.shape))


def aligned_prompt(tokens: Sequence[int], chunk_len: int) -> list[int]:
    """Put `PAD` before a prompt so that it ends with a chunk, whose neighbours the next tokens attend (section 4.3)."""
    return [PAD] * (-len(tokens) % chunk_len) + [int(token) for token in tokens]
