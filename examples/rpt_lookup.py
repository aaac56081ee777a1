"""A small RPT that looks things up in its own past: what lies beyond its window it has to retrieve.

Every document is random: eight chunks in four pairs, then the same pairs in another order, too far away for the window.
The second chunk of a pair that returns can be told only by finding where the pair stood before. In training the right
chunk is read, and the retriever learns by LambdaRank to prefer it; afterwards the model reads what it finds itself, and
`generate` lets its index grow with every chunk.

    python examples/rpt_lookup.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from retro_model import RPT, RPTConfig, generate
from retro_model.apps.rpt.start import start_copying
from retro_model.rpt import lambda_rank

M, V, PAIRS = 8, 32, 4  # tokens a chunk, vocabulary, pairs of chunks a document

CONFIG = RPTConfig(
    V,
    d_model=64,
    d_ff=128,
    num_heads=2,
    num_layers=2,
    cca_layers=(2,),
    chunk_len=M,
    num_neighbours=1,
    segment=2 * M,
    excluded_chunks=4,
)


def documents(count: int) -> Tensor:
    """[count, 4 M PAIRS] tokens: pairs of random chunks, then the same pairs in another order."""
    pairs = torch.randint(V, (count, PAIRS, 2 * M))
    # a turn by two: nothing returns within four chunks
    return torch.cat([pairs, pairs.roll(2, dims=1)], 1).flatten(1)


def returning() -> Tensor:
    """bool [4 M PAIRS - 1]: the predictions of a second chunk whose pair returns."""
    second = torch.zeros(2 * PAIRS, 2, M, dtype=torch.bool)
    second[PAIRS:, 1] = True
    return second.flatten()[1:]


def supervision(count: int) -> tuple[Tensor, Tensor]:
    """The chunk that each should retrieve, [count,L,1] (-1: none), and its worth among all, [count,L,L]. A language
    model's scores would stand here."""
    chunks = torch.arange(2 * PAIRS, 4 * PAIRS)
    right = torch.cat([torch.arange(PAIRS, 2 * PAIRS), torch.arange(PAIRS)])
    index, worth = torch.full((4 * PAIRS, 1), -1), torch.zeros(4 * PAIRS, 4 * PAIRS)
    index[chunks, 0], worth[chunks, right] = right, 1.0
    return index.expand(count, -1, -1), worth.expand(count, -1, -1)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Nats a token of what returns."""
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")[:, returning()].mean()


def main(steps: int = 60) -> tuple[float, float]:
    """Nats a token of the second chunks that return, with the model's own retrieval and without."""
    torch.manual_seed(0)
    model = RPT(CONFIG)
    # how to read a neighbour, which takes thousands of steps to find out; not which one to retrieve
    start_copying(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    index, worth = supervision(16)
    for step in range(steps):
        tokens = documents(16)
        logits, retrieved = model(tokens, index=index, return_retrieved=True)
        reading = loss_of(logits, tokens)
        total, pairs = lambda_rank(retrieved.scores, worth, tau=1.0)
        optimizer.zero_grad()
        (reading + total / pairs).backward()
        optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            print(
                f"step {step:2d}  loss of what returns {reading.item():.3f}, of the retriever "
                f"{(total / pairs).item():.3f}"
            )

    fresh = documents(16)
    with torch.no_grad():
        logits, retrieved = model(fresh, return_retrieved=True)
        on, off = loss_of(logits, fresh).item(), loss_of(model(fresh, retrieval=False), fresh).item()
    hits = (retrieved.index == index)[:, 2 * PAIRS :].float().mean().item()
    print(f"nats a token of what returns: {on:.3f} with its own retrieval (right in {hits:.0%}), {off:.3f} without")

    (text,) = generate(model, fresh[:1, :-M], M)
    print("truth    ", *fresh[0, -M:].tolist())
    print("generated", *text[-M:].tolist())
    return on, off


if __name__ == "__main__":
    main()
