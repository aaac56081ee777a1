"""The likelihood of a suffix given what comes before it: last words, summaries, answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from retro_model.data.tokens import PAD
from retro_model.generation.chunk_neighbours import ChunkNeighbours, Retrieve

from .scoring import evaluating


class Suffix(NamedTuple):
    """nats: negative log-likelihood summed over tokens. greedy: whether each is the likeliest. tokens: their number."""

    nats: float
    greedy: bool
    tokens: int


@torch.no_grad()
def score_suffixes(
    model: nn.Module,
    contexts: Sequence[Sequence[int]],
    suffixes: Sequence[Sequence[int]],
    *,
    retrieve: Retrieve | None = None,
    align: bool = False,
    batch_size: int = 8,
) -> list[Suffix]:
    """Loss of a model on each suffix after its context; neighbours are retrieved for every chunk that is complete.

        context, suffix = tokenizer.encode("the capital of France is"), tokenizer.encode(" Paris")
        [(nats, greedy, _)] = score_suffixes(model, [context], [suffix])

    Rows of a batch are padded on the left, under the model's mask: each row gets the score that it gets alone. A row
    longer than the model takes loses the beginning of its context.

    Args:
        model: a `Retro` or a `RetrofittedDecoder`. Runs in evaluation mode; its mode is restored.
        contexts, suffixes: token ids, at least one each.
        retrieve: as in `generate`; None: off.
        align: put `PAD` before each context so that it ends with a chunk, whose neighbours the suffix then attends
            (section 4.3). These are tokens like those between documents in training, not masked.
        batch_size: rows at a time.

    Raises: ValueError naming the argument.
    """
    m, longest = model.config.chunk_len, model.config.max_len
    if len(contexts) != len(suffixes) or not all(len(part) for part in (*contexts, *suffixes)):
        got = f"{len(contexts)} and {len(suffixes)}"
        raise ValueError(f"contexts, suffixes: expected as many of each, none empty; got {got}")
    if (most := max((len(s) for s in suffixes), default=0)) > (room := longest - (m if align else 1)):
        raise ValueError(f"suffixes: expected at most {room} tokens each, that a context fits before; got {most}")
    rows = [_row(context, suffix, m if align else 1, longest) for context, suffix in zip(contexts, suffixes)]
    # rows of like length share a batch, so that little is padding
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    results: list[Suffix] = [Suffix(0.0, True, 0)] * len(rows)
    with evaluating(model):
        for at in range(0, len(order), batch_size):
            here = order[at : at + batch_size]
            scored = _score(model, [rows[i] for i in here], [len(suffixes[i]) for i in here], retrieve)
            for i, suffix in zip(here, scored):
                results[i] = suffix
    return results


def _row(context: Sequence[int], suffix: Sequence[int], multiple: int, longest: int) -> Tensor:
    """Return the tokens of a row: padding to a multiple, the end of the context that fits, the suffix."""
    room = (longest - len(suffix)) // multiple * multiple
    context, suffix = ([int(token) for token in part] for part in (context[-room:], suffix))
    return torch.tensor([PAD] * (-len(context) % multiple) + context + suffix, dtype=torch.int64)


def _score(model, rows: list[Tensor], counts: list[int], retrieve: Retrieve | None) -> list[Suffix]:
    device, columns = next(model.parameters(), torch.empty(0)).device, max(len(row) for row in rows)
    rows = [row.to(device) for row in rows]
    tokens = torch.zeros(len(rows), columns, dtype=torch.int64, device=device)
    real = torch.zeros(len(rows), columns, dtype=torch.bool, device=device)
    for i, row in enumerate(rows):
        tokens[i, columns - len(row) :], real[i, columns - len(row) :] = row, True
    neighbours = {} if retrieve is None else ChunkNeighbours(retrieve, model.config, device).of_prompts(rows)
    mask = {getattr(model, "pads_prompts", "token_mask"): real}
    logits = model(tokens, **neighbours, **(mask if not real.all() else {}))
    scored = []
    for i, count in enumerate(counts):
        targets = tokens[i, columns - count :]
        predicted = logits[i, columns - count - 1 : columns - 1].float()
        losses = torch.nn.functional.cross_entropy(predicted, targets, reduction="none")
        scored.append(Suffix(float(losses.double().sum()), bool((predicted.argmax(-1) == targets).all()), count))
    return scored
