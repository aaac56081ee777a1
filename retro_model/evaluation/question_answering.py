"""Open-domain questions: passages as neighbours, the answer generated, exact match."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from retro_model.data.tokens import PAD

PROMPT = "question: {question} \n answer:"  # section 4.3
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


def normalised(answer: str) -> str:
    """Lower case, without punctuation, articles and surplus space, as SQuAD compares answers.

    normalised("The  Eiffel Tower!") == "eiffel tower"
    """
    kept = "".join(c for c in answer.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def exact_match(answer: str, accepted: Iterable[str]) -> bool:
    """Whether an answer is one of those accepted, both normalised."""
    return normalised(answer) in {normalised(other) for other in accepted}
